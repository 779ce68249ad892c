"""``frameworks.asgi``: websockets: overload, deadlines, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Mount, WebSocketRoute
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from tests.unit.frameworks.asgi_by_hand import TIMEOUT, Client, a_turn, alone, behind, seen
from tests.unit.frameworks.refusals import ERRORS, FIGURE, IDS, NAME

from modelguard import batched, deadline
from modelguard.errors import CallerGone, QueueFull
from modelguard.frameworks.asgi import ModelGuardMiddleware, exception_handlers
from modelguard.serving import left

if TYPE_CHECKING:
    from tests.unit.serving.gated import Gated

CONNECT = {"type": "websocket.connect"}
ACCEPT = {"type": "websocket.accept"}
GONE = {"type": "websocket.disconnect", "code": 1006}
DENIAL = {"extensions": {"websocket.http.response": {}}}


def text(number: int) -> dict[str, str]:
    return {"type": "websocket.receive", "text": str(number)}


def socket(**more: Any) -> Any:
    return {"type": "websocket", "path": "/livez", "headers": [(b"request-timeout", b"soon")], **more}


async def accepting(receive: Any, send: Any) -> None:
    assert CONNECT == await receive()
    await send(ACCEPT)


async def connection(app: Any, client: Client, **scope: Any) -> None:
    await ModelGuardMiddleware(app, deadline="1s")(socket(**scope), client.receive, client.send)


def raising(error: BaseException, *, accepted: bool = True) -> Callable[..., Awaitable[None]]:
    """An application that raises before or after it has accepted the connection."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if accepted:
            await accepting(receive, send)
        raise error

    return app


# Errors


@pytest.mark.parametrize(("error", "expected", "retry"), ERRORS, ids=IDS)
def test_an_error_closes_the_connection(error: Exception, expected: dict[str, Any], retry: float | None) -> None:
    """With a code that says what to do, and a reason that reveals nothing internal; the server sees no error."""
    client = Client(CONNECT)
    asyncio.run(connection(raising(error), client))
    if isinstance(error, CallerGone):
        assert [ACCEPT] == client.sent, "nobody is there"
        return
    _, closed = client.sent
    code = 1009 if expected["status"] == 413 else 1013
    assert ("websocket.close", code) == (closed["type"], closed["code"])
    assert 0 < len(closed["reason"].encode()) <= 123
    assert NAME not in closed["reason"]


def test_an_error_before_the_connection_is_accepted_is_a_response() -> None:
    """Where the server can send one (503, with the time to come back); elsewhere the connection is closed."""
    full = QueueFull(NAME, queued=FIGURE, retry_after=3)
    client = Client(CONNECT)
    asyncio.run(connection(raising(full, accepted=False), client, **DENIAL))
    start, body = client.sent
    assert ("websocket.http.response.start", 503) == (start["type"], start["status"])
    assert 3 <= int(dict(start["headers"])[b"retry-after"]) <= 5
    assert "websocket.http.response.body" == body["type"]
    assert b"Service Unavailable" in body["body"]
    client = Client(CONNECT)
    asyncio.run(connection(raising(full, accepted=False), client))
    assert [("websocket.close", 1013)] == [(one["type"], one["code"]) for one in client.sent]


def test_a_long_text_of_an_error_is_shortened() -> None:
    """A reason has at most 123 bytes, and is cut between characters."""
    client = Client(CONNECT)
    app = ModelGuardMiddleware(raising(QueueFull("é" * 200, queued=1, retry_after=1)), detail=True)
    asyncio.run(app(socket(), client.receive, client.send))
    assert 121 <= len(client.sent[-1]["reason"].encode()) <= 123


def test_other_errors_and_errors_after_the_end_pass_through() -> None:
    """They are the application's, and the server logs them."""
    client = Client(CONNECT)
    with pytest.raises(ValueError, match="mine"):
        asyncio.run(connection(raising(ValueError("mine")), client))
    assert [ACCEPT] == client.sent

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await accepting(receive, send)
        await send({"type": "websocket.close", "code": 1000})
        raise QueueFull(NAME, queued=1, retry_after=1)

    with pytest.raises(QueueFull):
        asyncio.run(connection(app, Client(CONNECT)))


# Deadlines


def test_a_connection_has_no_deadline() -> None:
    """It may stay open for hours, and the header of its first request means nothing; a message has its own block."""
    found: list[float | None] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(left())
        with deadline("5s"):
            found.append(left())

    asyncio.run(connection(app, Client(CONNECT)))
    assert found[0] is None
    assert found[1] is not None
    assert 4 < found[1] <= 5


