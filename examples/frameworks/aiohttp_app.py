"""aiohttp: a whole program that checks itself. docs/frameworks.md explains it."""

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from modelguard import batched, guard
from modelguard.frameworks import aiohttp as modelguard_aiohttp


class Model:
    """Stands for a real model."""

    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]


nlp = guard(Model, reload_on=None, name="nlp")


@batched(max_size=32)
@nlp
def count(model: Model, texts: list[str]) -> list[int]:
    return model(texts)


async def model(app: web.Application) -> AsyncIterator[None]:
    async with nlp, count:
        yield


async def get_count(request: web.Request) -> web.Response:
    return web.json_response(await count.aio(request.query["text"]))


def create_app() -> web.Application:
    app = web.Application()
    modelguard_aiohttp.install(app, deadline="2s")
    app.cleanup_ctx.append(model)
    app.router.add_get("/count", get_count)
    return app


async def ask() -> None:
    async with TestClient(TestServer(create_app())) as client:
        assert (await client.get("/readyz")).status == 200
        assert await (await client.get("/count?text=two words")).json() == 2
        late = await client.get("/count?text=two words", headers={"Request-Timeout": "0"})
        assert late.status == 504
        await count.aclose()  # as at the end of the service
        closed = await client.get("/count?text=two words")
        assert (closed.status, "Retry-After" in closed.headers) == (503, True)


asyncio.run(ask())
asyncio.run(ask())  # the next test
