"""Connections made by hand: a client with a server, applications to call, and ways to disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.unit.serving.gated import Gated, until

from modelguard.frameworks.asgi import ModelGuardMiddleware

TIMEOUT = 10.0

DISCONNECT = {"type": "http.disconnect"}

Message = Any
App = Callable[[Any, Any, Any], Awaitable[None]]


async def seen(condition: Callable[[], bool]) -> None:
    """Wait in a coroutine until the condition holds; the loop goes on."""
    await asyncio.to_thread(until, condition)


async def a_turn() -> None:
    """Let other tasks on the loop go on for a while."""
    await asyncio.to_thread(lambda: None)


async def alone() -> None:
    """Check that tasks left behind end by themselves, at once."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, pending = await asyncio.wait(others, timeout=1)
        assert not pending


def piece(body: bytes = b"", *, more: bool = False) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def scope(method: str = "GET", path: str = "/", headers: dict[bytes, bytes] | None = None, **more: Any) -> Any:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": list((headers or {}).items()),
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        **more,
    }


class Client:
    """A client and the server between: what it sends can be received, and what it is sent is kept."""

    def __init__(self, *messages: Message) -> None:
        self.received: list[Message] = []
        self.sent: list[Message] = []
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._over = False
        for message in messages or (piece(),):
            self.say(message)

    def say(self, message: Message) -> None:
        self._inbox.put_nowait(message)

    def disconnect(self) -> None:
        self.say(DISCONNECT)

    async def receive(self) -> Message:
        message = DISCONNECT if self._over else await self._inbox.get()
        self._over = message == DISCONNECT
        self.received.append(message)
        return message

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.say(DISCONNECT)  # as servers do: what comes after the answer does not belong to this request

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])


async def serve(app: App, client: Client, **request: Any) -> Client:
    """Serve one request to its end, and check that it leaves no tasks."""
    await asyncio.wait_for(app(scope(**request), client.receive, client.send), TIMEOUT)
    await alone()
    return client


def ask(app: App, *, options: dict[str, Any] | None = None, **request: Any) -> Client:
    """Serve one request through a middleware, from outside of any loop."""

    async def main() -> Client:
        return await serve(ModelGuardMiddleware(app, **(options or {})), Client(), **request)

    return asyncio.run(main())


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


def raising(error: Exception) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise error

    return app


def calling(call: Callable[[], Awaitable[Any]]) -> App:
    """An application that answers after a call."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await call()
        await fine(scope, receive, send)

    return app


def never(scope: Any, receive: Any, send: Any) -> Any:
    raise AssertionError("the application is not called")


async def behind(f: Any, model: Gated) -> None:
    """Let one item be computed, so that the next one waits."""
    f.submit("first")
    await asyncio.to_thread(model.busy)


async def disconnect(app: App, client: Client, f: Any, **request: Any) -> None:
    """Begin a request, disconnect when its item waits, and check that it is cancelled."""
    served = asyncio.create_task(app(scope(**request), client.receive, client.send))
    try:
        await seen(lambda: served.done() or f.status().waiting == 1)
        assert not served.done()
        client.disconnect()
        await asyncio.wait_for(served, TIMEOUT)
    finally:
        served.cancel()
    await alone()
    assert (0, 1) == (f.status().waiting, f.status().cancelled)
    assert not client.sent or 499 == client.status, "nobody reads an answer"


async def read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        assert "http.request" == message["type"]
        body += message["body"]
        if not message["more_body"]:
            return body
