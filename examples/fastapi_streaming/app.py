"""Texts word by word as server-sent events: one batch writes for many clients at once. To start it: uvicorn app:app"""

import json
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from modelguard import batched, guard
from modelguard.errors import ModelGuardError
from modelguard.frameworks.asgi import ModelGuardMiddleware
from modelguard.serving import Stream

TEXT = """the model writes a word and the next word and the word after that until the text is long enough and every
client of the batch gets its own word as soon as the model has written it and a client that leaves gets no word"""
#: Seconds for a step of the model, and most words of a text.
STEP, MOST = float(os.environ.get("STEP", "0.05")), int(os.environ.get("MOST", "30"))


class Model:
    """Knows which words follow a word. A language model would compute one step for all texts of the batch at once."""

    def __init__(self) -> None:
        words = TEXT.split()
        self.following: dict[str, list[str]] = {}
        for word, following in zip(words, [*words[1:], words[0]], strict=True):
            self.following.setdefault(word, []).append(following)

    def step(self, texts: list[list[str]], chances: list[random.Random]) -> list[str]:
        time.sleep(STEP)
        return [
            chance.choice(self.following.get(text[-1], ["the"])) for text, chance in zip(texts, chances, strict=True)
        ]


model = guard(Model, reload_on=None, name="model")


@batched(max_size=8, deadline="60s")
@model
def generate(model: Model, prompts: list[str]) -> Iterator[list[str | type[StopIteration]]]:
    texts = [prompt.split() or ["the"] for prompt in prompts]
    chances = [random.Random(prompt) for prompt in prompts]  # the same prompt gives the same text
    ends = [len(text) + MOST for text in texts]
    while True:
        words = model.step(texts, chances)
        for text, word in zip(texts, words, strict=True):
            text.append(word)
        yield [StopIteration if len(text) > end else word for text, word, end in zip(texts, words, ends, strict=True)]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with model, generate:
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(ModelGuardMiddleware)  # 503 when the queue is full; a client that leaves drops out of its batch


@app.get("/generate")
async def get_generate(prompt: str) -> StreamingResponse:
    words = generate.stream(prompt)  # queued here: a refusal is answered with 503, before the response begins
    return StreamingResponse(events(words), media_type="text/event-stream")


async def events(words: Stream[str]) -> AsyncIterator[str]:
    async with words:
        try:
            async for word in words:
                yield f"data: {json.dumps(word)}\n\n"
        except ModelGuardError as error:  # the response has begun, so the client learns it from an event
            yield f"event: error\ndata: {json.dumps(type(error).__name__)}\n\n"
        else:
            yield "event: end\ndata: null\n\n"


@app.get("/status")
def status() -> dict[str, Any]:
    return {"queue": asdict(generate.status()), "model": asdict(model.status())}
