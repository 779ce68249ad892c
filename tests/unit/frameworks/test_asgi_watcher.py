"""``frameworks.asgi``: what watching for a disconnect costs, when it ends, and what outlives its request."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from tests.unit.frameworks.asgi_by_hand import Client, a_turn, alone, fine, scope, serve
from tests.unit.serving.gated import Gated, until

from modelguard import batched
from modelguard.frameworks.asgi import ModelGuardMiddleware
from modelguard.serving.deadlines import left

if TYPE_CHECKING:
    from starlette.requests import Request


def test_a_request_without_batched_calls_costs_no_task() -> None:
    """And nothing is received that the application did not ask for."""
    client = Client()
    tasks: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await a_turn()
        tasks.append(len(asyncio.all_tasks()))
        await fine(scope, receive, send)

    async def main() -> None:
        await ModelGuardMiddleware(app, deadline="1s")(scope(), client.receive, client.send)
        tasks.append(len(asyncio.all_tasks()))

    asyncio.run(main())
    assert ([1, 1], []) == (tasks, client.received)


def test_a_poll_beside_a_task_that_waits_for_the_disconnect_starts_no_watcher(model: Gated) -> None:
    """As Starlette's ``is_disconnected()`` in a streaming response: the watcher would take the task's disconnect."""
    f = batched(max_size=1)(model)
    model.gate.set()
    client, inside = Client(), 0

    async def receive() -> Any:
        nonlocal inside
        inside += 1
        try:
            return await client.receive()
        finally:
            inside -= 1

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        waits = asyncio.create_task(receive())
        await a_turn()
        await f.aio(1)
        poll = asyncio.create_task(receive())
        await a_turn()
        poll.cancel()
        await asyncio.wait([poll])
        await a_turn()
        assert 1 == inside
        client.disconnect()
        assert "http.disconnect" == (await asyncio.wait_for(waits, 10))["type"]

    asyncio.run(ModelGuardMiddleware(app)(scope(), receive, client.send))


def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Drop what other tests have left."""
    gc.collect()
    caplog.clear()


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The errors that asyncio has logged, such as a task whose exception was never retrieved."""
    return [one.getMessage() for one in caplog.records if (one.name, one.levelname) == ("asyncio", "ERROR")]


@pytest.mark.parametrize("end", ["answer", "error", "deadline", "cancelled"])
def test_watching_ends_with_the_request(model: Gated, end: str, caplog: pytest.LogCaptureFixture) -> None:
    """However the request ends: no task is left, and asyncio logs no error."""
    quiet(caplog)
    f = batched(max_size=1)(model)
    if end in ("answer", "error"):
        model.gate.set()
    client = Client()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await f.aio(1)
        assert 2 <= len(asyncio.all_tasks()), "the watcher"
        if end == "error":
            raise ValueError("mine")
        await fine(scope, receive, send)

    async def main() -> None:
        middleware = ModelGuardMiddleware(app, deadline=0.05 if end == "deadline" else None)
        served = asyncio.create_task(middleware(scope(), client.receive, client.send))
        if end == "cancelled":
            await asyncio.to_thread(model.busy)
            served.cancel()
        await asyncio.wait([served])
        await alone()
        if end in ("error", "cancelled"):
            with pytest.raises(ValueError if end == "error" else asyncio.CancelledError):
                served.result()
        else:
            assert {"answer": 200, "deadline": 504}[end] == client.status

    asyncio.run(main(), debug=True)
    gc.collect()
    assert [] == complaints(caplog)


def test_a_server_that_fails_to_receive_breaks_nothing(model: Gated, caplog: pytest.LogCaptureFixture) -> None:
    """The model's answer arrives, the application gets the failure when it reads, and nothing is logged."""
    quiet(caplog)
    f = batched(max_size=1)(model)
    model.gate.set()
    client = Client()

    async def receive() -> Any:
        raise OSError("the connection is broken")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await f.aio(1)
        for _ in range(2):
            with pytest.raises(OSError, match="broken"):
                await receive()
            await a_turn()
        await fine(scope, receive, send)

    async def main() -> None:
        await ModelGuardMiddleware(app)(scope(), receive, client.send)
        await alone()

    asyncio.run(main())
    gc.collect()
    assert 200 == client.status
    assert [] == complaints(caplog)


def test_background_tasks_of_a_request_are_done(model: Gated) -> None:
    """They outlive the answer and the deadline; a client that closes after its answer cancels nothing."""
    f = batched(max_size=1)(model)
    model.gate.set()
    done: list[Any] = []

    async def later() -> None:
        await a_turn()
        done.extend([left(), await f.aio("later")])

    async def now(request: Request) -> PlainTextResponse:
        return PlainTextResponse(await f.aio("now"), background=BackgroundTask(later))

    app = Starlette(routes=[Route("/", now)], middleware=[Middleware(ModelGuardMiddleware, deadline="1m")])
    assert 200 == asyncio.run(serve(app, Client())).status
    assert [None, "later"] == done


@pytest.mark.parametrize("before", [True, False])
def test_a_task_that_outlives_its_request_is_not_cancelled(model: Gated, before: bool) -> None:  # noqa: FBT001
    """Whether the request itself had called a model or not: it was answered, so no client has disconnected."""
    f = batched(max_size=1)(model)
    model.gate.set()
    tasks: list[asyncio.Task[Any]] = []
    go = asyncio.Event()

    async def later() -> Any:
        await go.wait()
        return await f.aio("later")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if before:
            await f.aio("now")
        tasks.append(asyncio.create_task(later()))
        await fine(scope, receive, send)

    async def main() -> Any:
        client = Client()
        await ModelGuardMiddleware(app)(scope(), client.receive, client.send)
        await a_turn()
        model.gate.clear()
        go.set()
        await asyncio.to_thread(until, lambda: f.status().running + f.status().cancelled == 1)
        await a_turn()
        model.gate.set()
        return await tasks[0]

    assert "later" == asyncio.run(main())
