"""Middleware for Flask and any other WSGI application: error responses, deadlines and probes.

::

    from modelguard.frameworks import wsgi

    wsgi.install(app, deadline="2s")                                  # Flask
    application = wsgi.ModelGuardMiddleware(application)              # any other application that lets errors propagate

WSGI does not report when a client disconnects, so calls for clients that have disconnected are still computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, Never, Unpack

from modelguard import _units
from modelguard.errors import InvalidOption, ModelGuardError
from modelguard.frameworks._answers import ANSWERED, Answer
from modelguard.frameworks._web import Options, Web
from modelguard.serving.deadlines import WebRequest, on_behalf_of

__all__ = ["ModelGuardMiddleware", "install"]

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


_APP_FIX = "Give the application itself, not its name; modelguard.frameworks.asgi is for FastAPI and other ASGI ones."


class ModelGuardMiddleware:
    """Turns modelguard's errors into responses: 503, 504, a deadline for each request, and the two probes.

    It responds as :class:`modelguard.frameworks.asgi.ModelGuardMiddleware` does, except for disconnects. The deadline
    applies until the response has been read, also where a generator computes it.

    Args:
        app: The application.
        options: Those of the other, of which ``fair_by`` and ``priority`` may be functions of the WSGI environment.

    Raises:
        InvalidOption: An option is invalid, or there is no such option; or ``app`` is no WSGI application.
    """

    def __init__(self, app: App, *misplaced: Never, **options: Unpack[Options]) -> None:
        self.app = app
        self._web = Web.read(options, misplaced)
        _units.called_as("a WSGI application", app, "app", 2, fix=_APP_FIX)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Serve one request."""
        method, path, query = environ["REQUEST_METHOD"], environ.get("PATH_INFO", ""), environ.get("QUERY_STRING", "")
        answer = self._web.receive(method, path, query, partial(_header, environ))
        if not isinstance(answer, Answer):
            caller = self._web.caller(environ, partial(_header, environ))
            body = _Body(WebRequest(answer), start_response, caller)
            try:
                return body.begin(self.app, environ)
            except BaseException as error:
                body.close()
                answer = self._web.answer(error) if isinstance(error, Exception) else None
                if answer is None or body.begun:
                    raise
        start_response(f"{answer.status} {answer.reason}", [*answer.headers.items()])
        return [answer.body_for(environ["REQUEST_METHOD"])]


class _Body:
    """What an application returned. A generator computes while it is read, so the request lasts until then.

    The response begins with the first bytes: an error before them can still be answered.
    """

    def __init__(self, request: WebRequest, start_response: Callable[..., Any], caller: tuple[Hashable, int]) -> None:
        self._request = request
        self._on_behalf = on_behalf_of(request, *caller)
        self._start_response = start_response
        self._start: Callable[[], Any] | None = None
        self._result: Any = ()
        self._chunks: Iterator[bytes] = iter(())
        self._real_write: Callable[[bytes], Any] | None = None
        self.begun = False

    def begin(self, app: App, environ: dict[str, Any]) -> Iterable[bytes]:
        with self._on_behalf:
            self._result = app(environ, self._note_start)
            if _is_ready(self._result, environ):
                self._begin()
                self._request.answered()
                return self._result  # type: ignore[no-any-return]
            chunks, first = iter(self._result), []
            for chunk in chunks:
                first.append(chunk)
                if chunk:
                    break
        self._begin()
        self._chunks = chain(first, chunks)
        return self

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._on_behalf:
            return next(self._chunks)

    def close(self) -> None:
        """End the request; the server calls it in any case."""
        self._request.answered()
        close = getattr(self._result, "close", None)
        self._result = ()
        if close is not None:
            with self._on_behalf:  # blocks of a generator end here
                close()

    def _note_start(self, *args: Any, **kwargs: Any) -> Any:
        """Stands for ``start_response``: the real one is called with the first bytes."""
        if self.begun:
            return self._start_response(*args, **kwargs)
        self._start = partial(self._start_response, *args, **kwargs)
        return self._write

    def _write(self, data: bytes) -> Any:
        """The old way to send bytes, which ``start_response`` returns."""
        self._begin()
        return None if self._real_write is None else self._real_write(data)

    def _begin(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            self.begun = True
            self._real_write = start()


def _header(environ: dict[str, Any], name: str) -> str | None:
    return environ.get(f"HTTP_{name.upper().replace('-', '_')}")


def _is_ready(result: Any, environ: dict[str, Any]) -> bool:
    """Whether a response is complete, or a file that the server may send by itself."""
    wrapper = environ.get("wsgi.file_wrapper")
    return isinstance(result, list | tuple) or (isinstance(wrapper, type) and isinstance(result, wrapper))


def install(app: Any, **options: Unpack[Options]) -> None:
    """Wrap a Flask application in the middleware, and register handlers for modelguard's errors.

    The application's own handlers come first: one for ``ModelGuardError``, or for ``Overloaded``, replaces these.

    Args:
        app: A ``flask.Flask``.
        options: Those of :class:`ModelGuardMiddleware`.

    Raises:
        InvalidOption: It is not a Flask application, an option is invalid, or there is no such option.
    """
    if not hasattr(app, "wsgi_app") or not hasattr(app, "register_error_handler"):
        why = f"must be a Flask application, not {_units.kind_of(app)}"
        fix = (
            "Wrap any other WSGI application: application = ModelGuardMiddleware(application). FastAPI and Starlette "
            "need modelguard.frameworks.asgi."
        )
        raise InvalidOption("app", app, why=why, fix=fix)
    middleware = ModelGuardMiddleware(app.wsgi_app, **options)  # checks the options before anything is changed
    web = middleware._web  # noqa: SLF001 - of this module

    own = app.error_handler_spec[None][None]

    def handle(error: Exception) -> Any:
        answer = web.answer(error)
        if answer is not None:
            return answer.body, answer.status, answer.headers
        if Exception in own:  # a group with other errors, as it would be handled without this
            return app.ensure_sync(own[Exception])(error)
        raise error

    app.wsgi_app = middleware
    for kind in ANSWERED:
        if not own.keys() & {kind, ModelGuardError}:
            app.register_error_handler(kind, handle)
