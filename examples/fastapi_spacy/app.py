"""A FastAPI service around ja_ginza whose memory does not grow for ever. To start it here: uvicorn app:app"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from threading import Lock
from typing import Any

import spacy
from fastapi import FastAPI
from pydantic import BaseModel
from spacy.language import Language

from modelguard import TTL, MemoryGrowth, Uses, guard

# spaCy keeps every word that it has ever seen. A fresh model starts over, and the old one's memory goes back.
nlp = guard(
    lambda: spacy.load("ja_ginza"),
    reload_on=TTL("1h") | Uses(1_000_000) | MemoryGrowth(os.environ.get("MAX_GROWTH", "500 MB")),
    warmup=lambda model: model("銀座でランチをご一緒しましょう。"),  # so that no request pays for the first call
    swap="drain_first",  # never two copies in memory; a request that comes during the load waits for it
    name="ja_ginza",
)
one_at_a_time = Lock()  # Sudachi, ja_ginza's tokenizer, fails when two threads use it at once


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with nlp:  # loads here, closes at shutdown
        yield


app = FastAPI(lifespan=lifespan)


class Page(BaseModel):
    text: str


@app.post("/entities")
@nlp  # hands the model in; a call keeps its copy to the end, even if a newer one takes over meanwhile
def entities(model: Language, page: Page) -> list[str]:
    with one_at_a_time:
        return [entity.text for entity in model(page.text).ents]


@app.post("/tokens")
@nlp
def tokens(model: Language, page: Page) -> list[str]:
    with one_at_a_time:
        return [token.text for token in model.make_doc(page.text)]


@app.get("/status")
def status() -> dict[str, Any]:
    return asdict(nlp.status())
