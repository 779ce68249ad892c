"""Middleware for Starlette, FastAPI and any other ASGI application: refusals, deadlines, disconnects and probes.

::

    from modelguard.frameworks.asgi import ModelGuardMiddleware

    app.add_middleware(ModelGuardMiddleware, deadline="2s")    # Starlette, FastAPI
    app = ModelGuardMiddleware(app, deadline="2s")             # any other whose errors come out of it

Starlette answers errors itself before they come out of the application. If the middleware has to wrap the application
from outside, give the application ``exception_handlers()`` as well.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from modelguard.errors import ModelGuardError
from modelguard.frameworks._answers import ANSWERED, Answer, WebOptions
from modelguard.serving.deadlines import WebRequest, on_behalf_of

__all__ = ["ModelGuardMiddleware", "exception_handlers"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ModelGuardMiddleware:
    """Turns modelguard's errors into responses, and bounds the batched calls of each request.

    * ``Overloaded`` (a full queue, an open circuit, a model that is being loaded), ``LoadFailed`` and ``GuardClosed``
      become 503 with ``Retry-After`` in whole seconds. ``DeadlineExceeded`` becomes 504, ``ItemTooHeavy`` 413. Each
      response is ``application/problem+json``. Other errors, and errors after the response has begun, pass through.
    * ``deadline`` bounds the batched calls of each request; a client can shorten it with a header.
    * When the client disconnects, the batched calls of its request are cancelled: what waits is not computed, and the
      handler gets ``CallerGone``. Nothing else in the handler is cancelled.
    * ``/livez`` answers 200 while the process can answer; ``/readyz`` while every guard has a model and no batched
      function is being closed.

    Websockets and lifespan pass through.

    Args:
        app: The application.
        options: ``deadline``, ``timeout_header``, ``livez``, ``readyz``, ``guards``, ``detail``; see
            :class:`~modelguard.frameworks._answers.WebOptions`.

    Raises:
        InvalidOption: One of them is invalid.
    """

    def __init__(self, app: App, **options: Any) -> None:
        self.app = app
        self._options = WebOptions.read(options)
        header = self._options.timeout_header
        self._header = None if header is None else header.lower().encode("latin-1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path") or "")
        timeout = self._options.probe(scope["method"], path) or self._options.timeout(self._timeout_header(scope))
        if isinstance(timeout, Answer):
            await _Response(timeout)(scope, receive, send)
        else:
            await self._serve(scope, receive, send, timeout)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, timeout: float | None) -> None:
        client = _Client(receive, timeout)
        begun = False

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            if message["type"] == "http.response.body" and not message.get("more_body"):
                client.answered()  # what goes on in the background belongs to no request
            await send(message)

        try:
            with on_behalf_of(client.request):
                await self.app(scope, client.receive, watched_send)
        except (ModelGuardError, ExceptionGroup) as error:
            answer = self._options.answer(error)
            if answer is None or begun:
                raise
            await _Response(answer)(scope, receive, send)  # the server drops it if the client is gone
        finally:
            client.answered()

    def _timeout_header(self, scope: Scope) -> str | None:
        if self._header is None:
            return None
        return next((value.decode("latin-1") for name, value in scope["headers"] if name.lower() == self._header), None)


def exception_handlers(*, detail: bool = False) -> dict[type[Exception], Callable[[Any, Exception], Awaitable[Any]]]:
    """Handlers for ``Starlette(exception_handlers=...)`` and ``FastAPI(exception_handlers=...)``.

    Args:
        detail: Whether a response contains the error's own text. For development.
    """
    options = WebOptions(detail=detail)

    async def handle(_request: Any, error: Exception) -> _Response:  # Starlette runs other functions in a thread
        answer = options.answer(error)
        if answer is None:  # registered for an error that it is not made for
            raise error
        return _Response(answer)

    return dict.fromkeys(ANSWERED, handle)


class _Response:
    """An answer as an ASGI application."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - as ASGI calls it
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._answer.headers]
        await send({"type": "http.response.start", "status": self._answer.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else self._answer.body
        await send({"type": "http.response.body", "body": body})


class _Client:
    """What a client sends, shared between the application and a task that watches for its disconnect.

    The task starts with the first batched call of the request, so other requests do not pay for it. It never reads
    ahead of an application that is still reading the body.
    """

    def __init__(self, receive: Receive, timeout: float | None) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Message] = deque()  # what the watcher received, for the application
        self._buffered = asyncio.Event()
        self._app_receives = False
        self._watch_wanted = False
        self._answered = False
        self._watcher: asyncio.Task[None] | None = None
        self.request = WebRequest(timeout, lambda: self._loop.call_soon_threadsafe(self._start_watching))

    async def receive(self) -> Message:
        """What the application reads."""
        while not self._buffer:
            if self.request.disconnected:
                return {"type": "http.disconnect"}
            if self._watching:
                self._buffered.clear()
                await self._buffered.wait()
                continue
            self._app_receives = True
            try:
                message = await self._receive()
            finally:
                self._app_receives = False
                if self._watch_wanted:
                    self._loop.call_soon(self._start_watching)
            self._check_disconnect(message)
            return message
        if self._watch_wanted:
            self._loop.call_soon(self._start_watching)
        return self._buffer.popleft()

    def answered(self) -> None:
        """The request has been answered."""
        self.request.answered()
        self._answered = True
        if self._watcher is not None:
            self._watcher.cancel()

    @property
    def _watching(self) -> bool:
        return self._watcher is not None and not self._watcher.done()

    def _start_watching(self) -> None:
        self._watch_wanted = True
        body_ahead = self._buffer and self._buffer[-1].get("more_body")  # the application reads on at its own pace
        ended = self._answered or self.request.disconnected
        if not (ended or self._app_receives or self._watching or body_ahead):
            self._watcher = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        try:
            while not self.request.disconnected:
                message = await self._receive()
                self._buffer.append(message)
                self._buffered.set()
                self._check_disconnect(message)
                if message.get("more_body"):
                    return
        except Exception:  # noqa: BLE001 - the application gets the same error when it reads
            return
        finally:
            self._buffered.set()

    def _check_disconnect(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.request.disconnect()
