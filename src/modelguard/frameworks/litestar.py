"""Litestar: error responses, deadlines, disconnects and probes, by one plugin.

::

    from modelguard.frameworks.litestar import ModelGuardPlugin

    app = Litestar([...], plugins=[ModelGuardPlugin(deadline="2s")])

Litestar answers every error itself, behind its middleware, and applies middleware only where there is a route. So the
plugin adds the middleware, a handler for each of modelguard's errors, and routes for the probes.
"""

from __future__ import annotations

import functools
from typing import Any, Unpack

from modelguard import _extras
from modelguard.errors import ModelGuardError
from modelguard.frameworks._answers import REFUSALS, answer_of
from modelguard.frameworks._web import Options, Web
from modelguard.frameworks.asgi import ModelGuardMiddleware, Receive, Scope, Send

__all__ = ["ModelGuardPlugin"]


class ModelGuardPlugin:
    """Adds :class:`modelguard.frameworks.asgi.ModelGuardMiddleware` to a Litestar application, as its outermost one.

    The application's own exception handlers come first: a handler for ``ModelGuardError``, or for ``Overloaded``,
    replaces the plugin's. On a websocket modelguard's errors close the connection with code 1013 or 1009. Of an
    application with a ``path`` the probes are below it, as its routes are.

    Args:
        options: Those of :class:`modelguard.frameworks.asgi.ModelGuardMiddleware`.

    Raises:
        InvalidOption: An option is invalid, or there is no such option.
        NotSupported: Litestar is not installed; when an application is made with the plugin.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        self._web = Web.read(options)
        self._options = options
        if self._web.guards is not None:
            options["guards"] = self._web.guards  # each route has a middleware that reads them: an iterator ends

    def on_app_init(self, app_config: Any) -> Any:
        """Called by Litestar."""
        app_config.middleware.insert(0, functools.partial(self._middleware, app_config.path))
        app_config.route_handlers.extend(self._routes())
        app_config.after_exception.append(_reraise)
        if ModelGuardError not in app_config.exception_handlers:
            for kind in REFUSALS:
                app_config.exception_handlers.setdefault(kind, self._handle)
        return app_config

    def _middleware(self, below: str, app: Any) -> ModelGuardMiddleware:
        middleware = ModelGuardMiddleware(app, **self._options)
        middleware.below = f"/{below.strip('/')}".rstrip("/")
        return middleware

    def _handle(self, _: Any, error: Exception) -> Any:
        answer = self._web.answer_or_raise(error)
        headers = dict(answer.headers)
        media_type = headers.pop("content-type")
        make = _litestar("response").Response
        return make(answer.body, status_code=answer.status, headers=headers, media_type=media_type)

    def _routes(self) -> list[Any]:
        """Routes for the paths that the middleware answers."""
        commands = () if self._web.admin is None else self._web.admin.paths
        paths = [path for path in (self._web.livez, self._web.readyz, *commands) if path is not None]
        return [_litestar("handlers").asgi(path, copy_scope=False)(_not_found) for path in paths]


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - as Litestar calls it
    """Stands behind the middleware, for requests that are not probes, such as a POST."""
    raise _litestar("exceptions").NotFoundException


async def _reraise(error: Exception, scope: Scope) -> None:
    """Let the middleware answer what Litestar has no handler for: errors on a websocket, and groups of errors."""
    if (scope["type"] == "websocket" or isinstance(error, ExceptionGroup)) and answer_of(error, detail=False):
        raise error


def _litestar(module: str) -> Any:
    return _extras.load(f"litestar.{module}", "modelguard.frameworks.litestar")
