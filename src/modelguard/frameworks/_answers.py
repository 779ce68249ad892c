"""How a web service responds to modelguard's errors: problem documents (RFC 9457) that reveal nothing internal."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from modelguard.errors import (
    CallerGone,
    DeadlineExceeded,
    GuardClosed,
    ItemTooHeavy,
    LoadFailed,
    Overloaded,
    QuotaExceeded,
)

#: The status that nginx logs for a client that has disconnected; no client gets it.
CLIENT_GONE = 499
TOO_LARGE = 413  # its name in HTTPStatus changed in Python 3.13

_DETAILS: dict[int, str] = {
    HTTPStatus.SERVICE_UNAVAILABLE: "The service cannot take this request now. Try again later.",
    HTTPStatus.GATEWAY_TIMEOUT: "The answer was not ready in time.",
    TOO_LARGE: "The request is too large.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too many of your requests are waiting. Try again later.",
    CLIENT_GONE: "The client has closed the connection.",
}

#: The status for each error; the first kind that fits counts.
_STATUS: dict[type[Exception], int] = {
    QuotaExceeded: HTTPStatus.TOO_MANY_REQUESTS,
    Overloaded: HTTPStatus.SERVICE_UNAVAILABLE,
    LoadFailed: HTTPStatus.SERVICE_UNAVAILABLE,
    GuardClosed: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
    ItemTooHeavy: TOO_LARGE,
    CallerGone: CLIENT_GONE,
}
_NONE: Mapping[str, str] = {}
_WITH_RETRY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})

#: The errors that are turned into responses, for frameworks that need a handler for each.
REFUSALS = tuple(kind for kind in _STATUS if kind is not QuotaExceeded)
#: A group comes from tasks, and may have other errors too.
ANSWERED = (*REFUSALS, ExceptionGroup)


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    detail: str = ""

    @property
    def reason(self) -> str:
        """The status in words, such as ``"Service Unavailable"``."""
        return _title(self.status)

    def body_for(self, method: str | None) -> bytes:
        """The body; none for a HEAD request."""
        return b"" if method == "HEAD" else self.body


def answer_of(error: Exception, *, detail: bool, random: Callable[[], float] = random.random) -> Answer | None:
    """The answer to an error; None if it is not an error for clients.

    ``Retry-After`` is a whole number of seconds, at least one. A random part of up to half of it is added, so that
    clients that were refused at the same time do not all return at the same time.
    """
    if isinstance(error, ExceptionGroup):  # from tasks that the handler started
        if error.split(REFUSALS)[1] is not None:
            return None
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), None)
    if status is None:
        return None
    retry = getattr(error, "retry_after", 1.0) * (1 + random() / 2)
    again = status in _WITH_RETRY and math.isfinite(retry)
    headers = {"retry-after": str(max(math.ceil(retry), 1))} if again else {}
    return problem(status, str(error) if detail else _DETAILS[status], headers)


def problem(status: int, detail: str, headers: Mapping[str, str] = _NONE) -> Answer:
    content = {"type": "about:blank", "title": _title(status), "status": int(status), "detail": detail}
    return json_answer(status, content, {"content-type": "application/problem+json", **headers}, detail)


def json_answer(status: int, content: object, headers: Mapping[str, str] = _NONE, detail: str = "") -> Answer:
    body = json.dumps(content).encode()
    own = {"content-type": "application/json", "content-length": str(len(body)), "cache-control": "no-store"}
    return Answer(int(status), {**own, **headers}, body, detail)


def _title(status: int) -> str:
    return "Client Closed Request" if status == CLIENT_GONE else HTTPStatus(status).phrase
