"""A service for Kubernetes: deployment.yaml beside this file runs it.

To start it here, under a memory limit: systemd-run --user --scope -p MemoryMax=4G uvicorn app:app
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from pydantic import BaseModel

from modelguard import TTL, Loading, MemoryLimit, Swap, guard
from modelguard.frameworks.asgi import ModelGuardMiddleware


class Model:
    """Stands for yours."""

    def words(self, text: str) -> list[str]:
        return text.split()


words = guard(
    Model,
    reload_on=TTL("12h") | MemoryLimit("80%"),  # of the container's limit, which deployment.yaml sets
    loading=Loading("60s"),  # the longest load: probes and the grace period in deployment.yaml allow for it
    swap=Swap(drain_timeout="30s"),
    name="words",
)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with words:  # loads here, closes at shutdown
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(ModelGuardMiddleware, deadline="10s", guards=[words])  # answers /livez and /readyz too


class Page(BaseModel):
    text: str


@app.post("/words")
@words
def split(model: Model, page: Page) -> list[str]:
    return model.words(page.text)
