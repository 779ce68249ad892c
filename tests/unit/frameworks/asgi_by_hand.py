"""Connections made by hand: a client with the server between, applications to ask, and ways to hang up."""

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


async def seen(told: Callable[[], bool]) -> None:
    """Wait in a coroutine until it is so; the loop goes on."""
    await asyncio.to_thread(until, told)


async def a_turn() -> None:
    """Let the others on the loop go on for a while."""
    await asyncio.to_thread(lambda: None)


async def alone() -> None:
    """Tasks that were left behind end by themselves, at once."""
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
    """A client by hand, with the server between: what it says can be received, and what it was told is kept."""

    def __init__(self, *says: Message) -> None:
        self.received: list[Message] = []
        self.told: list[Message] = []
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._over = False
        for message in says or (piece(),):
            self.say(message)

    def say(self, message: Message) -> None:
        self._inbox.put_nowait(message)

    def hang_up(self) -> None:
        self.say(DISCONNECT)

    async def receive(self) -> Message:
        message = DISCONNECT if self._over else await self._inbox.get()
        self._over = message == DISCONNECT
        self.received.append(message)
        return message

    async def send(self, message: Message) -> None:
        self.told.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.say(DISCONNECT)  # as servers do: what comes after the answer is no part of this request

    @property
    def status(self) -> int:
        return int(self.told[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.told[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.told[1:])


async def serve(app: App, client: Client, **request: Any) -> Client:
    """One request, to its end; nothing of it is left."""
    await asyncio.wait_for(app(scope(**request), client.receive, client.send), TIMEOUT)
    await alone()
    return client


def ask(app: App, *, options: dict[str, Any] | None = None, **request: Any) -> Client:
    """The same through a middleware, from outside of any loop."""

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
    raise AssertionError("the application is not asked")


async def behind(f: Any, model: Gated) -> None:
    """One item is being computed; the next one waits."""
    f.submit("first")
    await asyncio.to_thread(model.busy)


async def hang_up(app: App, client: Client, f: Any, **request: Any) -> None:
    """Begin a request, hang up when its item waits, and see it called off."""
    serving = asyncio.create_task(app(scope(**request), client.receive, client.send))
    try:
        await seen(lambda: serving.done() or f.status().waiting == 1)
        assert not serving.done()
        client.hang_up()
        await asyncio.wait_for(serving, TIMEOUT)
    finally:
        serving.cancel()
    await alone()
    assert (0, 1) == (f.status().waiting, f.status().cancelled)
    assert not client.told or 499 == client.status, "there is nobody to tell"


async def read(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        assert "http.request" == message["type"]
        body += message["body"]
        if not message["more_body"]:
            return body
