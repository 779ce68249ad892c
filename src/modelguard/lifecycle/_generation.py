"""One loaded model and the calls that run on it."""

from __future__ import annotations

import math
import os
import weakref
from collections import deque
from concurrent.futures import Future
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from modelguard.errors import GuardClosed, LoadFailed

if TYPE_CHECKING:
    from modelguard.telemetry import PostponeCause, Reason

M = TypeVar("M")


class Generation(Generic[M]):
    """A model from its load to its release.

    Attributes:
        leases: One entry per call that runs on it now. It is a list because ``append`` and ``pop`` are atomic and cost
            a quarter of a lock. A call takes its lease first and checks ``retired`` afterwards; a swap sets ``retired``
            first and checks the leases afterwards. So one of them always sees the other.
        version: What the loader says it is; None if it says nothing.
        uses: Calls that have ended on it.
        errors: Consecutive calls, up to the latest, that raised.
        served: Whether a call has succeeded, as the first error after it has noticed: a success has no time for that.
        fruitless_reloads: How many reloads for errors in a row led to it, on whose models no call succeeded.
        alarm: The number of uses at which the end of a call takes the slow path: a policy may be due or, once the
            generation is retired, a drain waits for its last call. One comparison on the hot path covers both.
        retired: It takes no new calls, except those nested in its own.
        born: When it began to take calls, on the guard's clock.
        began: The same on the wall clock, in seconds since the epoch.
        pid: The process that loaded it, which may be a parent of this one.
        model_bytes: Its size: what its load took, or what its library says, if that is more.
        written_bytes: What its load took.
        gpu_bytes: Bytes that its load has allocated on each GPU, by the device's index.
        gpu_allocated: Bytes that the process had allocated on all of them when it began to take calls, and its
            predecessor was gone; None if it used none.
        dropped: No call may run on it any more; its model is being released.
    """

    __slots__ = (
        "__weakref__",
        "alarm",
        "began",
        "born",
        "dropped",
        "errors",
        "fruitless_reloads",
        "gpu_allocated",
        "gpu_bytes",
        "jitter",
        "leases",
        "load_seconds",
        "model",
        "model_bytes",
        "number",
        "pid",
        "retired",
        "served",
        "uses",
        "version",
        "written_bytes",
    )

    def __init__(
        self,
        number: int,
        model: M,
        *,
        born: float,
        began: float,
        jitter: float,
        version: str | None = None,
    ) -> None:
        self.number = number
        self.model = model
        self.version = version
        self.born = born
        self.began = began
        self.jitter = jitter
        self.pid = os.getpid()
        self.model_bytes = self.written_bytes = 0
        self.load_seconds = 0.0
        self.gpu_bytes: dict[int, int] = {}
        self.gpu_allocated: int | None = None
        self.leases: list[None] = []
        self.uses = 0
        self.errors = 0
        self.served = False
        self.fruitless_reloads = 0
        self.alarm: float = math.inf
        self.retired = False
        self.dropped = False

    def drop(self) -> M:
        model = self.model
        self.dropped = True
        del self.model
        return model

    def __repr__(self) -> str:
        return f"<generation {self.number}, {len(self.leases)} in flight>"


# One load or release: under way, or due and postponed.


class PostponedJob(NamedTuple):
    """What a policy asks for, and must wait.

    Attributes:
        reasons: Which policies are due.
        cause: Why it waits.
        until: When it may begin, on the guard's clock; None while the guard is paused.
    """

    reasons: tuple[Reason, ...]
    cause: PostponeCause
    until: float | None


class LoadJob:
    """A load, from the request to the release of the generation that it replaces; or that release alone.

    Attributes:
        reasons: Why it was requested.
        urgent: Somebody asked for it explicitly, so it does not wait for a quiet moment.
        after_call: It was requested at the end of a call, where a pause between calls may begin.
        replaces: There is a current generation that it has yet to replace.
        unloads: It releases the current generation and loads none. Those who need one meanwhile wait for its end.
        by_policy: Nobody but a policy asked for it, so it does not begin while the guard is paused.
        covers: The last request that its load answers; later ones make that load stale. None before the load begins.
        cancelled: A rollback came before its model took calls, so that model is discarded.
        threads: Identities of the threads that do its work, to detect a load that waits for itself.
    """

    __slots__ = (
        "after_call",
        "by_policy",
        "cancelled",
        "covers",
        "reasons",
        "replaces",
        "threads",
        "unloads",
        "urgent",
    )

    def __init__(
        self,
        reasons: tuple[Reason, ...],
        *,
        urgent: bool,
        replaces: bool = False,
        after_call: bool = False,
        unloads: bool = False,
        by_policy: bool = False,
    ) -> None:
        self.reasons = reasons
        self.urgent = urgent
        self.after_call = after_call
        self.replaces = replaces
        self.unloads = unloads
        self.cancelled = False
        self.by_policy = by_policy
        self.covers: int | None = None
        self.threads: set[int] = set()


