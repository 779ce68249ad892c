"""Requests made by hand, with both sides checked against the standard; each error with its answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from tests.unit.frameworks.refusals import FIGURE, NAME

from modelguard.errors import (
    CallerGone,
    CircuitOpen,
    DeadlineExceeded,
    DeadlineUnreachable,
    GuardClosed,
    ItemTooHeavy,
    LoadFailed,
    Overloaded,
    QueueFull,
    Reloading,
)
from modelguard.frameworks.wsgi import ModelGuardMiddleware

#: Each error with the status of its answer, and after how many seconds a client may come back.
ERRORS = [
    (Overloaded(f"{NAME} {FIGURE}", retry_after=3.0), 503, 3.0),
    (QueueFull(NAME, queued=FIGURE, retry_after=2.5), 503, 2.5),
    (QueueFull(NAME, queued=FIGURE, retry_after=0.001), 503, 0.001),
    (Overloaded(f"{NAME} {FIGURE}", retry_after=math.inf), 503, None),
    (DeadlineUnreachable(NAME, estimate=FIGURE, left=FIGURE, retry_after=40.0), 503, 40.0),
    (CircuitOpen(NAME, failures=FIGURE, retry_after=10.0), 503, 10.0),
    (Reloading(NAME, waited=FIGURE), 503, 1.0),
    (LoadFailed(NAME, f"{FIGURE}", retry_after=5.0), 503, 5.0),
    (GuardClosed(NAME), 503, 1.0),
    (DeadlineExceeded(NAME, waited=FIGURE), 504, None),
    (ItemTooHeavy(NAME, weight=FIGURE, max_weight=7), 413, None),
    (CallerGone(NAME), 499, None),
]
IDS = [f"{type(error).__name__} {retry}" for error, _, retry in ERRORS]

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass
class Answer:
    """What a server got for its client."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(
    app: App,
    path: str = "/",
    method: str = "GET",
    header: str | None = None,
    variable: str = "HTTP_REQUEST_TIMEOUT",
    **options: Any,
) -> Answer:
    """Send one request through a middleware, with both its sides checked against the standard."""
    environ: dict[str, Any] = {"QUERY_STRING": ""} | ({} if header is None else {variable: header})
    setup_testing_defaults(environ)
    environ |= {"PATH_INFO": path, "REQUEST_METHOD": method}
    begun: list[Any] = []

    def start_response(status: str, headers: list[tuple[str, str]], error: Any = None) -> Any:
        begun[:] = [int(status.split(" ", 1)[0]), dict(headers)]

    served = validator(ModelGuardMiddleware(validator(app), **options))
    parts = served(environ, start_response)
    try:
        body = b"".join(parts)
    finally:
        parts.close()  # type: ignore[attr-defined]
    return Answer(begun[0], begun[1], body)


def fine(environ: Any, start_response: Any) -> Iterable[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"" if environ["REQUEST_METHOD"] == "HEAD" else b"fine"]


def raising(error: Exception) -> App:
    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        raise error

    return app


def calling(call: Callable[[], Any]) -> App:
    """An application that answers after a call."""

    def app(environ: Any, start_response: Any) -> Iterable[bytes]:
        call()
        return fine(environ, start_response)

    return app


def never(environ: Any, start_response: Any) -> Iterable[bytes]:
    raise AssertionError("the application is not called")
