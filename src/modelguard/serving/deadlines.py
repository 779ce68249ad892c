"""What applies to the batched calls of a block: ``deadline()``, ``caller()``, the web request that they are for."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Hashable
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from modelguard import _units
from modelguard.errors import InvalidOption, told
from modelguard.runtime import clock

if TYPE_CHECKING:
    from modelguard.serving._requests import Request

__all__ = [
    "Scope",
    "WebRequest",
    "caller",
    "check_key",
    "check_priority",
    "current_scope",
    "deadline",
    "left",
    "on_behalf_of",
]

#: No priority is higher: ageing makes up for priorities in finite time.
_HIGHEST = 1000
#: A web request with more calls than this, and twice as many as waited then, forgets those that have their answers.
_MANY_CALLS = 64


class WebRequest:
    """One request of a web service. It bounds its batched calls, and cancels them when its client disconnects.

    Once it has been answered it does neither: work that it left behind, such as a background task, goes on in its
    context. From the first batched call on it is worth watching the client. Thread-safe.
    """

    def __init__(self, timeout: float | None = None, on_first_call: Callable[[], object] | None = None) -> None:
        self._lock = threading.Lock()
        self._deadline = math.inf if timeout is None else clock.now() + timeout
        self._on_first_call = on_first_call
        self._calls: list[tuple[Request, Callable[[], object]]] = []
        self._many = _MANY_CALLS
        self._answered = False
        self.disconnected = False

    @property
    def deadline(self) -> float:
        """On the monotonic clock; infinity for none."""
        return math.inf if self._answered else self._deadline

    @property
    def cancelled(self) -> bool:
        """Whether the client disconnected before its answer: nothing more is computed for it."""
        return self.disconnected and not self._answered

    def add(self, request: Request, cancel: Callable[[], object]) -> None:
        """Cancel a queued request so when the client disconnects; at once if it has disconnected already."""
        with self._lock:
            if self._answered:
                return
            disconnected = self.disconnected
            if len(self._calls) >= self._many:
                self._calls = [call for call in self._calls if call[0].state != "done"]
                self._many = max(_MANY_CALLS, 2 * len(self._calls))  # else thousands would be looked at with each
            self._calls.append((request, cancel))
            on_first_call, self._on_first_call = self._on_first_call, None
        if disconnected:
            cancel()
        elif on_first_call is not None:
            with contextlib.suppress(RuntimeError):  # its event loop is closed
                on_first_call()

    def disconnect(self) -> None:
        """The client has disconnected: cancel its calls, and refuse further ones."""
        with self._lock:
            if self._answered:
                return
            self.disconnected = True
            calls, self._calls = self._calls, []
        for _, cancel in calls:
            cancel()

    def answered(self) -> None:
        """The client has its answer."""
        with self._lock:
            self._answered = True
            self._calls, self._on_first_call = [], None


@dataclass(frozen=True, slots=True)
class Scope:
    """What applies to the batched calls made in this context."""

    deadline: float = math.inf  # in seconds on the monotonic clock
    web_request: WebRequest | None = None
    enclosing: frozenset[object] = frozenset()  # the batchers whose functions run here, or wait for what runs here
    key: Hashable = None
    priority: int = 0  # the least that they have
    block: object = field(default=None, compare=False, repr=False)  # which made it
    before: Scope | None = field(default=None, compare=False, repr=False)

    @property
    def nearest_deadline(self) -> float:
        """The scope's own deadline or that of its web request, whichever comes first."""
        return self.deadline if self.web_request is None else min(self.deadline, self.web_request.deadline)


_UNBOUNDED = Scope()

#: None outside of every block, so that unbounded calls pay for one cheap look only.
current_scope: ContextVar[Scope | None] = ContextVar("modelguard scope", default=None)


