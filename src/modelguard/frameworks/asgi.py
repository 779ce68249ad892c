"""Middleware for Starlette, FastAPI and any other ASGI application: error responses, deadlines, disconnects, probes.

::

    from modelguard.frameworks.asgi import ModelGuardMiddleware

    app.add_middleware(ModelGuardMiddleware, deadline="2s")    # Starlette, FastAPI
    app = ModelGuardMiddleware(app, deadline="2s")             # any other application that lets errors propagate

Starlette answers errors itself before it raises them again; its error page is replaced. Sanic answers them and raises
none; put the middleware around the Sanic application itself, which then gets handlers for modelguard's errors.
``exception_handlers()`` is for applications without the middleware.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import nullcontext, suppress
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any, Never, Unpack

from modelguard import _units
from modelguard.errors import InvalidOption, ModelGuardError
from modelguard.frameworks._answers import ANSWERED, CLIENT_GONE, TOO_LARGE, Answer
from modelguard.frameworks._web import Options, Web
from modelguard.serving.deadlines import WebRequest

__all__ = ["ModelGuardMiddleware", "exception_handlers"]

# An ASGI connection's client: its messages, shared between the application and a task that watches for its end.


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

#: The watcher receives at most this many bytes that the application has not asked for. A disconnect comes after all
#: that a client has sent. Large enough for most bodies, small enough for hundreds of requests that wait.
_AHEAD = 256 * 1024
#: What a message counts beside its content, in bytes: the dict and the objects in it.
_MESSAGE = 512

_DISCONNECTS = frozenset({"http.disconnect", "websocket.disconnect"})


class Client:
    """A client whose messages are shared between the application and a task that watches for the disconnect.

    The task starts with the first batched call, so it costs other requests nothing. What it receives is kept for the
    application, in order. It receives a bounded amount ahead, so a slow application still slows its client.
    """

    def __init__(self, receive: Receive, timeout: float | None) -> None:
        self._receive = receive
        # None if it is not asyncio's, as under Hypercorn with Trio: nobody watches there.
        self._loop = asyncio._get_running_loop()  # noqa: SLF001 - the public one raises where there is none
        self.request = WebRequest(timeout, self._called)
        self._buffer: deque[Message] = deque()  # what the watcher received, for the application
        self._ahead = 0  # its size in bytes
        self.end: Message = {}  # the disconnect, once the application or the watcher has received it
        self._turn = nullcontext() if self._loop is None else asyncio.Lock()  # one receives at a time
        self._watch_wanted = False
        self._answered = False
        self._watcher: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        """Receive the next message, for the application."""
        if not (self._buffer or self.end):
            async with self._turn:
                if not (self._buffer or self.end):  # else the watcher has received it
                    await self._take()
        if not self._buffer:
            return self.end
        message = self._buffer.popleft()
        self._ahead -= _size(message)
        if self._loop is not None and self._watch_wanted:
            self._loop.call_soon(self._start_watching)
        return message

    def answered(self) -> None:
        """Note that the request has been answered, or that the connection has ended."""
        self.request.answered()
        self._answered = True
        if self._watcher is not None:
            self._watcher.cancel()

    def _called(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_watching)

    def _start_watching(self) -> None:
        self._watch_wanted = True
        watching = self._watcher is not None and not self._watcher.done()
        if not (self._answered or self.end or watching or self._ahead >= _AHEAD):
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        with suppress(Exception):  # the application gets the same error when it reads
            while not self.end and self._ahead < _AHEAD:
                async with self._turn:
                    if not self.end:  # else the application has received it
                        await self._take()

    async def _take(self) -> None:
        message = await self._receive()
        self._buffer.append(message)
        self._ahead += _size(message)
        if message["type"] in _DISCONNECTS:
            self.end = message
            self.request.disconnect()


def _size(message: Message) -> int:
    content = message.get("body") or message.get("bytes") or message.get("text") or b""
    return _MESSAGE + len(content)


# Answers as ASGI messages: to an HTTP request, and on a websocket.


Scope = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

#: Close codes of a websocket, by the status that a request would get: "message too big", and for all others
#: "try again later" (RFC 6455 and IANA's registry).
_TOO_BIG, _TRY_AGAIN_LATER = 1009, 1013
#: The longest reason for closing a websocket, in bytes (RFC 6455).
_LONGEST_REASON = 123
#: The extension with which a websocket that was not accepted can be answered like a request.
_DENIAL = "websocket.http.response"


async def respond(answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - as ASGI calls it
    """Send an answer. A partial of it is an ASGI application."""
    await _send_answer(send, "http.response", answer, answer.body_for(scope.get("method")))


#: Seconds that an error page is held back while the application goes on: with background tasks, and raises nothing.
_PATIENCE = 0.25


class HeldResponse:
    """The response of an application. An error page is held back until it is known what it stands for.

    A mounted Starlette or FastAPI application answers 500 to every error before it raises it again, at once. If that is
    an error of modelguard, its own answer is sent instead.
    """

    def __init__(self, scope: Scope, client: Client, send: Send) -> None:
        self._scope = scope
        self._client = client
        self._send = send
        self._held: list[Message] = []
        self._releasing: asyncio.Task[None] | None = None
        self.begun = False

    async def send(self, message: Message) -> None:
        """Send a message, or hold it back."""
        kind = message["type"]
        last = kind == "http.response.body" and not message.get("more_body")
        if last:
            self._client.answered()  # background tasks do not belong to the request
        error_page = kind == "http.response.start" and message["status"] == HTTPStatus.INTERNAL_SERVER_ERROR
        if error_page or (last and len(self._held) == 1):
            self._held.append(message)
            if last:
                self._look_later()
            return
        await self.release()
        self.begun = self.begun or kind == "http.response.start"
        await self._send(message)

    async def refuse(self, answer: Answer) -> None:
        """Send this answer instead of what was held back. The server drops it if the client has disconnected."""
        self._held = []
        await respond(answer, self._scope, self._client.receive, self._send)

    def _look_later(self) -> None:
        with suppress(RuntimeError):  # on Trio the page waits for the application's end
            loop = asyncio.get_running_loop()
            loop.call_later(_PATIENCE, self._look, loop, loop.time())

    def _look(self, loop: asyncio.AbstractEventLoop, since: float) -> None:
        if not self._held:
            return
        if loop.time() - since < 2 * _PATIENCE:
            self._releasing = loop.create_task(self._release())
        else:  # something has held the loop up, and so the application
            self._look_later()

    async def release(self) -> None:
        """Send what was held back."""
        if self._releasing is not None:
            await self._releasing
        await self._release()

    async def _release(self) -> None:
        held, self._held = self._held, []
        self.begun = self.begun or bool(held)
        for message in held:
            await self._send(message)


class WebsocketEnd:
    """Ends a websocket with an answer: as a response if it was not accepted yet, else by closing it."""

    def __init__(self, scope: Scope, send: Send, client: Client | None = None, *, accepted: bool = False) -> None:
        self._can_deny = _DENIAL in (scope.get("extensions") or {})
        self._send = send
        self._client = client
        self._accepted = accepted
        self.begun = False

    async def send(self, message: Message) -> None:
        """Send a message of the application, and note what it does."""
        kind = message["type"]
        self._accepted = self._accepted or kind == "websocket.accept"
        if kind == "websocket.close" or kind.startswith(_DENIAL):
            self.begun = True
            if self._client is not None:
                self._client.answered()
        await self._send(message)

    async def refuse(self, answer: Answer) -> None:
        """End the connection with this answer. Nothing is sent to a client that has disconnected."""
        self.begun = True
        if answer.status == CLIENT_GONE or (self._client is not None and self._client.end):
            return
        if not self._accepted and self._can_deny:
            await _send_answer(self._send, _DENIAL, answer, answer.body)
            return
        code = _TOO_BIG if answer.status == TOO_LARGE else _TRY_AGAIN_LATER
        reason = answer.detail.encode()[:_LONGEST_REASON].decode(errors="ignore")
        await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def release(self) -> None:
        """As of a response; nothing is held back here."""


async def _send_answer(send: Send, kind: str, answer: Answer, body: bytes) -> None:
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers.items()]
    await send({"type": f"{kind}.start", "status": answer.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})


App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: How many callers up a framework is looked for that makes its middleware at the first connection.
_NEAR = 6


def _made_at_first_connection() -> bool:
    """Whether the middleware is being made while its application is called, as Starlette does it.

    The first connection is that of the lifespan protocol, and servers take an error there for a lack of support.
    """
    near = islice(traceback.walk_stack(sys._getframe(2)), _NEAR)  # noqa: SLF001 - the public one may return None
    scopes = (frame.f_locals.get("scope") for frame, _ in near)
    kinds = {scope.get("type") for scope in scopes if isinstance(scope, Mapping)}
    return not kinds.isdisjoint({"lifespan", "http", "websocket"})


_APP_FIX = "Give the application itself, not its name; modelguard.frameworks.wsgi is for Flask and other WSGI ones."


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

    On a websocket the errors above end the connection: with the same response where it was not accepted yet and the
    server allows that, else with close code 1013 (try again later), or 1009 for ``ItemTooHeavy``. A disconnect cancels
    what is being computed. ``deadline`` and the header do not apply: write ``with deadline(...):`` around the work for
    a message.

    Starlette and FastAPI make their middleware when the server starts the application, so an invalid option stops the
    start, with the message in the server's log. Where lifespan is off, it is raised at each connection.

    Args:
        app: The application.
        deadline: Bound on the batched calls of every request, from its arrival. Default: no bound.
        timeout_header: The header with which a client can shorten it, in seconds; None to read none. Default:
            ``Request-Timeout``.
        livez: Path of the liveness probe; None to leave it to the application. Default: ``/livez``.
        readyz: Path of the readiness probe; None to leave it to the application. Default: ``/readyz``.
        admin: A route to show, reload, unload, pause and resume guards: :mod:`modelguard.frameworks.admin`. Default:
            none.
        guards: What ``readyz`` asks. Default: all guards and batched functions of the process.
        detail: Whether a response contains the error's own text, with names of functions and figures. For development.
        fair_by: Whose a request is, so that callers share every batched function fairly: the name of a header, or a
            function of the ASGI scope that gives a key, anything hashable. Requests without the header share one key.
            Whoever can set the header can choose any key, so name one that your proxy sets. Default: nobody's; no
            header is read.
        priority: How urgent a request is, compared with others under the same key: a function of the ASGI scope that
            gives a whole number from 0 to 1,000. Default: 0.

    Raises:
        InvalidOption: An option is invalid, or there is no such option; or ``app`` is no ASGI application.
    """

    below = ""  #: The path of which all of the application's are parts, and its probes too.
    invalid: InvalidOption | None = None  #: What is wrong with its options, if it was made at the first connection.

    def __init__(self, app: App, *misplaced: Never, **options: Unpack[Options]) -> None:
        self.app = app
        try:
            self._web = Web.read(options, misplaced)
            _units.called_as("an ASGI application", app, "app", 3, fix=_APP_FIX)
        except InvalidOption as error:
            if not _made_at_first_connection():
                raise
            self.invalid = error
        else:
            _answer_inside_sanic(app, self._web)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if self.invalid is not None:
            await _stop_start(self.invalid, scope, receive, send)
        serve = {"http": self._serve_http, "websocket": self._serve_websocket}.get(scope["type"], self.app)
        await serve(scope, receive, send)

    async def _serve_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path") or "").removeprefix(self.below)
        query = scope.get("query_string", b"").decode("latin-1")
        step = await self._web.areceive(scope["method"], path, query, partial(_header, scope))
        if isinstance(step, Answer):
            await respond(step, scope, receive, send)
            return
        client = Client(receive, step)
        await self._serve(scope, client, HeldResponse(scope, client, send))

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(receive, None)
        await self._serve(scope, client, WebsocketEnd(scope, send, client))

    async def _serve(self, scope: Scope, client: Client, end: HeldResponse | WebsocketEnd) -> None:
        try:
            with self._web.serving(client.request, scope, partial(_header, scope)) as behalf, behalf:
                await self.app(scope, client.receive, end.send)
        except (ModelGuardError, ExceptionGroup) as error:
            answer = self._web.answer(error)
            if answer is not None and not end.begun:
                await end.refuse(answer)
            # else a server would log the error, and nobody is there for the rest of the response
            elif answer is None or answer.status != CLIENT_GONE or not client.end:
                raise
        finally:
            client.answered()
            await end.release()


