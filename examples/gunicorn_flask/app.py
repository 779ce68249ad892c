"""The same service with one copy of the model for all of its workers.

To start it here: gunicorn -c python:modelguard.frameworks.gunicorn --workers 4 app:app
"""

import gc
import os
from dataclasses import asdict
from typing import Any

from flask import Flask, request
from label import load, words

from modelguard import MemoryGrowth, guard

# The parent loads it, and workers are forked from there. One that has grown makes place for a fresh fork.
model = guard(
    load,
    reload_on=MemoryGrowth("200 MB"),
    warmup=lambda model: words(model, "我来到北京清华大学。"),
    prefork=True,
    name="words",
)
cut = model(words)  # hands the model in
app = Flask(__name__)


@app.post("/labelservice/")
def label() -> dict[str, object]:
    return {"words": cut(request.get_data(as_text=True)), "worker": os.getpid()}


@app.post("/collect")
def collect() -> dict[str, object]:
    """Do at once what Python does by itself sooner or later."""
    return {"garbage": gc.collect(), "worker": os.getpid()}


@app.get("/status")
def status() -> dict[str, Any]:
    return asdict(model.status())
