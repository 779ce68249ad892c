"""Middleware for Flask and every other WSGI application: honest refusals, deadlines, probes.

::

    from modelguard.frameworks import wsgi

    wsgi.install(app, deadline="2s")                                  # Flask
    application = wsgi.ModelGuardMiddleware(application)              # any other whose errors come out of it

WSGI does not tell when a client hangs up; what its request waits for is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from modelguard.errors import InvalidOption, ModelGuardError
from modelguard.frameworks._answers import ANSWERED, Answer, WebOptions
from modelguard.serving.scope import Request, serving

__all__ = ["ModelGuardMiddleware", "install"]

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class ModelGuardMiddleware:
    """Answers for the models behind an application: 503, 504, a deadline for each request, and the two probes.

    It answers as :class:`modelguard.frameworks.asgi.ModelGuardMiddleware` does, apart from hang-ups. The deadline holds
    while the application makes its response, not while a generator that it returned is read.

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
        self._variable = None if header is None else f"HTTP_{header.upper().replace('-', '_')}"

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Serve one request."""
        asked = None if self._variable is None else environ.get(self._variable)
        probe = self._options.probe(environ["REQUEST_METHOD"], environ.get("PATH_INFO", ""))
        bound = probe or self._options.bound(asked)
        if isinstance(bound, Answer):
            return _respond(bound, environ, start_response)
        return self._serve(environ, start_response, bound)

    def _serve(
        self, environ: dict[str, Any], start_response: Callable[..., Any], bound: float | None
    ) -> Iterable[bytes]:
        begun = False

        def starting(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            begun = True
            return start_response(*args, **kwargs)

        request = Request(bound)
        try:
            with serving(request):
                return self.app(environ, starting)
        except (ModelGuardError, ExceptionGroup) as error:
            answer = self._options.answer(error)
            if answer is None or begun:
                raise
            return _respond(answer, environ, start_response)
        finally:
            request.end()


def install(app: Any, **options: Any) -> None:
    """Put the middleware around a Flask application, and have Flask leave modelguard's errors to it.

    Args:
        app: A ``flask.Flask``.
        options: Those of :class:`ModelGuardMiddleware`.

    Raises:
        InvalidOption: It is no Flask application, or an option cannot be meant.
    """
    if not hasattr(app, "wsgi_app") or not hasattr(app, "register_error_handler"):
        raise InvalidOption(
            "app",
            app,
            why=f"a Flask application is needed, and this is a {type(app).__name__}",
            fix="Wrap any other: application = ModelGuardMiddleware(application).",
        )
    web = WebOptions(**options)

    def handle(error: ModelGuardError) -> tuple[bytes, int, list[tuple[str, str]]]:
        answer = web.answer(error)
        if answer is None:  # given to another error than it was made for
            raise error
        return answer.body, answer.status, list(answer.headers)

    app.wsgi_app = ModelGuardMiddleware(app.wsgi_app, **options)
    for kind in ANSWERED:
        app.register_error_handler(kind, handle)


def _respond(answer: Answer, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response(answer.line, list(answer.headers))
    return [] if environ["REQUEST_METHOD"] == "HEAD" else [answer.body]