class Bound(ContextDecorator):
    """A block for whose batched calls something holds, as :func:`deadline` and :func:`caller` make it.

    It also decorates plain functions. Several threads or tasks may be in it at once. ``change`` gives what holds in the
    block, as fields of a scope, given the scope around it.
    """

    def __init__(self, name: str, change: Callable[[Scope], dict[str, Any]]) -> None:
        self._name = name
        self._change = change

    def __enter__(self) -> None:
        before = current_scope.get()
        outer = before or _UNBOUNDED
        current_scope.set(replace(outer, **self._change(outer), block=self, before=before))

    def __exit__(self, *exc_info: object) -> None:
        # It may end in another context than it began in, as generators do that a framework runs in threads step by
        # step: there nothing of it holds, and what holds is not its own.
        scope = current_scope.get()
        while scope is not None and scope.block is not self:
            scope = scope.before
        if scope is not None:
            current_scope.set(scope.before)

    def _recreate_cm(self) -> Self:
        return type(self)(self._name, self._change)  # one for each call of a decorated function

    if not TYPE_CHECKING:  # checkers reject these; without a checker they need a message that says what to write

        def __call__(self, function: Any) -> Any:
            kind = _units.function_kind(getattr(function, "__func__", function))  # of a static method
            if kind != "function":
                why = f"is a {kind.removeprefix('async ')} function, which runs after the block has ended"
                fix = f"Write inside it: with {self._name}(...):"
                raise InvalidOption("function", function, why=why, fix=fix)
            return super().__call__(function)

        async def __aenter__(self) -> None:
            raise TypeError(f"{self._name}() does not wait. Write `with {self._name}(...):`, without async.")

        async def __aexit__(self, *exc_info: object) -> None: ...


def deadline(timeout: _units.Duration) -> Bound:
    """Bound the batched calls inside the block: they must have their answers within ``timeout`` from now.

    Blocks can be nested; an inner one can only shorten the time. The bound follows the context into tasks and into
    threads that are started with it (``asyncio.to_thread``, Starlette's thread pool), not into other threads. Of a
    plain generator, Starlette and FastAPI run each step in a context of its own: there the bound ends with the first
    ``yield``. So write ``async def`` for a dependency or a response that has such a block.

    Args:
        timeout: Time from the start of the block; zero admits nothing.

    Raises:
        InvalidOption: ``timeout`` is negative, not a number, or cannot be read.
        DeadlineExceeded: From the calls inside, when the time has passed.
    """
    seconds = _units.seconds(timeout, "timeout", zero=True)
    return Bound("deadline", lambda outer: {"deadline": min(outer.deadline, clock.now() + seconds)})


class OnBehalf(Bound):
    """A block that may be left and entered again, between the parts of a response: what a generator set there stays."""

    _scope: Scope | None = None

    def __enter__(self) -> None:
        if self._scope is None:
            super().__enter__()
        else:
            current_scope.set(self._scope)

    def __exit__(self, *exc_info: object) -> None:
        self._scope = current_scope.get()
        super().__exit__(*exc_info)


def on_behalf_of(web_request: WebRequest, key: Hashable = None, priority: int = 0) -> OnBehalf:
    """Make the batched calls inside the block for a web request, under its key and with its priority."""

    def change(outer: Scope) -> dict[str, Any]:
        whose = outer.key if key is None else key
        return {"web_request": web_request, "key": whose, "priority": max(outer.priority, priority)}

    return OnBehalf("on_behalf_of", change)


def caller(key: Hashable, *, priority: int = 0) -> Bound:
    """Say whose the batched calls inside the block are, so that callers share fairly.

    The web middleware does the same with its option ``fair_by``. The key follows the context into tasks and into
    threads that are started with it. An inner block counts before an outer one, and a function's own ``fair_by`` before
    any block.

    Args:
        key: Who calls: anything hashable, such as the name of a tenant. It appears in errors, so it is no place for a
            secret.
        priority: How urgent the calls are, compared with others under the same key: a whole number from 0 to 1,000. If
            a call has a ``priority=`` of its own, the higher one counts.

    Raises:
        InvalidOption: The key is not hashable, or the priority is not such a number.
    """
    check_key(key, "key")
    check_priority(priority)
    return Bound("caller", lambda _outer: {"key": key, "priority": priority})


def check_key(key: Hashable, argument: str) -> None:
    """Reject a key that is not hashable, which came from this argument."""
    try:
        _units.try_key(key)
    except Exception as error:  # noqa: BLE001 - whatever the key's own code raises
        why = f"a key must be hashable: {told(error)}"
        raise InvalidOption(argument, key, why=why, fix="Give a text, a number or a tuple of them.") from None


def check_priority(priority: int) -> int:
    """Reject what is not a whole number from 0 to 1,000."""
    fix = f"Write for example priority=1: from 0, the default, to {_HIGHEST:,}; higher ones go first."
    return _units.whole_number(priority, "priority", at_least=0, most=_HIGHEST, fix=fix)


def left() -> float | None:
    """Seconds until the deadline of this context, negative once it has passed; None where there is none.

    Use it for other steps of the same request, such as the timeout of a database query before the batched call.
    """
    scope = current_scope.get()
    if scope is None or scope.nearest_deadline == math.inf:
        return None
    return scope.nearest_deadline - clock.now()
