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

import functools
import importlib
import sys
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar, cast

from modelguard import _units
from modelguard.errors import InvalidOption, ModelGuardError
from modelguard.frameworks._answers import ANSWERED, CLIENT_GONE, Answer, Ready, WebOptions
from modelguard.frameworks._asgi_answers import HeldResponse, Response, Scope, Send, WebsocketEnd
from modelguard.frameworks._asgi_client import Receive, client_of
from modelguard.frameworks._asgi_threads import answer_of
from modelguard.frameworks._option_names import check_names
from modelguard.frameworks.admin import Admin, check_admin
from modelguard.serving.deadlines import on_behalf_of

__all__ = ["ModelGuardMiddleware", "exception_handlers"]

Init = TypeVar("Init", bound=Callable[..., None])
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: How many callers up a framework is looked for that makes its middleware at the first connection.
_NEAR = 6


def _check_options(init: Init) -> Init:
    """Have the constructor of the middleware leave an invalid option to :meth:`__call__` where it has to."""
    named = check_names(init)

    @functools.wraps(init)
    def checked(self: ModelGuardMiddleware, *args: Any, **options: Any) -> None:
        try:
            named(self, *args, **options)
        except InvalidOption as error:
            if not _made_at_first_connection():
                raise
            self.invalid = error

    return cast("Init", checked)


def _made_at_first_connection() -> bool:
    """Whether the middleware is being made while its application is called, as Starlette does it.

    The first connection is that of the lifespan protocol, and servers take an error there for a lack of support.
    """
    frame = sys._getframe(3)  # noqa: SLF001 - the public one may return None
    for _ in range(_NEAR):
        scope = frame.f_locals.get("scope")
        if isinstance(scope, Mapping) and scope.get("type") in {"lifespan", "http", "websocket"}:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


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
        timeout_header: The header with which a client can shorten it, in seconds; None to read none.
        livez: Path of the liveness probe; None to leave it to the application.
        readyz: Path of the readiness probe; None to leave it to the application.
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
        InvalidOption: An option is invalid, or there is no such option.
    """

    invalid: InvalidOption | None = None  #: What is wrong with its options, if it was made at the first connection.

    @_check_options
    def __init__(
        self,
        app: App,
        *,
        deadline: _units.Duration | None = None,
        timeout_header: str | None = "Request-Timeout",
        livez: str | None = "/livez",
        readyz: str | None = "/readyz",
        admin: Admin | None = None,
        guards: Iterable[Ready] | None = None,
        detail: bool = False,
        fair_by: str | Callable[[Scope], Hashable] | None = None,
        priority: Callable[[Scope], int] | None = None,
    ) -> None:
        self.app = app
        self._admin = check_admin(admin)
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
        _answer_inside_sanic(app, self._options)
        self._timeout_header = _header_name(timeout_header)
        self._key_header = _header_name(fair_by if isinstance(fair_by, str) else None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if self.invalid is not None:
            await _stop_start(self.invalid, scope, receive, send)
        elif scope["type"] == "http":
            await self._serve_http(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._serve_websocket(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path") or "")
        command = None if self._admin is None else _admin_command(self._admin, scope, path)
        if command is not None:
            await Response(await answer_of(command))(scope, receive, send)
            return
        timeout = self._options.probe(scope["method"], path) or self._options.timeout(
            _header(scope, self._timeout_header)
        )
        if isinstance(timeout, Answer):
            await Response(timeout)(scope, receive, send)
        else:
            await self._serve_request(scope, receive, send, timeout)

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send, timeout: float | None) -> None:
        client = client_of(receive, timeout)
        response = HeldResponse(client, send)
        try:
            key, priority = self._options.identify(scope, _header(scope, self._key_header))
            with on_behalf_of(client.request, key, priority):
                await self.app(scope, client.receive, response.send)
            await response.release()
        except (ModelGuardError, ExceptionGroup) as error:
            answer = self._options.answer(error)
            if answer is not None and not response.begun:
                await Response(answer)(scope, receive, send)  # the server drops it if the client has disconnected
                return
            await response.release()
            if answer is None or answer.status != CLIENT_GONE or not client.disconnected:
                raise  # else a server would log the error, and nobody is there for the rest of the response
        except BaseException:
            await response.release()
            raise
        finally:
            client.answered()

    async def _serve_websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = client_of(receive, None)
        end = WebsocketEnd(scope, send, answered=client.answered)
        try:
            key, priority = self._options.identify(scope, _header(scope, self._key_header))
            with on_behalf_of(client.request, key, priority):
                await self.app(scope, client.receive, end.send)
        except (ModelGuardError, ExceptionGroup) as error:
            answer = self._options.answer(error)
            if answer is None or end.ended:
                raise
            if not client.disconnected:
                await end.refuse(answer)
        finally:
            client.answered()


def _answer_inside_sanic(app: Any, options: WebOptions) -> None:
    """Have a Sanic application give modelguard's answers: it answers every error itself, and raises none."""
    if not any(kind.__module__ == "sanic.app" for kind in type(app).__mro__):
        return
    respond: Any = importlib.import_module("sanic.response").HTTPResponse

    def handle(_request: object, error: Exception) -> Any:
        answer = options.answer(error)
        return None if answer is None else respond(answer.body, answer.status, dict(answer.headers))

    for kind in (*ANSWERED, ExceptionGroup):
        if (kind, None) not in app.error_handler.cached_handlers:  # else the application has a handler of its own
            app.error_handler.add(kind, handle)


def _header_name(name: str | None) -> bytes | None:
    return None if name is None else name.lower().encode("latin-1")


def _admin_command(admin: Admin, scope: Scope, path: str) -> Answer | Callable[[], Answer] | None:
    query = scope.get("query_string", b"").decode("latin-1")
    return admin.command(scope["method"], path, query, lambda: _header(scope, b"authorization"))


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

    async def handle(connection: Any, error: Exception) -> Response | None:  # async: Starlette would start a thread
        answer = options.answer(error)
        if answer is None:  # registered for an error that it does not handle
            raise error
        if getattr(connection, "scope", {}).get("type") != "websocket":
            return Response(answer)
        accepted = connection.application_state.name != "CONNECTING"
        await WebsocketEnd(connection.scope, connection.send, accepted=accepted).refuse(answer)
        return None

    return dict.fromkeys(ANSWERED, handle)


async def _stop_start(error: InvalidOption, scope: Scope, receive: Receive, send: Send) -> None:
    """Have the server end: by the lifespan protocol a failed start is not mistaken for anything else.

    Raises:
        InvalidOption: Always, for servers and test clients that look at the application's errors.
    """
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.failed", "message": f"modelguard: {error}"})
    raise error
