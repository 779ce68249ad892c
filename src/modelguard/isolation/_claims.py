"""How a call gets its worker: it waits for a load and then in line, and no thread waits with it.

Whoever has a worker has a thread; whoever waits for one needs none. So no thread that waits can hold up the steps of a
stream, or the calls of another key.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from modelguard import _units
from modelguard.errors import DeadlineExceeded, GuardClosed, QueueFull
from modelguard.isolation._channel import Channel
from modelguard.isolation.status import IsolationStatus
from modelguard.serving import deadlines
from modelguard.serving._shared_threads import SharedThread, Watch
from modelguard.telemetry import Reason, WorkerEndCause

#: Seconds of ``retry_after`` where no rate is known.
_RETRY = 1.0


#: Seconds within which another thread sets what it has found. If this thread itself was interrupted there, nobody does.
_SETTING = 0.1


class Limits(NamedTuple):
    """The times of one call, on the monotonic clock.

    Attributes:
        arrived: When it was made.
        until: When its caller's own deadline ends; infinity for none.
    """

    arrived: float
    until: float = math.inf


class Taken(Protocol):
    """A worker that one call has for itself."""

    @property
    def channel(self) -> Channel:
        """To the worker."""
        ...

    @property
    def pid(self) -> int:
        """Its process id; 0 while it is not known."""
        ...

    def release(self, *, worn: tuple[Reason, ...]) -> None:
        """Give the worker back after its answer; ``worn``: why it asked for its replacement, empty if it did not."""
        ...

    def put_back(self) -> None:
        """Give the worker back without a call. Instead of all the others."""
        ...

    def lose(self, cause: WorkerEndCause, *, blame: bool = True) -> str:
        """Record that the worker has ended in its call, or end it; returns how it ended, for people.

        Args:
            cause: ``"crashed"`` if it has ended by itself; anything else ends it.
            blame: Whether it may have been the call's fault.
        """
        ...

    def leave(self) -> None:
        """The call has ended, whatever came of it. After :meth:`release` or :meth:`lose`."""


class Place(Protocol):
    """Where a claim waits.

    Attributes:
        loading: Whether it waits for a load there.
    """

    loading: bool

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for at this place any more."""
        ...

    def leave(self) -> bool:
        """Wait there no more; false if it does not wait there, or has its worker already. From any thread."""
        ...


