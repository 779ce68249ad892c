"""Gradio: a whole program that checks itself. docs/frameworks.md explains it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import gradio
from fastapi import FastAPI
from fastapi.testclient import TestClient
from gradio_client import Client
from gradio_client.exceptions import AppError

from modelguard import batched, guard
from modelguard.errors import DeadlineExceeded, Overloaded
from modelguard.frameworks.asgi import ModelGuardMiddleware
from modelguard.serving import deadline


class Model:
    """Stands for a real model."""

    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]


nlp = guard(Model, reload_on=None, name="nlp")


@batched(max_size=32)
@nlp
def count(model: Model, texts: list[str]) -> list[int]:
    return model(texts)


async def words(text: str, seconds: float = 10) -> int:
    try:
        with deadline(seconds):
            return await count.aio(text)
    except (Overloaded, DeadlineExceeded) as error:
        raise gradio.Error("The model is busy. Please try again.") from error


demo = gradio.Interface(words, ["text", "number"], "number", api_name="count", concurrency_limit=64)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with nlp, count:
        yield


app = FastAPI(lifespan=lifespan)
app.add_middleware(ModelGuardMiddleware)
gradio.mount_gradio_app(app, demo, path="/ui")


with nlp, count:
    _, url, _ = demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
    client = Client(url, verbose=False)
    assert client.predict("two words", 10, api_name="/count") == 2
    try:
        client.predict("two words", 0, api_name="/count")
    except AppError as error:
        assert "The model is busy" in str(error)
    calls = [client.submit("two words", 10, api_name="/count") for _ in range(40)]
    assert {2} == {call.result(60) for call in calls}
demo.close()

with TestClient(app) as browser:
    assert browser.get("/readyz").status_code == 200
    assert browser.get("/ui/").status_code == 200
assert TestClient(app).get("/readyz").status_code == 503
