"""How a web service responds to modelguard's errors: problem documents (RFC 9457) that reveal nothing internal."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import json
import math
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Protocol, TypeVar, cast

from modelguard import _units
from modelguard.errors import (
    CallerGone,
    DeadlineExceeded,
    GuardClosed,
    InvalidOption,
    ItemTooHeavy,
    LoadFailed,
    Overloaded,
    QuotaExceeded,
)
from modelguard.isolation import status as _isolated
from modelguard.lifecycle.guard import guards
from modelguard.runtime import waiting
from modelguard.runtime.background import THREADS
from modelguard.serving import _shared_threads
from modelguard.serving.deadlines import check_key, check_priority
from modelguard.telemetry import logger

#: The status that nginx logs for a client that has disconnected; no client gets it.
CLIENT_GONE = 499
TOO_LARGE = 413  # its name in HTTPStatus changed in Python 3.13
#: The longest timeout header that is accepted, in characters, and the longest timeout from it, in seconds: one day.
_LONGEST_NUMBER = 20
_LONGEST = 86_400.0

_DETAILS: dict[int, str] = {
    HTTPStatus.SERVICE_UNAVAILABLE: "The service cannot take this request now. Try again later.",
    HTTPStatus.GATEWAY_TIMEOUT: "The answer was not ready in time.",
    TOO_LARGE: "The request is too large.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too many of your requests are waiting. Try again later.",
    CLIENT_GONE: "The client has closed the connection.",
}

#: The names of what has kept a probe from success, and was asked for its state.
_asked: set[str] = set()

#: The errors that are turned into responses, for frameworks that need a handler for each.
ANSWERED = (Overloaded, LoadFailed, GuardClosed, DeadlineExceeded, ItemTooHeavy, CallerGone)


class Ready(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    detail: str = ""

    @property
    def status_line(self) -> str:
        """Status and reason, such as ``"503 Service Unavailable"``, for WSGI."""
        return f"{self.status} {_title(self.status)}"


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """The options of both middlewares."""

    deadline: _units.Duration | None = None
    timeout_header: str | None = "Request-Timeout"
    livez: str | None = "/livez"
    readyz: str | None = "/readyz"
    guards: Iterable[Ready] | None = None
    detail: bool = False
    fair_by: str | Callable[[Any], Hashable] | None = None
    priority: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        if self.deadline is not None:
            _units.seconds(self.deadline, "deadline")
        if not isinstance(self.detail, bool):
            raise InvalidOption("detail", self.detail, why="must be True or False", fix="Write detail=True.")
        for name in ("livez", "readyz"):
            path = getattr(self, name)
            if path is not None and not (isinstance(path, str) and path.startswith("/")):
                why = "must be a path that begins with '/'"
                raise InvalidOption(name, path, why=why, fix=f"Write {name}='/{name}', or None.")
        if self.timeout_header is not None and not _is_header(self.timeout_header):
            why = "must be the name of an HTTP header"
            raise InvalidOption("timeout_header", self.timeout_header, why=why, fix="Write 'Request-Timeout'.")
        if not (self.fair_by is None or callable(self.fair_by) or _is_header(self.fair_by)):
            why = "must be the name of an HTTP header, or a function of the request"
            fix = "Write fair_by='X-Tenant', for a header that your proxy sets."
            raise InvalidOption("fair_by", self.fair_by, why=why, fix=fix)
        if not (self.priority is None or callable(self.priority)):
            why = "must be a function of the request"
            fix = "Write priority=lambda request: 1 if request['path'] == '/chat' else 0 (ASGI; 'PATH_INFO' in WSGI)."
            raise InvalidOption("priority", self.priority, why=why, fix=fix)
        if self.guards is not None:
            object.__setattr__(self, "guards", _check_guards(self.guards))

    def identify(self, request: Any, header: str | None) -> tuple[Hashable, int]:
        """Whose a request is, and how urgent."""
        key: Hashable = header
        if callable(self.fair_by):
            key = self.fair_by(request)
            check_key(key, "fair_by")
        return key, 0 if self.priority is None else check_priority(self.priority(request))

    def probe(self, method: str, path: str) -> Answer | None:
        """The answer to a probe; None if the request is not a probe."""
        if method not in {"GET", "HEAD"} or path not in {self.livez, self.readyz}:
            return None
        if path == self.livez:
            return json_answer(HTTPStatus.OK, {"status": "alive"})
        checked = _all_of_process() if self.guards is None else self.guards
        missing = [guard.name for guard in checked if not guard.ready]
        content: dict[str, Any] = {"status": "not ready" if missing else "ready"}
        if missing:
            content["waiting_for"] = missing
            _tell_of_unused(checked)
        versions = {
            guard.name: version for guard in checked if (version := getattr(guard, "version", None)) is not None
        }
        if versions:
            content["versions"] = versions
        return json_answer(HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK, content)

    def timeout(self, header: str | None) -> float | Answer | None:
        """The time limit of a request in seconds, None for no limit; or the answer to an invalid header."""
        own = None if self.deadline is None else _units.seconds(self.deadline, "deadline")
        if header is None:
            return own
        try:
            valid = len(header) <= _LONGEST_NUMBER and "_" not in header  # float() reads 1_0 as ten
            requested = float(header) if valid else math.nan
        except ValueError:
            requested = math.nan
        if not 0 <= requested < math.inf:  # also false for nan
            why = f"The header {self.timeout_header} must be a number of seconds, such as 2.5."
            return problem(HTTPStatus.BAD_REQUEST, why)
        return min(requested, _LONGEST) if own is None else min(own, requested)

    def answer(self, error: Exception, random: Callable[[], float] = random.random) -> Answer | None:
        """The answer to an error; None if it is not an error for clients.

        ``Retry-After`` is a whole number of seconds, at least one. A random part of up to half of it is added, so that
        clients that were refused at the same time do not all return at the same time.
        """
        retry: float | None = None
        if isinstance(error, ExceptionGroup):  # from tasks that the handler started
            if error.split(ANSWERED)[1] is not None:
                return None
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
        if isinstance(error, Overloaded | LoadFailed | GuardClosed):
            too_many = isinstance(error, QuotaExceeded)
            status = int(HTTPStatus.TOO_MANY_REQUESTS if too_many else HTTPStatus.SERVICE_UNAVAILABLE)
            retry = getattr(error, "retry_after", 1.0) * (1 + random() / 2)
        elif isinstance(error, DeadlineExceeded):
            status = int(HTTPStatus.GATEWAY_TIMEOUT)
        elif isinstance(error, ItemTooHeavy):
            status = TOO_LARGE
        elif isinstance(error, CallerGone):
            status = CLIENT_GONE
        else:
            return None
        headers = () if retry is None else (("retry-after", str(max(math.ceil(retry), 1))),)
        return problem(status, str(error) if self.detail else _DETAILS[status], headers)


def _is_header(name: object) -> bool:
    return isinstance(name, str) and name.isascii() and name.replace("-", "").isalnum()


def _check_guards(given: Iterable[Ready]) -> tuple[Ready, ...]:
    try:
        guards = tuple(given)
    except TypeError:
        why = f"must be a list, not {_units.kind_of(given)}"
        raise InvalidOption("guards", given, why=why, fix="Write guards=[...].") from None
    for guard in guards:
        if not hasattr(guard, "ready") or not hasattr(guard, "name"):
            why = "must be guards and batched functions"
            fix = "For a guarded function give its guard: guard_of(function)."
            raise InvalidOption("guards", guard, why=why, fix=fix)
    return guards


def problem(status: int, detail: str, headers: tuple[tuple[str, str], ...] = ()) -> Answer:
    content = {"type": "about:blank", "title": _title(status), "status": int(status), "detail": detail}
    return replace(json_answer(status, content, headers, media_type="application/problem+json"), detail=detail)


def json_answer(
    status: int, content: object, headers: tuple[tuple[str, str], ...] = (), *, media_type: str = "application/json"
) -> Answer:
    body = json.dumps(content).encode()
    own = (("content-type", media_type), ("content-length", str(len(body))), ("cache-control", "no-store"))
    return Answer(int(status), (*own, *headers), body)


def _title(status: int) -> str:
    return "Client Closed Request" if status == CLIENT_GONE else HTTPStatus(status).phrase


def _tell_of_unused(checked: Iterable[Any]) -> None:
    """Log once what keeps the probe from success, and will for ever if nobody uses it."""
    for one in checked:
        if one.ready or one.name in _asked:
            continue
        _asked.add(one.name)  # what was used once counts as used
        if hasattr(one, "status") and getattr(one.status(), "state", None) == "new":
            logger.warning(
                "readyz: not ready, because nothing has called or loaded %s yet; load it when the service starts, or "
                "give the middleware guards=[...] without it",
                one.name,
            )


def _all_of_process() -> tuple[Ready, ...]:
    return (*guards(), *_shared_threads.live(), *_isolated.live())


# Options of the middlewares that do not exist: an error that names them, and what was probably meant.


F = TypeVar("F", bound=Callable[..., Any])


def check_names(function: F) -> F:
    """Have a function reject unknown options, and options by position, with ``InvalidOption`` instead of ``TypeError``.

    Its signature stays what it is, so that type checkers find them before.
    """
    parameters = inspect.signature(function).parameters.values()
    by_position = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    allowed = {parameter.name for parameter in parameters}

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        _check(args[by_position:], {name: options[name] for name in options if name not in allowed}, names)
        return function(*args, **options)

    return cast("F", checked)


def _check(others: Sequence[object], unknown: Mapping[str, object], known: Sequence[str]) -> None:
    for value in others:
        why, fix = "takes its options by keyword only", "Write for example deadline='2s'."
        raise InvalidOption("ModelGuardMiddleware", value, why=why, fix=fix)
    for name, value in unknown.items():
        raise InvalidOption(name, value, why="is not an option of ModelGuardMiddleware", fix=_fix(name, known))


def _fix(name: str, known: Sequence[str]) -> str:
    import difflib

    options = f"its options are {', '.join(known)}."
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f"Write {similar[0]}=...; {options}" if similar else options.capitalize()


# Blocking work for the coroutines of a web application, on asyncio and on Trio.


T = TypeVar("T")


async def answer_of(command: Answer | Callable[[], Answer]) -> Answer:
    """The answer to an admin command. A reload takes seconds, in which the event loop must go on."""
    return command if isinstance(command, Answer) else await in_thread(command)


async def in_thread(work: Callable[[], T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        trio = importlib.import_module("trio")
        result: T = await trio.to_thread.run_sync(work)
        return result
    return await waiting.run(work, "modelguard-admin", THREADS.start_once)
