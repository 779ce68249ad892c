"""The guarded service with its model in worker processes: no request waits for a reload.

To start it here: uvicorn isolated:app
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel

from modelguard import TTL, MemoryGrowth, Uses, guard, isolate

if TYPE_CHECKING:
    from spacy.language import Language


def load() -> "Language":
    import spacy  # only here: the server's own process needs neither the library nor the model

    return spacy.load("ja_ginza")


nlp = guard(
    load,
    reload_on=TTL("1h") | Uses(1_000_000) | MemoryGrowth(os.environ.get("MAX_GROWTH", "500 MB")),
    warmup=lambda model: model("銀座でランチをご一緒しましょう。"),
    name="ja_ginza",
)


@isolate(workers=1, timeout="30s")  # a worker runs one call at a time, so Sudachi needs no lock
@nlp
def read(model: "Language", text: str, what: Literal["entities", "tokens"]) -> list[str]:
    found = model(text).ents if what == "entities" else model.make_doc(text)
    return [part.text for part in found]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with read:  # starts the processes here, ends them at shutdown
        yield


app = FastAPI(lifespan=lifespan)


class Page(BaseModel):
    text: str


@app.post("/entities")
async def entities(page: Page) -> list[str]:
    return await read.aio(page.text, "entities")


@app.post("/tokens")
async def tokens(page: Page) -> list[str]:
    return await read.aio(page.text, "tokens")


@app.get("/status")
def status() -> dict[str, Any]:
    return asdict(read.status())
