"""Middleware for Starlette, FastAPI and any other ASGI application: error responses, deadlines, disconnects, probes.

::

    from modelguard.frameworks.asgi import ModelGuardMiddleware

    app.add_middleware(ModelGuardMiddleware, deadline="2s")    # Starlette, FastAPI
    app = ModelGuardMiddleware(app, deadline="2s")             # any other application that lets errors propagate

Starlette answers errors itself before it raises them again; its error page is replaced. ``exception_handlers()`` is for
applications without the middleware.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from modelguard import _units
from modelguard.errors import ModelGuardError
from modelguard.frameworks._answers import ANSWERED, Answer, Ready, WebOptions
from modelguard.serving.deadlines import WebRequest, on_behalf_of

__all__ = ["ModelGuardMiddleware", "exception_handlers"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ModelGuardMiddleware:
    """Turns modelguard's errors into responses, and limits the time of the batched calls of each request.

    * ``Overloaded`` (a full queue, an open circuit, a model that is being loaded), ``LoadFailed`` and ``GuardClosed``
      become 503 with ``Retry-After`` in whole seconds, and ``QuotaExceeded`` becomes 429 with it. ``DeadlineExceeded``
      becomes 504, ``ItemTooHeavy`` 413. Each response is ``application/problem+json``. Other errors, and errors after
      the response has begun, propagate.
    * ``deadline`` limits the time of the batched calls of each request; a client can shorten it with a header.
    * When the client disconnects, the batched calls of its request are cancelled: waiting items are not computed, and
      the handler gets ``CallerGone``. Nothing else in the handler is cancelled.
    * ``/livez`` responds 200 while the process can respond at all; ``/readyz`` responds 200 while every guard has a
      model and no batched function is being closed.

    Websocket and lifespan connections are not changed.

    Args:
        app: The application.
        deadline: Bound on the batched calls of every request, from its arrival. Default: no bound.
        timeout_header: The header with which a client can shorten it, in seconds; None to read none.
        livez: Path of the liveness probe; None to leave it to the application.
        readyz: Path of the readiness probe; None to leave it to the application.
        guards: What ``readyz`` asks. Default: all guards and batched functions of the process.
        detail: Whether a response contains the error's own text, with names of functions and figures. For development.
        fair_by: Whose a request is, so that callers share every batched function fairly: the name of a header, or a
            function of the ASGI scope that gives a key, anything hashable. Requests without the header share one key.
            Whoever can set the header can choose any key, so name one that your proxy sets. Default: nobody's; no
            header is read.
        priority: How urgent a request is, compared with others under the same key: a function of the ASGI scope that
            gives a whole number from 0 to 1,000. Default: 0.

    Raises:
        InvalidOption: An option is invalid.
    """

    def __init__(
        self,
        app: App,
        *,
        deadline: _units.Duration | None = None,
        timeout_header: str | None = "Request-Timeout",
        livez: str | None = "/livez",
        readyz: str | None = "/readyz",
        guards: Iterable[Ready] | None = None,
        detail: bool = False,
        fair_by: str | Callable[[Scope], Hashable] | None = None,
        priority: Callable[[Scope], int] | None = None,
    ) -> None:
        self.app = app
        self._options = WebOptions(
            deadline=deadline,
            timeout_header=timeout_header,
            livez=livez,
            readyz=readyz,
            guards=guards,
            detail=detail,
            fair_by=fair_by,
            priority=priority,
        )
        self._timeout_header = _header_name(timeout_header)
        self._key_header = _header_name(fair_by if isinstance(fair_by, str) else None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path") or "")
        timeout = self._options.probe(scope["method"], path) or self._options.timeout(
            _header(scope, self._timeout_header)
        )
        if isinstance(timeout, Answer):
            await _Response(timeout)(scope, receive, send)
        else:
            await self._serve(scope, receive, send, timeout)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, timeout: float | None) -> None:
        client = _client(receive, timeout)
        response = _Held(client, send)
        try:
            key, priority = self._options.identify(scope, _header(scope, self._key_header))
            with on_behalf_of(client.request, key, priority):
                await self.app(scope, client.receive, response.send)
            await response.release()
        except (ModelGuardError, ExceptionGroup) as error:
            answer = self._options.answer(error)
            if answer is None or response.begun:
                await response.release()
                raise
            await _Response(answer)(scope, receive, send)  # the server drops it if the client has disconnected
        except BaseException:
            await response.release()
            raise
        finally:
            client.answered()


def _header_name(name: str | None) -> bytes | None:
    return None if name is None else name.lower().encode("latin-1")


def _header(scope: Scope, wanted: bytes | None) -> str | None:
    """The value of a header; several are joined, as a proxy would."""
    if wanted is None:
        return None
    values = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == wanted]
    return ", ".join(values) if values else None


def exception_handlers(*, detail: bool = False) -> dict[type[Exception], Callable[[Any, Exception], Awaitable[Any]]]:
    """Make handlers for ``Starlette(exception_handlers=...)`` and ``FastAPI(exception_handlers=...)``.

    Args:
        detail: Whether a response contains the error's own text. For development.
    """
    options = WebOptions(detail=detail)

    async def handle(_request: Any, error: Exception) -> _Response:  # async, or Starlette would run it in a thread
        answer = options.answer(error)
        if answer is None:  # registered for an error that it does not handle
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


class _Held:
    """The response of an application. An error page is held back until it is known what it stands for.

    A mounted Starlette or FastAPI application answers 500 to every error before it raises it again. If that is an error
    of modelguard, its own answer is sent instead.
    """

    def __init__(self, client: _PlainClient, send: Send) -> None:
        self._client = client
        self._send = send
        self._held: list[Message] = []
        self.begun = False

    async def send(self, message: Message) -> None:
        """Send a message, or hold it back."""
        kind = message["type"]
        if kind == "http.response.body" and not message.get("more_body"):
            self._client.answered()  # background tasks do not belong to the request
        error_page = kind == "http.response.start" and message["status"] == HTTPStatus.INTERNAL_SERVER_ERROR
        if error_page or (len(self._held) == 1 and kind == "http.response.body" and not message.get("more_body")):
            self._held.append(message)
            return
        await self.release()
        self.begun = self.begun or kind == "http.response.start"
        await self._send(message)

    async def release(self) -> None:
        """Send what was held back."""
        held, self._held = self._held, []
        self.begun = self.begun or bool(held)
        for message in held:
            await self._send(message)


class _PlainClient:
    """A client that is not watched: the event loop is not asyncio's, as under Hypercorn with Trio."""

    def __init__(self, receive: Receive, timeout: float | None) -> None:
        self.receive = receive
        self.request = WebRequest(timeout)

    def answered(self) -> None:
        """Note that the request has been answered."""
        self.request.answered()


