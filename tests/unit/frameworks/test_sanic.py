"""Sanic under the ASGI middleware, with the real Sanic: it answers errors itself and raises none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from modelguard import batched
from modelguard.errors import DeadlineExceeded
from modelguard.frameworks.asgi import ModelGuardMiddleware

sanic = pytest.importorskip("sanic", reason="needs Sanic, whose uvloop other servers would use: see CONTRIBUTING.md")
httpx = pytest.importorskip("httpx2")

Served = Callable[[str], Awaitable[Any]]


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[Served]:
    """Start an application as a server does; gives what asks it."""
    events, answers = asyncio.Queue[Any](), asyncio.Queue[Any]()
    life = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, events.get, answers.put))
    await events.put({"type": "lifespan.startup"})
    assert {"type": "lifespan.startup.complete"} == await answers.get()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client.get
    await events.put({"type": "lifespan.shutdown"})
    await life


def application(name: str, gate: threading.Event) -> Any:
    app = sanic.Sanic(name)
    app.config.TOUCHUP = False  # it rewrites its own class, once in a process

    @batched(max_size=1, max_queue=1)
    def double(items: list[str]) -> list[str]:
        gate.wait(30)
        return [item * 2 for item in items]

    @app.get("/double")
    async def answer(request: Any) -> Any:
        return sanic.response.text(await double.aio(request.args.get("text")))

    @app.get("/group")
    async def group(request: Any) -> Any:
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(double.aio("group"))
        return sanic.response.text(task.result())

    @app.get("/own")
    async def own(request: Any) -> Any:
        raise ValueError("the service's own")

    return app


def test_sanic_answers_as_modelguard_says() -> None:
    """Late is 504, a full queue 503 with Retry-After, also from a task group; other errors stay Sanic's own 500."""
    gate = threading.Event()

    async def asked() -> None:
        async with served(ModelGuardMiddleware(application("answers", gate), deadline="200ms")) as get:
            answers = await asyncio.gather(*(get(f"/double?text={number}") for number in range(4)))
            assert [503, 503, 504, 504] == sorted(answer.status_code for answer in answers)
            assert {"application/problem+json"} == {answer.headers["content-type"] for answer in answers}
            assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
            assert 504 == (await get("/group")).status_code
            gate.set()
            assert 500 == (await get("/own")).status_code
            assert (200, "aa") == ((answer := await get("/double?text=a")).status_code, answer.text)

    asyncio.run(asked())


def test_a_handler_of_the_application_stays() -> None:
    """What a Sanic application has for an error of modelguard counts."""
    gate = threading.Event()
    app = application("handlers", gate)
    app.error_handler.add(DeadlineExceeded, lambda request, error: sanic.response.text("late", 418))

    async def asked() -> None:
        async with served(ModelGuardMiddleware(app, deadline="100ms")) as get:
            assert 418 == (await get("/double?text=a")).status_code
        gate.set()

    asyncio.run(asked())
