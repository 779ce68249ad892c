"""Sanic: a whole program that checks itself. docs/frameworks.md explains it."""

from sanic import Request, Sanic, response
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


words = Sanic("words")


@words.before_server_start
async def start(app: Sanic) -> None:
    await nlp.aload()


@words.before_server_stop
async def stop(app: Sanic) -> None:
    await count.aclose()
    await nlp.aclose()


@words.get("/count")
async def get_count(request: Request) -> response.HTTPResponse:
    return response.json(await count.aio(request.args.get("text")))


app = ModelGuardMiddleware(words, deadline="2s")


with TestClient(app) as client:
    assert client.get("/readyz").status_code == 200
    assert client.get("/count?text=two words").json() == 2
    assert client.get("/count?text=two words", headers={"Request-Timeout": "0"}).status_code == 504