class Claim:
    """A call that asks for a worker. It ends once: with a worker, with an error, or withdrawn. Thread-safe.

    Args:
        limits: The call's times.
        key: Which of a pool's models it needs.
        then: Called with it when it has ended, unless it was withdrawn. With a worker, from any thread and under any
            lock, so it must not block. Kept until then and no longer: the call's future refers to the claim.

    Attributes:
        place: Where it waits; None if it does not wait.
        admitted: Whether there was room for it, so that none refuses it where it goes on to wait.
        until: When the wait at that place ends, on the monotonic clock.
        taken: The worker that it has got.
        error: Why it has got none.
    """

    __slots__ = ("_claims", "_late", "_open", "admitted", "error", "key", "limits", "place", "taken", "then", "until")

    def __init__(self, limits: Limits, key: object, then: Callable[[Claim], object]) -> None:
        self.limits = limits
        self.key = key
        self.then: Callable[[Claim], object] | None = then
        self.place: Place | None = None
        self.admitted = False
        self.until = math.inf
        self.taken: Taken | None = None
        self.error: BaseException | None = None
        self._claims: Claims | None = None
        self._late: Callable[[], Exception] | None = None
        self._open = [None]  # who takes the entry out ends it: one operation, so no lock is needed

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is ending."""
        return not self._open

    # For the scope

    def wait(self, claims: Claims, until: float, late: Callable[[], Exception]) -> None:
        """Wait at :attr:`place`, at most until then, or until the caller's own deadline.

        Args:
            claims: Those of the scope.
            until: On the monotonic clock.
            late: Makes the error for a wait that has lasted until then.
        """
        self._claims, self._late, self.until = claims, late, min(until, self.limits.until)
        claims.add(self)
        if self.ended:  # meanwhile
            claims.remove(self)
            self._leave()

    def grant(self, taken: Taken) -> bool:
        """Give it a worker; false if it has ended meanwhile."""
        if not self._end():
            return False
        self.taken = taken
        self.place = None
        self._tell()
        return True

    def fail(self, error: BaseException) -> None:
        """There is no worker for it. Runs callbacks of users, so never under a lock; else :func:`aside`."""
        if self._end():
            self.error = error
            self.place = None
            self._tell()

    # For the caller

    def withdraw(self) -> bool:
        """Ask no more; false if it has ended."""
        if not self._end():
            return False
        self.then = None
        self._leave()
        return True

    def refuse(self, error: Exception) -> None:
        """End the wait with an error. Runs callbacks of users."""
        if self._end():
            self._leave()
            self.error = error
            self._tell()

    def expire(self, now: float) -> None:
        """End the wait if it has lasted long enough."""
        if now < self.until or not self._end():
            return
        self._leave()
        late = self._late if now < self.limits.until else None
        self.error = self._too_late(now) if late is None else late()
        self._tell()

    def _too_late(self, now: float) -> DeadlineExceeded:
        name = "" if self._claims is None else self._claims.name
        return DeadlineExceeded(name, waited=now - self.limits.arrived)

    def _tell(self) -> None:
        then, self.then = self.then, None
        assert then is not None  # noqa: S101 - it ends once
        then(self)

    def _leave(self) -> None:
        place = self.place
        if place is not None:
            place.leave()

    def _end(self) -> bool:
        try:
            self._open.pop()
        except IndexError:
            return False
        if self._claims is not None:
            self._claims.remove(self)
        return True


class ThreadClaim(Claim):
    """The claim of a thread that blocks."""

    __slots__ = ("_woken",)

    def __init__(self, limits: Limits, key: object) -> None:
        super().__init__(limits, key, _wake)
        self._woken: SimpleQueue[None] | None = None

    def wait(self, claims: Claims, until: float, late: Callable[[], Exception]) -> None:
        """As in every claim; the thread waits no longer than that either."""
        if self._woken is None:
            self._woken = SimpleQueue()
        super().wait(claims, until, late)
        self.wake()

    def wake(self) -> None:
        """Have the thread look."""
        if self._woken is not None:
            self._woken.put(None)

    def result(self) -> Taken:
        """Block until it has ended.

        Raises:
            BaseException: Why there is no worker.
        """
        while self.taken is None and self.error is None:
            self._sleep()
        if self.error is not None:
            raise self.error
        assert self.taken is not None  # noqa: S101 - for the checkers
        return self.taken

    def abandon(self) -> None:
        """An exception from a signal handler, as of Ctrl-C, has come between any two steps: keep nothing."""
        if self.withdraw():
            return
        until = time.monotonic() + _SETTING
        while self.taken is None and self.error is None and time.monotonic() < until:
            time.sleep(0)
        if self.taken is not None:
            self.taken.put_back()

    def _sleep(self) -> None:
        assert self._woken is not None  # noqa: S101 - it waits
        left = min(self.until - time.monotonic(), threading.TIMEOUT_MAX)
        try:
            self._woken.get(timeout=max(0.0, left))
        except Empty:
            self.expire(time.monotonic())


def _wake(claim: Claim) -> None:
    assert isinstance(claim, ThreadClaim)  # noqa: S101 - for the checkers
    claim.wake()


class Claims:
    """The calls of one function that wait. Thread-safe.

    Args:
        name: The function's name.
        most_loading: How many may wait for a load.
    """

    def __init__(self, name: str, *, most_loading: int) -> None:
        self.name = name
        self._most_loading = most_loading
        self._waiting: dict[Claim, None] = {}
        self._lock = threading.RLock()  # reentrant: the garbage collector may end a dropped stream at any point
        self._watch = Watch(name, self._lock, self._next, self._expire)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Claim]:
        return iter(tuple(self._waiting))

    def add(self, claim: Claim) -> None:
        """A claim waits."""
        self._waiting[claim] = None
        # A thread looks at the time by itself.
        if isinstance(claim, ThreadClaim) or claim.until + deadlines.ahead() >= self._watch.due:
            return
        with self._lock:
            at = claim.until + deadlines.ahead()
            if at < self._watch.due:
                self._watch.schedule(at)

    def remove(self, claim: Claim) -> None:
        """It waits no more."""
        self._waiting.pop(claim, None)

    def admit(self, claim: Claim) -> None:
        """Check whether one more may wait for a load. How many may wait for a worker, the roster knows.

        Raises:
            QueueFull: Too many do.
        """
        if len(self._waiting) >= self._most_loading and not claim.admitted:
            queued = sum(one.place is not None and one.place.loading for one in self)
            if queued >= self._most_loading:
                raise QueueFull(self.name, queued=queued, retry_after=_RETRY)
        claim.admitted = True

    def close(self) -> None:
        """Refuse what waits without a thread. The others are served, or get their error, as their molds end."""
        for claim in self:
            if not isinstance(claim, ThreadClaim):
                claim.refuse(GuardClosed(self.name))

    # Processes live in real time, while a test moves the clock of the watch.

    def _next(self, now: float) -> float:
        ahead = deadlines.ahead()
        return min((claim.until for claim in self if claim.until > now - ahead), default=math.inf) + ahead

    def _expire(self, now: float) -> None:
        now -= deadlines.ahead()
        for claim in self:
            claim.expire(now)


def aside(work: Callable[[], object]) -> None:
    """Run what may block, or runs code of users, in a thread of its own; in this one if the system gives none."""
    try:
        SharedThread(work, "modelguard-isolated-call").start()
    except RuntimeError:
        work()


# What a call needs of the processes that compute it, wherever these are: of this process, or of the whole host.


class Scope(Protocol):
    """Where the mold and the workers of one isolated function are."""

    @property
    def claims(self) -> Claims:
        """The calls of this process that wait for a worker."""
        ...

    def take(self, limits: Limits, key: Any = None) -> Taken:
        """Take a worker; start what is missing. Blocks.

        Args:
            limits: Of the call.
            key: Which of a pool's models it needs; None for a function that has no pool.

        Raises:
            GuardClosed, LoadFailed, Reloading, QueueFull, CircuitOpen, DeadlineExceeded: There is none.
        """
        ...

    def request(self, claim: Claim) -> None:
        """Take a worker for a call that does not block; start what is missing. The errors are those of :meth:`take`."""
        ...

    @property
    def ready(self) -> bool:
        """Whether a worker can answer."""
        ...

    @property
    def version(self) -> str | None:
        """The version of the current model; None if it has none, or if there are several models."""
        ...

    def status(self, queued: int) -> IsolationStatus:
        """Its state, its processes and its counts, with so many calls that wait."""
        ...

    def rollback(self) -> None:
        """Make the previous mold current again."""
        ...

    def load(self, timeout: _units.Duration | None) -> None:
        """Start the mold and its workers unless they run. Blocks."""
        ...

    async def aload(self, timeout: _units.Duration | None) -> None:
        """:meth:`load` for coroutines."""
        ...

    @property
    def paused(self) -> bool:
        """Whether :meth:`set_paused` holds back the policies, as far as this process knows. Never blocks."""
        ...

    def set_paused(self, *, paused: bool) -> None:
        """Hold back what policies ask for, or no longer."""
        ...

    def unload(self, timeout: _units.Duration | None) -> None:
        """End the mold and its workers until the next call."""
        ...

    async def aunload(self, timeout: _units.Duration | None) -> None:
        """:meth:`unload` for coroutines."""
        ...

    def reload(self, *, wait: bool, timeout: _units.Duration | None) -> None:
        """Make a new mold."""
        ...

    async def areload(self, timeout: _units.Duration | None) -> None:
        """:meth:`reload` for coroutines."""
        ...

    def close(self) -> None:
        """Refuse further calls, wait for those that run, and end what belongs to this process alone."""
        ...

    async def aclose(self) -> None:
        """:meth:`close` for coroutines."""
        ...

    def reopen(self) -> None:
        """Admit calls again after :meth:`close`."""
        ...

    def refuse_calls(self) -> None:
        """This process exits, and ends its molds: raise ``GuardClosed`` from now on. Waits for nothing."""
        ...

    def end_at_once(self) -> None:
        """Nobody can call the function any more: end without waiting for anything."""
        ...

    def abandon(self) -> None:
        """In a forked child: the processes are the parent's. Takes no lock, which a thread of the parent may hold."""


