"""What every middleware does with a request: its options, probes, time limit, caller and errors."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, Self, TypedDict, TypeVar

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.frameworks._answers import Answer, answer_of, json_answer, problem
from modelguard.frameworks.admin import Admin, check_admin
from modelguard.isolation import status as _isolated
from modelguard.lifecycle.guard import guards as all_guards
from modelguard.runtime import waiting
from modelguard.runtime.background import THREADS
from modelguard.serving import _batcher
from modelguard.serving.deadlines import OnBehalf, WebRequest, check_key, check_priority, on_behalf_of
from modelguard.telemetry import logger

T = TypeVar("T")

#: Gives a header of a request by its name; None if it has none.
Header = Callable[[str], str | None]

#: The longest timeout header that is accepted, in characters, and the longest timeout from it, in seconds: one day.
_LONGEST_NUMBER = 20
_LONGEST = 86_400.0

#: The names of what has kept a probe from success, and was asked for its state.
_asked: set[str] = set()


class Ready(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def ready(self) -> bool: ...


class CallOptions(TypedDict, total=False):
    """The options of what serves calls by any protocol."""

    deadline: _units.Duration | None
    detail: bool
    fair_by: str | Callable[[Any], Hashable] | None
    priority: Callable[[Any], int] | None


class Options(CallOptions, total=False):
    """The options of the middlewares."""

    timeout_header: str | None
    livez: str | None
    readyz: str | None
    admin: Admin | None
    guards: Iterable[Ready] | None


@dataclass(kw_only=True)
class Web:
    """The options, checked, and what they mean for a request."""

    deadline: _units.Duration | None = None
    timeout_header: str | None = "Request-Timeout"
    livez: str | None = "/livez"
    readyz: str | None = "/readyz"
    admin: Admin | None = None
    guards: Iterable[Ready] | None = None
    detail: bool = False
    fair_by: str | Callable[[Any], Hashable] | None = None
    priority: Callable[[Any], int] | None = None

    @classmethod
    def read(
        cls,
        options: Mapping[str, Any],
        misplaced: Iterable[object] = (),
        owner: str = "ModelGuardMiddleware",
        kinds: type[CallOptions] = Options,
    ) -> Self:
        """Check the options that were given to ``owner``, and what was given by position instead."""
        for value in misplaced:
            why = "takes its options by keyword only"
            raise InvalidOption(owner, value, why=why, fix="Write for example deadline='2s'.")
        known = [name for name in cls.__dataclass_fields__ if name in kinds.__annotations__]
        for name, value in options.items():
            if name not in known:
                fix = f"{_units.nearest(name, known)}Its options are {', '.join(known)}."
                raise InvalidOption(name, value, why=f"is not an option of {owner}", fix=fix)
        return cls(**options)

    def __post_init__(self) -> None:
        self.limit = None if self.deadline is None else _units.seconds(self.deadline, "deadline")
        _units.flag(self.detail, "detail")
        for name in ("livez", "readyz"):
            path = getattr(self, name)
            if path is not None and not (isinstance(path, str) and re.fullmatch(r"/[^?#]*", path)):
                why = "must be a path that begins with '/', without a query"
                raise InvalidOption(name, path, why=why, fix=f"Write {name}='/{name}', or None.")
        if self.livez is not None and self.livez == self.readyz:
            fix = "Give each a path of its own."
            raise InvalidOption("readyz", self.readyz, why="is the path of livez too", fix=fix)
        check_admin(self.admin)
        if self.timeout_header is not None and not _is_header(self.timeout_header):
            why = "must be the name of an HTTP header"
            raise InvalidOption("timeout_header", self.timeout_header, why=why, fix="Write 'Request-Timeout'.")
        if not (self.fair_by is None or callable(self.fair_by) or _is_header(self.fair_by)):
            why = "must be the name of an HTTP header, or a function of the request"
            fix = "Write fair_by='X-Tenant', for a header that your proxy sets."
            raise InvalidOption("fair_by", self.fair_by, why=why, fix=fix)
        if callable(self.fair_by):
            fix = "Write fair_by=lambda request: ..., or the name of a header."
            _units.function(self.fair_by, "fair_by", "the request", fix=fix, arguments=1)
        if self.priority is not None:
            fix = "Write priority=lambda request: 1 if request['path'] == '/chat' else 0 (ASGI; 'PATH_INFO' in WSGI)."
            _units.function(self.priority, "priority", "the request", fix=fix, arguments=1)
        if self.guards is not None:
            self.guards = _check_guards(self.guards)

    # A request: first what the middleware answers by itself, else its time limit; then the block in which it is served

    def receive(self, method: str, path: str, query: str, header: Header) -> Answer | float | None:
        """The answer to a command, a probe or an invalid header; else the time limit in seconds, None for none."""
        step = self._step(method, path, query, header)
        return step() if callable(step) else step

    async def areceive(self, method: str, path: str, query: str, header: Header) -> Answer | float | None:
        """:meth:`receive` without blocking the event loop: a reload takes seconds."""
        step = self._step(method, path, query, header)
        return await waiting.run(step, "modelguard-admin", THREADS.start_once) if callable(step) else step

    def _step(self, method: str, path: str, query: str, header: Header) -> Answer | Callable[[], Answer] | float | None:
        command = None if self.admin is None else self.admin.command(method, path, query, header)
        return command or self.probe(method, path) or self.timeout(header)

    def probe(self, method: str, path: str) -> Answer | None:
        """The answer to a probe; None if the request is not a probe."""
        if method not in {"GET", "HEAD"} or path not in {self.livez, self.readyz}:
            return None
        if path == self.livez:
            return json_answer(HTTPStatus.OK, {"status": "alive"})
        of_process = (*all_guards, *_batcher.batchers, *_isolated.functions)
        checked = of_process if self.guards is None else self.guards
        missing = [guard for guard in checked if not guard.ready]
        content: dict[str, Any] = {"status": "ready"}
        if missing:
            content = {"status": "not ready", "waiting_for": [guard.name for guard in missing]}
            _tell_of_unused(missing)
        known = {guard.name: getattr(guard, "version", None) for guard in checked}
        if versions := {name: version for name, version in known.items() if version is not None}:
            content["versions"] = versions
        return json_answer(HTTPStatus.SERVICE_UNAVAILABLE if missing else HTTPStatus.OK, content)

    def timeout(self, header: Header) -> float | Answer | None:
        """The time limit of a request in seconds, None for no limit; or the answer to an invalid header."""
        given = None if self.timeout_header is None else header(self.timeout_header)
        if given is None:
            return self.limit
        requested = math.nan
        if len(given) <= _LONGEST_NUMBER and given.isascii() and "_" not in given:  # float() reads 1_0 as ten
            with contextlib.suppress(ValueError):
                requested = float(given)
        if not 0 <= requested < math.inf:  # also false for nan
            why = f"The header {self.timeout_header} must be a number of seconds, such as 2.5."
            return problem(HTTPStatus.BAD_REQUEST, why)
        return min(requested, _LONGEST if self.limit is None else self.limit)

    def caller(self, request: Any, header: Header) -> tuple[Hashable, int]:
        """Whose a request is, and how urgent."""
        key: Hashable = None
        if callable(self.fair_by):
            key = self.fair_by(request)
            check_key(key, "fair_by")
        elif self.fair_by is not None:
            key = header(self.fair_by)
        return key, 0 if self.priority is None else check_priority(self.priority(request))

    @contextmanager
    def serving(self, web_request: WebRequest, request: Any, header: Header) -> Iterator[OnBehalf]:
        """The block in which a request is served. It gives one to enter for each part of the response."""
        try:
            yield on_behalf_of(web_request, *self.caller(request, header))
        except asyncio.CancelledError:  # by the server or by what is around it: nobody is there for an answer
            web_request.disconnect()  # for calls that run in threads
            raise
        finally:
            web_request.answered()

    def answer(self, error: Exception) -> Answer | None:
        """The answer to an error; None if it is not an error for clients."""
        return answer_of(error, detail=self.detail)

    def answer_or_raise(self, error: Exception) -> Answer:
        """The answer to an error, in a handler that was registered for others too; others are raised again."""
        answer = self.answer(error)
        if answer is None:
            raise error
        return answer


def _is_header(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[\w.-]+", name, re.ASCII) is not None


def _check_guards(given: Iterable[Ready]) -> tuple[Ready, ...]:
    fix = "Write guards=[...]."
    guards = tuple(_units.instance(given, "guards", Iterable, "a list", fix=fix))  # type: ignore[type-abstract]
    for guard in guards:
        if isinstance(guard, type) or not hasattr(guard, "ready") or not hasattr(guard, "name"):
            why = "must be guards and batched functions"
            fix = "For a guarded function give its guard: guard_of(function)."
            raise InvalidOption("guards", guard, why=why, fix=fix)
    return guards


def _tell_of_unused(missing: Iterable[Any]) -> None:
    """Log once what keeps the probe from success, and will for ever if nobody uses it."""
    for one in missing:
        if one.name in _asked:
            continue
        _asked.add(one.name)  # what was used once counts as used
        if hasattr(one, "status") and getattr(one.status(), "state", None) == "new":
            logger.warning(
                "readyz: not ready, because nothing has called or loaded %s yet; load it when the service starts, or "
                "give the middleware guards=[...] without it",
                one.name,
            )
