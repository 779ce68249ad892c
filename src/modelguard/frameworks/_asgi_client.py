"""An ASGI connection's client: its messages, shared between the application and a task that watches for its end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from modelguard.serving.deadlines import WebRequest

__all__ = ["Client", "Message", "Receive", "client_of"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

#: The watcher receives at most this many bytes that the application has not asked for. A disconnect comes after all
#: that a client has sent. Large enough for most bodies, small enough for hundreds of requests that wait.
_AHEAD = 256 * 1024
#: What a message counts beside its content, in bytes: the dict and the objects in it.
_MESSAGE = 512

_DISCONNECTS = frozenset({"http.disconnect", "websocket.disconnect"})


class Client:
    """A client that is not watched: the event loop is not asyncio's, as under Hypercorn with Trio.

    Attributes:
        receive: Receives the next message, for the application.
        request: What its batched calls are made for.
        disconnected: Whether the application, or the watcher, has received the disconnect.
    """

    def __init__(self, receive: Receive, timeout: float | None) -> None:
        self._receive = receive
        self.receive: Receive = self._receive_and_note
        self.request = WebRequest(timeout)
        self.disconnected = False

    def answered(self) -> None:
        """Note that the request has been answered, or that the connection has ended."""
        self.request.answered()

    async def _receive_and_note(self) -> Message:
        message = await self._receive()
        self._note(message)
        return message

    def _note(self, message: Message) -> None:
        if message["type"] in _DISCONNECTS:
            self.disconnected = True
            self.request.disconnect()


def client_of(receive: Receive, timeout: float | None) -> Client:
    """The client of a connection.

    Args:
        receive: The server's.
        timeout: Seconds that its batched calls have from now, all together; None for no bound.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return Client(receive, timeout)
    return _WatchedClient(receive, timeout, loop)


class _WatchedClient(Client):
    """A client whose messages are shared between the application and a task that watches for the disconnect.

    The task starts with the first batched call, so it costs other requests nothing. What it receives is kept for the
    application, in order. It receives a bounded amount ahead, so a slow application still slows its client.
    """

    def __init__(self, receive: Receive, timeout: float | None, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(receive, timeout)
        self._loop = loop
        self.receive = self._receive_next
        self.request = WebRequest(timeout, lambda: self._loop.call_soon_threadsafe(self._start_watching))
        self._buffer: deque[Message] = deque()  # what the watcher received, for the application
        self._ahead = 0  # its size in bytes
        self._buffered = asyncio.Event()
        self._end: Message | None = None  # the disconnect
        self._app_receives = False
        self._watch_wanted = False
        self._answered = False
        self._watcher: asyncio.Task[None] | None = None

    async def _receive_next(self) -> Message:
        while not self._buffer:
            if self._end is not None:
                return self._end
            if self._watching:
                self._buffered.clear()
                await self._buffered.wait()
                continue
            self._app_receives = True
            try:
                message = await self._receive()
            finally:
                self._app_receives = False
                self._watch_again()
            self._note(message)
            return message
        message = self._buffer.popleft()
        self._ahead -= _size(message)
        self._watch_again()
        return message

    def answered(self) -> None:
        """Note that the request has been answered, or that the connection has ended."""
        self.request.answered()
        self._answered = True
        if self._watcher is not None:
            self._watcher.cancel()

    @property
    def _watching(self) -> bool:
        return self._watcher is not None and not self._watcher.done()

    def _watch_again(self) -> None:
        if self._watch_wanted:
            self._loop.call_soon(self._start_watching)

    def _start_watching(self) -> None:
        self._watch_wanted = True
        ended = self._answered or self._end is not None
        if not (ended or self._app_receives or self._watching or self._ahead >= _AHEAD):
            self._watcher = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        try:
            while self._end is None and self._ahead < _AHEAD:
                message = await self._receive()
                self._buffer.append(message)
                self._ahead += _size(message)
                self._buffered.set()
                self._note(message)
        except Exception:  # noqa: BLE001 - the application gets the same error when it reads
            return
        finally:
            self._buffered.set()

    def _note(self, message: Message) -> None:
        super()._note(message)
        if self.disconnected:
            self._end = message


def _size(message: Message) -> int:
    content = message.get("body") or message.get("bytes") or message.get("text") or b""
    return _MESSAGE + len(content)
