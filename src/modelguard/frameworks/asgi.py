"""Middleware for Starlette, FastAPI and every other ASGI application: honest refusals, deadlines, hang-ups, probes.

::

    from modelguard.frameworks.asgi import ModelGuardMiddleware

    app.add_middleware(ModelGuardMiddleware, deadline="2s")    # Starlette, FastAPI
    app = ModelGuardMiddleware(app, deadline="2s")             # any other whose errors come out of it

Starlette answers errors itself before they come out of the application. If the middleware stands outside of it all the
same, give the application ``exception_handlers()`` as well.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from modelguard.errors import ModelGuardError
from modelguard.frameworks._answers import ANSWERED, Answer, WebOptions
from modelguard.serving.scope import Request, serving

__all__ = ["ModelGuardMiddleware", "exception_handlers"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class ModelGuardMiddleware:
    """Answers for the models behind an application.

    * ``Overloaded`` (a full queue, an open circuit, a model on its way), ``LoadFailed``, ``GuardClosed``: 503 with
      ``Retry-After`` in whole seconds. ``DeadlineExceeded``: 504. ``ItemTooHeavy``: 413. Each as
      ``application/problem+json``. Other errors, and those after the response has begun, are let through.
    * ``deadline`` bounds the batched calls of each request; a client can shorten it by a header.
    * When the client hangs up, the batched calls of its request are called off: what waits is not computed, and the
      handler gets ``CallerGone``. Nothing else of the handler is cancelled.
    * ``/livez`` tells that the process answers; ``/readyz`` that every guard has a model and no batched function is
      being closed.

    Websockets and lifespan pass through.

    Args:
        app: The application.
        options: ``deadline``, ``timeout_header``, ``livez``, ``readyz``, ``guards``, ``detail``; see
            :class:`~modelguard.frameworks._answers.WebOptions`.

    Raises:
        InvalidOption: One of them cannot be meant.
    """

    def __init__(self, app: App, **options: Any) -> None:
        self.app = app
        self._options = WebOptions(**options)
        header = self._options.timeout_header
        self._header = None if header is None else header.lower().encode("latin-1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path") or "")
        bound = self._options.probe(scope["method"], path) or self._options.bound(self._asked(scope))
        if isinstance(bound, Answer):
            await _Response(bound)(scope, receive, send)
        else:
            await self._serve(scope, receive, send, bound)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, bound: float | None) -> None:
        client = _Client(receive, bound)
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            if message["type"] == "http.response.body" and not message.get("more_body"):
                client.end()  # what goes on in the background is nobody's request
            await send(message)

        try:
            with serving(client.request):
                await self.app(scope, client.receive, sending)
        except (ModelGuardError, ExceptionGroup) as error:
            answer = self._options.answer(error)
            if answer is None or begun:
                raise
            await _Response(answer)(scope, receive, send)  # if the client is gone, the server drops it
        finally:
            client.end()

    def _asked(self, scope: Scope) -> str | None:
        if self._header is None:
            return None
        return next((value.decode("latin-1") for name, value in scope["headers"] if name.lower() == self._header), None)


def exception_handlers(*, detail: bool = False) -> dict[type[Exception], Callable[[Any, Exception], Awaitable[Any]]]:
    """Handlers for ``Starlette(exception_handlers=...)`` and ``FastAPI(exception_handlers=...)``.

    Args:
        detail: Whether an answer tells the error's own text. For development.
    """
    options = WebOptions(detail=detail)

    async def handle(_request: Any, error: Exception) -> _Response:  # async: the other kind would get a thread
        answer = options.answer(error)
        if answer is None:  # given to another error than it was made for
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
    """What a client sends, shared between the application and the look-out for its hanging up.

    The look-out begins with the first batched call of the request, and so costs nothing elsewhere. It never reads ahead
    of an application that is still reading the body.
    """

    def __init__(self, receive: Receive, bound: float | None) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._read: deque[Message] = deque()
        self._news = asyncio.Event()
        self._reading = False
        self._wanted = False
        self._over = False
        self._look_out: asyncio.Task[None] | None = None
        self.request = Request(bound, lambda: self._loop.call_soon_threadsafe(self._want))

    async def receive(self) -> Message:
        """What the application reads."""
        while not self._read:
            if self.request.gone:
                return {"type": "http.disconnect"}
            if self._looking:
                self._news.clear()
                await self._news.wait()
                continue
            self._reading, message = True, None
            try:
                message = await self._receive()
            finally:
                self._reading = False
                if self._wanted:
                    self._loop.call_soon(self._want)
            self._note(message)
            return message
        if self._wanted:
            self._loop.call_soon(self._want)
        return self._read.popleft()

    def end(self) -> None:
        """The request has been answered."""
        self.request.end()
        self._over = True
        if self._look_out is not None:
            self._look_out.cancel()

    @property
    def _looking(self) -> bool:
        return self._look_out is not None and not self._look_out.done()

    def _want(self) -> None:
        self._wanted = True
        ahead = self._read and self._read[-1].get("more_body")  # the application reads on, at its own pace
        if not (self._over or self._reading or self.request.gone or self._looking or ahead):
            self._look_out = self._loop.create_task(self._look())

    async def _look(self) -> None:
        try:
            while not self.request.gone:
                message = await self._receive()
                self._read.append(message)
                self._news.set()
                self._note(message)
                if message.get("more_body"):
                    return
        except Exception:  # noqa: BLE001 - the application gets it when it reads by itself
            return
        finally:
            self._news.set()

    def _note(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self.request.hang_up()