def _answer_inside_sanic(app: Any, web: Web) -> None:
    """Have a Sanic application give modelguard's answers: it answers every error itself, and raises none."""
    if not any(kind.__module__ == "sanic.app" for kind in type(app).__mro__):
        return
    respond: Any = importlib.import_module("sanic.response").HTTPResponse

    def handle(_request: object, error: Exception) -> Any:
        answer = web.answer(error)
        return None if answer is None else respond(answer.body, answer.status, answer.headers)

    for kind in ANSWERED:
        if (kind, None) not in app.error_handler.cached_handlers:  # else the application has a handler of its own
            app.error_handler.add(kind, handle)


def _header(scope: Scope, name: str) -> str | None:
    """The value of a header; several are joined, as a proxy would."""
    wanted = name.lower().encode("latin-1")
    values = [value.decode("latin-1") for name, value in scope["headers"] if name.lower() == wanted]
    return ", ".join(values) if values else None


def exception_handlers(*, detail: bool = False) -> dict[type[Exception], Callable[[Any, Exception], Awaitable[Any]]]:
    """Make handlers for ``Starlette(exception_handlers=...)`` and ``FastAPI(exception_handlers=...)``.

    Args:
        detail: Whether a response contains the error's own text. For development.
    """
    web = Web(detail=detail)

    async def handle(connection: Any, error: Exception) -> App | None:  # async: Starlette would start a thread
        answer = web.answer_or_raise(error)
        if getattr(connection, "scope", {}).get("type") != "websocket":
            return partial(respond, answer)
        accepted = connection.application_state.name != "CONNECTING"
        await WebsocketEnd(connection.scope, connection.send, accepted=accepted).refuse(answer)
        return None

    return dict.fromkeys(ANSWERED, handle)


async def _stop_start(error: InvalidOption, scope: Scope, receive: Receive, send: Send) -> Never:
    """Have the server end: by the lifespan protocol a failed start is not mistaken for anything else.

    The error is raised all the same, for servers and test clients that look at the application's errors.
    """
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.failed", "message": f"modelguard: {error}"})
    raise error
