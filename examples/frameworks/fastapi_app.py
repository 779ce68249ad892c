"""FastAPI: a whole program that checks itself. docs/frameworks.md explains it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient

from modelguard import batched, guard
from modelguard.frameworks.asgi import ModelGuardMiddleware


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
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with nlp, count:  # loads; at the end computes what waits, and releases the model
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(ModelGuardMiddleware, deadline="2s")  # 503, 504, /livez and /readyz


@app.get("/count")
async def get_count(text: str) -> int:
    return await count.aio(text)  # in a plain def route: count(text)


@nlp
async def counted(model: Model, text: str) -> int:
    return model([text])[0]


async def leased() -> AsyncIterator[Model]:  # for several steps on one generation
    async with nlp.lease() as model:
        yield model


@app.get("/counted")
async def get_counted(words: Annotated[int, Depends(counted)]) -> int:
    return words


@app.get("/steps")
async def get_steps(text: str, model: Annotated[Model, Depends(leased, scope="function")]) -> list[int]:
    return [*model([text]), *model([text.upper()])]


for _ in range(3):
    with TestClient(app) as client:
        assert client.get("/readyz").status_code == 200
        for path in ("/count", "/counted"):
            assert client.get(path, params={"text": "two words"}).json() == 2
        assert client.get("/steps", params={"text": "two words"}).json() == [2, 2]
        assert client.get("/count", params={"text": "two words"}, headers={"Request-Timeout": "0"}).status_code == 504

for path in ("/count", "/counted", "/steps"):
    closed = TestClient(app).get(path, params={"text": "two words"})  # after the end of the lifespan
    assert (closed.status_code, "retry-after" in closed.headers) == (503, True)
assert TestClient(app).get("/readyz").status_code == 503