def _client(receive: Receive, timeout: float | None) -> _PlainClient:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _PlainClient(receive, timeout)
    return _Client(receive, timeout, loop)


class _Client(_PlainClient):
    """The messages of a client, shared between the application and a task that watches for the disconnect.

    The task starts with the first batched call of the request, so it costs other requests nothing. While the
    application is still reading the body, the task does not read ahead of it.
    """

    def __init__(self, receive: Receive, timeout: float | None, loop: asyncio.AbstractEventLoop) -> None:
        self._receive = receive
        self._loop = loop
        self.receive = self._receive_next
        self._buffer: deque[Message] = deque()  # what the watcher received, for the application
        self._buffered = asyncio.Event()
        self._app_receives = False
        self._watch_wanted = False
        self._answered = False
        self._watcher: asyncio.Task[None] | None = None
        self.request = WebRequest(timeout, lambda: self._loop.call_soon_threadsafe(self._start_watching))

    async def _receive_next(self) -> Message:
        """Receive the next message, for the application."""
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
        """Note that the request has been answered."""
        self.request.answered()
        self._answered = True
        if self._watcher is not None:
            self._watcher.cancel()

    @property
    def _watching(self) -> bool:
        return self._watcher is not None and not self._watcher.done()

    def _start_watching(self) -> None:
        self._watch_wanted = True
        body_ahead = self._buffer and self._buffer[-1].get("more_body")  # the application has to read it first
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