# Those who wait for a load.


#: How a wait ends: None if a generation was installed, else the error that the waiter raises.
Outcome = LoadFailed | GuardClosed | None


class Waiters:
    """Futures, each with the number of the request that it waits for. Used under the guard's lock."""

    def __init__(self) -> None:
        self._requests: dict[Future[Outcome], int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: int) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()  # so that a waiter's cancellation cannot touch it
        self._requests[future] = request
        return future

    def remove(self, future: Future[Outcome]) -> None:
        self._requests.pop(future, None)

    def pop(self, covers: float) -> list[Future[Outcome]]:
        done = [future for future, request in self._requests.items() if request <= covers]
        for future in done:
            del self._requests[future]
        return done


# Models that several guards have loaded: those of a pool, or copies of one model. No two may be the same object.


_VALUES = (str, bytes, int, float, complex, tuple, frozenset, type, FunctionType, BuiltinFunctionType, ModuleType)


def is_plain_value(model: object) -> bool:
    """Whether two loads may well return this same object: it holds nothing that a release could free."""
    return isinstance(model, _VALUES)


class KnownModels:
    def __init__(self) -> None:
        self._models: dict[int, weakref.KeyedRef[int, object]] = {}

    def add(self, model: object) -> bool:
        """Note a model; false if it is known already. Plain values, and what has no weak references, do not count.

        Two guards may load at once, so there is one step that decides, and no lock that a fork could break.
        """
        if is_plain_value(model):
            return True
        try:
            mine = weakref.KeyedRef(model, self._forget, id(model))
        except TypeError:  # dict, list, ...
            return True
        while (found := self._models.setdefault(id(model), mine)) is not mine:
            if found() is model:
                return False
            self._forget(found)  # of a model that is gone, whose identity this one has got
        return True

    def _forget(self, reference: weakref.KeyedRef[int, object]) -> None:
        if self._models.get(reference.key) is reference:
            self._models.pop(reference.key, None)


# Whether replacing a model by ``load_first`` leaves more and more memory behind.
#
# While two copies are alive, what outlives a load (interned strings, caches of libraries, objects of the service) lies
# among the objects of both. CPython frees memory by arenas of 1 MiB, and one object that lives keeps its arena. With
# ja_ginza, 50 reloads by ``load_first`` raised private memory from 284 to 333 MB (361 in between); by ``drain_first``,
# with one copy at a time, it stayed flat (slope -0.03 MB a reload; CPython 3.11, glibc). Garbage collection, malloc's
# settings and other allocators change nothing. One ``drain_first`` in between returned it: 344 to 273 MB.


#: Memory may grow by this share of the model's size.
SHARE = 0.1

#: And at least by this many bytes: a load's own heap differs by up to 30 MB from one load of ja_ginza to the next.
NOISE = 16 * 2**20

#: The lowest of so many readings counts, as for the memory policies.
READINGS = 3


class LeftBehind:
    """Private memory after each replacement, when one model is left."""

    def __init__(self) -> None:
        self._readings: deque[int] = deque(maxlen=READINGS)
        self._least: int | None = None
        self._patience = 1

    @property
    def amount(self) -> int:
        """Bytes by which the lowest of the last three readings is above the lowest of all."""
        if self._least is None or len(self._readings) < READINGS:
            return 0
        return min(self._readings) - self._least

    def is_too_much(self, model_bytes: int) -> bool:
        """Whether the next replacement should have one copy at a time."""
        return self.amount > self._patience * max(SHARE * model_bytes, NOISE)

    def record(self, memory: int, *, one_copy: bool) -> None:
        """Add a reading, in bytes.

        Args:
            memory: After the replacement.
            one_copy: Whether the old model was released before the new one was loaded. Nothing can lower memory
                further, so counting begins anew. If that gave back less than half, something else grows, and twice as
                much is tolerated from then on.
        """
        if one_copy:
            if amount := self.amount:
                in_vain = self._readings[-1] - memory < amount / 2
                self._patience = 2 * self._patience if in_vain else 1
            self._readings.clear()
            self._least = memory
        self._readings.append(memory)
        self._least = memory if self._least is None else min(self._least, memory)
