"""A text-to-speech service on CPU that does not grow with each new length of text.

To start it here: modelguard run --preset torch-cpu-dynamic --allocator auto -- gunicorn app:app
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import torch
from fastapi import FastAPI
from pydantic import BaseModel, Field
from voice import Voice, encode, load

from modelguard import MemoryGrowth, guard
from modelguard.adapters.torch import bucketed

voice = guard(load, reload_on=MemoryGrowth("500 MB"), name="voice")  # the net below all that follows


@bucketed("text", mask="mask")  # pads texts up to few lengths, and cuts the sound back
@voice  # hands the model in
@torch.inference_mode()
def sound(model: Voice, text: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return model(text, mask)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with voice:  # loads here, closes at shutdown
        yield


app = FastAPI(lifespan=lifespan)


class Page(BaseModel):
    text: str = Field(min_length=1, max_length=4000)


@app.post("/speak")
def speak(page: Page) -> list[float]:
    return sound(encode(page.text))[0].tolist()


@app.get("/status")
def status() -> dict[str, Any]:
    return asdict(voice.status())
