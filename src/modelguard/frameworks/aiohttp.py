"""Middleware for aiohttp servers: error responses, deadlines and probes.

::

    from modelguard.frameworks import aiohttp

    aiohttp.install(app, deadline="2s")  # app: an aiohttp.web.Application

aiohttp notices that a client disconnects only if the server was started with ``handler_cancellation=True``.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Unpack

from modelguard import _extras, _units
from modelguard.errors import InvalidOption, ModelGuardError
from modelguard.frameworks._answers import Answer
from modelguard.frameworks._web import Header, Options, Web
from modelguard.serving.deadlines import WebRequest

__all__ = ["install"]


def install(app: Any, **options: Unpack[Options]) -> None:
    """Add a middleware to an aiohttp application, as its outermost one. Call it before the application is run.

    It responds as :class:`modelguard.frameworks.asgi.ModelGuardMiddleware` does. On a websocket errors propagate, as
    any others: catch them around the work for a message, and close it with code 1013 (try again later).

    With ``web.run_app(app, handler_cancellation=True)`` (or ``AppRunner``), aiohttp cancels the handler of a client
    that has disconnected: waiting items are not computed. Without it, they are.

    Args:
        app: An ``aiohttp.web.Application``.
        options: Those of :class:`modelguard.frameworks.asgi.ModelGuardMiddleware`; ``fair_by`` and ``priority`` may be
            functions of the ``aiohttp.web.Request``.

    Raises:
        InvalidOption: It is not such an application, or it runs already; an option is invalid, or there is no such
            option.
        NotSupported: aiohttp is not installed.
    """
    if not hasattr(app, "middlewares") or not hasattr(app, "on_response_prepare"):
        why = f"must be an aiohttp.web.Application, not {_units.kind_of(app)}"
        raise InvalidOption("app", app, why=why, fix="Write install(app), with app = web.Application().")
    web = Web.read(options)  # before anything is changed
    if app.frozen:
        fix = "Call install(app) where the application is made."
        raise InvalidOption("app", app, why="must not run already", fix=fix)
    library = _extras.load("aiohttp.web", "modelguard.frameworks.aiohttp.install()")
    begun: Any = "modelguard.begun"
    if hasattr(library, "RequestKey"):  # from aiohttp 3.14 on
        begun = library.RequestKey(begun, bool)

    async def note_begun(request: Any, _response: Any) -> None:
        request[begun] = True

    app.middlewares.insert(0, library.middleware(partial(_serve, library.Response, web, begun)))
    app.on_response_prepare.append(note_begun)


async def _serve(response: Any, web: Web, begun: Any, request: Any, handler: Any) -> Any:
    header = _headers_of(request)
    answer = await web.areceive(request.method, request.path, request.rel_url.raw_query_string, header)
    if not isinstance(answer, Answer):
        try:
            with web.serving(WebRequest(answer), request, header) as scope, scope:
                return await handler(request)
        except (ModelGuardError, ExceptionGroup) as error:
            answer = web.answer(error)
            if answer is None or begun in request:
                raise
    body = answer.body_for(request.method)
    return response(body=body, status=answer.status, reason=answer.reason, headers=answer.headers)


def _headers_of(request: Any) -> Header:
    """Finds a header of a request; several are joined, as a proxy would."""
    return lambda name: ", ".join(request.headers.getall(name)) if name in request.headers else None