# Calls that wait for a worker, in the order in which they get one.


W = TypeVar("W")


class Waiter(Generic[W]):
    """A call that waits for a worker.

    Attributes:
        client: Whose call it is.
        arrived: When it was made, on the monotonic clock.
        admitted: Whether it has waited before, so that it has a place in any case.
        worker: The worker that it got.
        error: Why it gets none.
    """

    def __init__(self, client: Hashable = None, *, arrived: float = math.inf, admitted: bool = False) -> None:
        self.client = client
        self.arrived = arrived
        self.admitted = admitted
        self.worker: W | None = None
        self.error: Exception | None = None

    def wake(self) -> None:
        """It has its worker, or its error. Called under the roster's lock, so it must not block."""
        raise NotImplementedError


class WaitingLine(Generic[W]):
    """Clients take turns, each with its oldest call: one with many calls does not hold up one with few.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._by_client: OrderedDict[Hashable, deque[Waiter[W]]] = OrderedDict()

    def __len__(self) -> int:
        # Counted anew: an exception from a signal handler may come between two steps.
        return sum(map(len, self._by_client.values()))

    def __iter__(self) -> Iterator[Waiter[W]]:
        for waiters in self._by_client.values():
            yield from waiters

    def append(self, waiter: Waiter[W]) -> None:
        """Add a call behind those of its client that were made before."""
        waiters = self._by_client.setdefault(waiter.client, deque())
        at = len(waiters)
        while at and waiters[at - 1].arrived > waiter.arrived:
            at -= 1
        waiters.insert(at, waiter)

    def popleft(self) -> Waiter[W]:
        """Take the call whose turn it is. Its client is the last one from now on.

        Raises:
            KeyError: Nobody waits.
        """
        client, waiters = self._by_client.popitem(last=False)
        waiter = waiters.popleft()
        if waiters:
            self._by_client[client] = waiters
        return waiter

    def remove(self, waiter: Waiter[W]) -> bool:
        """Take a call out; false if it does not wait."""
        waiters = self._by_client.get(waiter.client)
        if waiters is None or waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._by_client[waiter.client]
        return True