# Disconnects


def test_a_disconnect_cancels_what_waits(model: Gated) -> None:
    """The item is not computed, and the application still receives each message, and then the disconnect."""
    f = batched(max_size=1)(model)
    client = Client(CONNECT, *map(text, range(20)))
    heard: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await accepting(receive, send)
        await receive()
        try:
            await f.aio(1)
        except CallerGone:
            heard.extend([await receive() for _ in range(21)])
            raise

    async def main() -> None:
        await behind(f, model)
        served = asyncio.ensure_future(connection(app, client))
        await seen(lambda: f.status().waiting == 1)
        client.say(GONE)
        await asyncio.wait_for(served, TIMEOUT)
        await alone()

    asyncio.run(main())
    assert [*map(text, range(1, 20)), GONE, GONE] == heard
    assert ([ACCEPT], 1) == (client.sent, f.status().cancelled)
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_messages_arrive_in_order_while_the_client_is_watched(model: Gated) -> None:
    """A conversation: each message is answered, the next one may come early or late, and nothing is lost."""
    f = batched(max_size=4)(model)
    model.gate.set()
    client = Client(CONNECT)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await accepting(receive, send)
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": await f.aio(message["text"])})

    async def main() -> None:
        served = asyncio.ensure_future(connection(app, client))
        for number in range(300):
            if number % 3:
                await seen(lambda count=number: len(client.sent) == 1 + count)  # type: ignore[misc]
            client.say(text(number))
            if number % 7 == 0:
                await a_turn()
        await seen(lambda: len(client.sent) == 301)
        client.say(GONE)
        await asyncio.wait_for(served, TIMEOUT)
        await alone()

    asyncio.run(main())
    assert [str(number) for number in range(300)] == [message["text"] for message in client.sent[1:]]


def test_messages_are_read_ahead_within_bounds(model: Gated) -> None:
    """A client that sends without a break while the model computes is slowed down."""
    f = batched(max_size=1)(model)
    client = Client(CONNECT, *({"type": "websocket.receive", "bytes": bytes(100_000)} for _ in range(50)))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await accepting(receive, send)
        await f.aio(1)

    async def main() -> None:
        served = asyncio.ensure_future(connection(app, client))
        await asyncio.to_thread(model.busy)
        for _ in range(20):
            await a_turn()
        model.gate.set()
        await asyncio.wait_for(served, TIMEOUT)
        await alone()

    asyncio.run(main())
    assert 2 <= len(client.received) <= 1 + 3 + 1


# Frameworks


def service(kind: Any, f: Any, *, handlers: Any = None, mine: bool = True) -> Any:
    """An application with a websocket that calls a model for each message."""

    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                await websocket.send_text(str(await f.aio(await websocket.receive_text())))

    async def refuse(websocket: WebSocket) -> None:
        raise QueueFull(NAME, queued=FIGURE, retry_after=3)

    routes = [WebSocketRoute("/talk", talk), WebSocketRoute("/refuse", refuse)]
    inner = kind(routes=routes, exception_handlers=handlers)
    middleware = [Middleware(ModelGuardMiddleware, deadline="1s")] if mine else []
    return Starlette(routes=[Mount("/", app=inner)], middleware=middleware)


@pytest.mark.parametrize("kind", [Starlette, FastAPI])
@pytest.mark.parametrize("arranged", ["middleware", "handlers", "both"])
def test_frameworks_close_websockets_under_overload(model: Gated, kind: Any, arranged: str) -> None:
    """With the middleware, with the handlers alone, and with both: no error reaches the server."""
    f = batched(max_size=1, max_queue=1)(model)
    app = service(
        kind, f, handlers=exception_handlers() if arranged != "middleware" else None, mine=arranged != "handlers"
    )
    with TestClient(app) as client:
        with pytest.raises(WebSocketDenialResponse) as denied, client.websocket_connect("/refuse"):
            pass
        assert 503 == denied.value.status_code
        f.submit("first")
        model.busy()
        second = f.submit("second")
        with client.websocket_connect("/talk") as talk:
            talk.send_text("third")
            with pytest.raises(WebSocketDisconnect) as closed:
                talk.receive_text()
        assert 1013 == closed.value.code
        model.gate.set()
        second.result(60)
        with client.websocket_connect("/talk") as talk:
            for word in ("a", "b"):
                talk.send_text(word)
                assert word == talk.receive_text()
