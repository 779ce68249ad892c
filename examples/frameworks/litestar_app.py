"""Litestar: a whole program that checks itself. docs/frameworks.md explains it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from litestar import Litestar, get
from litestar.params import FromQuery
from litestar.testing import TestClient

from modelguard import batched, guard
from modelguard.frameworks.litestar import ModelGuardPlugin


class Model:
    """Stands for a real model."""

    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]


nlp = guard(Model, reload_on=None, name="nlp")


@batched(max_size=32)
@nlp
def count(model: Model, texts: list[str]) -> list[int]:
    return model(texts)


@asynccontextmanager
async def lifespan(app: Litestar) -> AsyncIterator[None]:
    async with nlp, count:
        yield


@get("/count")
async def get_count(text: FromQuery[str]) -> int:
    return await count.aio(text)


app = Litestar([get_count], lifespan=[lifespan], plugins=[ModelGuardPlugin(deadline="2s")])


with TestClient(app) as client:
    assert client.get("/readyz").status_code == 200
    assert client.get("/count?text=two words").json() == 2
    assert client.get("/count?text=two words", headers={"Request-Timeout": "0"}).status_code == 504
assert TestClient(app).get("/count?text=two words").status_code == 503
