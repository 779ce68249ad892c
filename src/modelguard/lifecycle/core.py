"""The bookkeeping of one guard, under one lock. It starts no thread, reads no clock and emits no event.

Who serves, who runs on it, which load is under way and who waits for it: every change of these is a short method
here. The work itself (loading, draining, releasing) is done by :mod:`~modelguard.lifecycle.flight`.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Generic, TypeVar

from modelguard.errors import GuardClosed, LoadFailed
from modelguard.lifecycle.generation import Generation, Mark

if TYPE_CHECKING:
    from modelguard.lifecycle.leases import Lease
    from modelguard.telemetry import GenerationReleased

M = TypeVar("M")

#: How a wait ends: None if a generation was installed, else the error that the waiter is to raise.
Outcome = LoadFailed | GuardClosed | None


class Ticket:
    """One load under way, from the request to the release of what it replaced.

    Attributes:
        reasons: Why it was requested.
        urgent: Somebody asked for it in so many words, so it does not wait for a quiet moment.
        after_call: It was requested at the end of a call, where a pause among the calls may begin.
        replaces: A generation serves that it has yet to replace.
        covers: The last request that its load answers; later ones make that load stale. None before the load begins.
        threads: Identities of the threads that do its work, to tell a load that waits for itself.
    """

    __slots__ = ("after_call", "covers", "reasons", "replaces", "threads", "urgent")

    def __init__(self, reasons: tuple[str, ...], *, urgent: bool, replaces: bool, after_call: bool = False) -> None:
        self.reasons = reasons
        self.urgent = urgent
        self.after_call = after_call
        self.replaces = replaces
        self.covers: int | None = None
        self.threads: set[int] = set()


class Core(Generic[M]):
    """State of one guard. Fields are read freely; they change only inside its methods, under ``lock``.

    Attributes:
        floor: The least private memory that a release has left so far, in bytes.
        begun: Leases that are held by an object rather than by a running call; for the sake of forks.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: ContextVar[Mark | None] = ContextVar(f"modelguard {name}", default=None)
        self.serving: Generation[M] | None = None
        self.ticket: Ticket | None = None
        self.draining: set[Generation[M]] = set()
        self.abandoned: set[Generation[M]] = set()
        self.closed = False
        self.requests = 0
        self.generations = 0
        self.reloads = 0
        self.failures = 0
        self.failure: LoadFailed | None = None
        self.retry_at = -math.inf
        self.model_bytes: int | None = None
        self.last_release: GenerationReleased | None = None
        self.floor: int | None = None
        self.epoch = 0
        self.begun: weakref.WeakSet[Lease[M]] = weakref.WeakSet()
        self._renew_locks()

    def _renew_locks(self) -> None:
        # Reentrant, because a lease that the garbage collector finds dropped is returned from wherever it runs.
        self.lock = threading.RLock()
        self.drained = threading.Condition(self.lock)
        self.waiting: dict[Future[Outcome], int] = {}

    # Calls

    def enter(self) -> Generation[M] | None:
        """Take a lease on the generation of the enclosing call, else on the serving one; None if there is none.

        Decorated functions spell out the common case of this for themselves.
        """
        outer = self.inside()
        with self.lock:
            generation = self.serving if outer is None or outer.dropped else outer
            if generation is not None:
                generation.leases.append(None)
            return generation

    def inside(self) -> Generation[M] | None:
        """The generation of the call that encloses this one, if any."""
        outer = tuple(self.held.get() or ())  # at once: another thread may be emptying it
        return outer[0] if outer else None

    def mark(self, generation: Generation[M]) -> Mark:
        """What the context is to hold while a call runs on ``generation``."""
        outer = tuple(self.held.get() or ())
        return [generation, outer[1] + 1 if outer and outer[0] is generation else 1]

    @contextmanager
    def on(self, generation: Generation[M]) -> Iterator[None]:
        """Have guarded functions that the block calls run on ``generation``; the block itself is no use of it."""
        mark = self.mark(generation)
        token = self.held.set(mark)
        try:
            yield
        finally:
            mark.clear()
            self.held.reset(token)

    @staticmethod
    def leave(generation: Generation[M], failed: bool) -> bool:  # noqa: FBT001 - a keyword would cost the hot path
        """Return a lease; true if the caller must look further (a policy may be due, or a drain waits)."""
        generation.leases.pop()
        generation.uses = uses = generation.uses + 1
        if failed:
            generation.errors += 1
            return True
        generation.errors = 0
        return uses >= generation.alarm

    def ended(self, generation: Generation[M]) -> bool:
        """Note that a call on a retired generation has ended; true if it was abandoned and this was its last call."""
        with self.lock:
            self.drained.notify_all()
            if generation.leases or generation not in self.abandoned:
                return False
            self.abandoned.remove(generation)
            generation.dropped = True
            return True

    # Waiting for a generation

    def wait(self) -> Future[Outcome]:
        """Join those who wait for any generation to be installed. The caller has found that none serves."""
        with self.lock:
            self.refuse_if_closed()
            return self._waiter(0)

    def waiter_for(self, request: int) -> Future[Outcome]:
        """Join those who wait for a model that was loaded after ``request`` was made."""
        with self.lock:
            if self.closed:
                done: Future[Outcome] = Future()
                done.set_result(GuardClosed(self.name))
                return done
            return self._waiter(request)

    def _waiter(self, request: int) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()  # so that one waiter's cancellation cannot touch it
        self.waiting[future] = request
        return future

    def forget(self, future: Future[Outcome]) -> None:
        """Drop a waiter whose time ran out."""
        with self.lock:
            self.waiting.pop(future, None)

    def _pop_waiting(self, covers: float) -> list[Future[Outcome]]:
        done = [future for future, request in self.waiting.items() if request <= covers]
        for future in done:
            del self.waiting[future]
        return done

    def refuse_if_closed(self) -> None:
        """Raise GuardClosed after ``close()``."""
        if self.closed:
            raise GuardClosed(self.name)

    # Loads

    def request(self, reasons: tuple[str, ...], *, urgent: bool) -> tuple[int, Ticket | None]:
        """Ask for a load that begins after this moment.

        Returns:
            The number of the request, and a ticket if the caller must start its flight (None: one is under way).
        """
        with self.lock:
            self.refuse_if_closed()
            self.requests += 1
            if self.ticket is not None:
                self.ticket.urgent = self.ticket.urgent or urgent
                return self.requests, None
            self.ticket = Ticket(reasons, urgent=urgent, replaces=self.serving is not None)
            return self.requests, self.ticket

    def request_if_idle(
        self,
        reasons: tuple[str, ...],
        *,
        urgent: bool,
        after_call: bool = False,
        instead_of: Generation[M] | None = None,
    ) -> Ticket | None:
        """Ask for a load only if none is under way, the guard is open, and ``instead_of``, if given, serves still."""
        with self.lock:
            if self.ticket is not None or self.closed or instead_of not in (None, self.serving):
                return None
            ticket = self.request(reasons, urgent=urgent)[1]
            if ticket is not None:
                ticket.after_call = after_call
            return ticket

    def begin(self, ticket: Ticket) -> bool:
        """The loader is about to be called: requests made so far are answered by it. False if the guard is closed."""
        with self.lock:
            ticket.covers = self.requests
            return not self.closed

    def install(
        self, ticket: Ticket, generation: Generation[M], *, discardable: bool
    ) -> tuple[bool, Generation[M] | None]:
        """Let ``generation`` serve.

        Args:
            ticket: The load that made it.
            generation: Loaded, validated and warm.
            discardable: Whether a newer request may send it away unused, as long as another generation serves.

        Returns:
            Whether it serves now, and the generation that it replaced, which the caller is to drain and release.
        """
        with self.lock:
            covers = ticket.covers or 0
            stale = discardable and self.requests > covers and self.serving is not None
            if self.closed or stale:
                return False, None
            self.generations = generation.number
            old, self.serving = self.serving, generation
            ticket.replaces = False  # done: what is left of its flight is the end of the old one
            if old is not None:
                self._retire(old)
            if generation.number > 1:
                self.reloads += 1
            self.model_bytes = max(self.model_bytes or 0, generation.model_bytes)
            self.failures, self.failure, self.retry_at = 0, None, -math.inf
            waiting = self._pop_waiting(covers)
        for future in waiting:
            future.set_result(None)
        return True, old

    def fail(self, ticket: Ticket, failure: LoadFailed, *, retry_at: float) -> None:
        """A load has failed; everyone who waits hears of it, once."""
        with self.lock:
            # In the same breath: whoever came between the news and the end of the flight would wait for nothing.
            self._end(ticket)
            self.failures = failure.attempt
            # The cause's traceback holds the loader's frames, and they may hold half a model: not kept.
            self.failure = failure.again(failure.retry_after)
            self.retry_at = retry_at
            waiting = self._pop_waiting(math.inf)
        for future in waiting:
            future.set_result(failure)

    def finish(self, ticket: Ticket, *, failed: bool) -> Ticket | None:
        """The flight is over; returns the ticket of the next one if requests came in after its load began."""
        with self.lock:
            self._end(ticket)
            if failed or self.closed or self.ticket is not None or self.requests <= (ticket.covers or 0):
                return None
            self.ticket = Ticket(("requested during a load",), urgent=True, replaces=self.serving is not None)
            return self.ticket

    def _end(self, ticket: Ticket) -> None:
        if self.ticket is ticket:  # not in a child that was forked meanwhile, nor after a failure
            self.ticket = None

    # The end of a generation

    def retire_serving(self) -> Generation[M] | None:
        """Take the serving generation out of service, for the caller to drain and release."""
        with self.lock:
            old, self.serving = self.serving, None
            if old is not None:
                self._retire(old)
            return old

    def set_alarm(self, generation: Generation[M], uses: float) -> None:
        """Have the end of a call look at the policy once ``uses`` calls have ended."""
        with self.lock:
            if not generation.retired:
                generation.alarm = uses

    def _retire(self, generation: Generation[M]) -> None:
        generation.retired = True
        generation.alarm = 0
        self.draining.add(generation)

    def drain(self, generation: Generation[M], timeout: float) -> int:
        """Wait until no call runs on ``generation``; returns how many still do when the time is over.

        Those that remain abandon it: :meth:`ended` tells when the last of them has ended.
        """
        with self.lock:
            # Decided once: a caller that came in the moment of the retirement may have its lease for an instant yet.
            if self.drained.wait_for(lambda: not generation.leases, timeout):
                generation.dropped = True
                return 0
            self.abandoned.add(generation)
            return max(1, len(generation.leases))

    def take(self, generation: Generation[M]) -> M:
        """Give up a drained generation's model for its release."""
        with self.lock:
            return generation.drop()

    def released(self, generation: Generation[M], event: GenerationReleased | None) -> None:
        """Note what the release of a drained generation gave back, if that could be told."""
        with self.lock:
            self.draining.discard(generation)
            if event is None:
                return
            self.last_release = event
            self.floor = event.bytes_after if self.floor is None else min(self.floor, event.bytes_after)

    def close(self) -> Generation[M] | None:
        """Refuse everything from now on; returns the generation that served."""
        with self.lock:
            self.closed = True
            old = self.retire_serving()
            waiting = self._pop_waiting(math.inf)
        for future in waiting:
            future.set_result(GuardClosed(self.name))
        return old

    # Fork

    def after_fork_in_child(self, jitter: float) -> None:
        """Keep the ready generation; threads, locks, counters and jitter are the child's own.

        Only the forking thread lives on, so the only leases left are those of the calls that it is inside of, and of
        the generators and the like that it has begun.
        """
        begun = [lease for lease in self.begun if lease.carry_over()]
        self._renew_locks()
        self.epoch += 1
        self.ticket = None
        self.draining.clear()
        self.abandoned.clear()
        self.reloads = self.failures = 0
        self.failure, self.retry_at, self.last_release, self.floor = None, -math.inf, None, None
        generation = self.serving
        if generation is not None:
            generation.leases = []
            generation.uses = generation.errors = 0
            generation.jitter = jitter
        inside = self.held.get()
        if inside:
            inside[0].leases = [None] * inside[1]
        for lease in begun:
            lease.join_child()
