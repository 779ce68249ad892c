"""Starlette: a whole program that checks itself. docs/frameworks.md explains it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

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
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with nlp, count:
        yield


async def get_count(request: Request) -> JSONResponse:
    return JSONResponse(await count.aio(request.query_params["text"]))


app = Starlette(
    routes=[Route("/count", get_count)],
    lifespan=lifespan,
    middleware=[Middleware(ModelGuardMiddleware, deadline="2s")],
)


with TestClient(app) as client:
    assert client.get("/readyz").status_code == 200
    assert client.get("/count?text=two words").json() == 2
    assert client.get("/count?text=two words", headers={"Request-Timeout": "0"}).status_code == 504
assert TestClient(app).get("/count?text=two words").status_code == 503
