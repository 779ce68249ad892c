"""The service as it was first written. To start it here: gunicorn --workers 4 naive:app, or that with --preload"""

import gc
import os

from flask import Flask, request
from label import load, words

model = load()
app = Flask(__name__)


@app.post("/labelservice/")
def label() -> dict[str, object]:
    return {"words": words(model, request.get_data(as_text=True)), "worker": os.getpid()}


@app.post("/collect")
def collect() -> dict[str, object]:
    """Do at once what Python does by itself sooner or later."""
    return {"garbage": gc.collect(), "worker": os.getpid()}
