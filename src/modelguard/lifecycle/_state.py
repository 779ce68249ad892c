"""The state of one guard, under one lock. It starts no thread, reads no clock and emits no event.

Its generations, which are loaded models with the calls that run on them; which of them takes calls; which load is under
way and who waits for it: each change is a short method. The work itself is done elsewhere: :mod:`._engine` asks for
loads, :mod:`._reload` runs them and :mod:`._release` ends a generation.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from modelguard.errors import GuardClosed, LoadFailed
from modelguard.facts._proc import ShownPause, ShownVersion
from modelguard.lifecycle._models import KnownModels, unpacked
from modelguard.runtime import call_context, fork_hooks
from modelguard.runtime.fork_hooks import WeakRegistry
from modelguard.runtime.waiting import promise

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import GuardOptions
    from modelguard.lifecycle._replay import RecordedCalls
    from modelguard.lifecycle.system import System
    from modelguard.telemetry import GenerationReleased, PostponeCause, Reason


M = TypeVar("M")

#: What a guard does, in one word.
State = Literal["new", "loading", "ready", "reloading", "draining", "degraded", "idle", "failed", "closed"]


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class Generation(Generic[M]):
    """A model from its load to its release."""

    number: int
    model: M
    born: float = field(kw_only=True)  # when it began to take calls, on the guard's clock
    began: float = field(kw_only=True)  # the same on the wall clock, in seconds since the epoch
    jitter: float = field(kw_only=True)
    version: str | None = field(kw_only=True, default=None)  # what the loader says it is
    pid: int = field(init=False, default_factory=os.getpid)  # of the process that loaded it: maybe a parent of this one
    model_bytes: int = field(init=False, default=0)  # what its load took, or what its library says, if that is more
    written_bytes: int = field(init=False, default=0)  # what its load took
    load_seconds: float = field(init=False, default=0.0)  # of loading, validation and warm-up together
    stall_seconds: float = field(init=False, default=0.0)  # within them: the longest time without another Python thread
    gpu_bytes: dict[int, int] = field(init=False, default_factory=dict)  # what its load allocated, by the GPU's index
    #: Bytes of the process on all GPUs as it began to take calls and its predecessor was gone; None if it used none.
    gpu_allocated: int | None = field(init=False, default=None)
    #: One entry per call that runs on it now. A list, because ``append`` and ``pop`` are atomic and cost a quarter of
    #: a lock. A call takes its lease first and checks ``retired`` afterwards; a swap sets ``retired`` first and checks
    #: the leases afterwards. So one of them always sees the other.
    leases: list[None] = field(init=False, default_factory=list)
    uses: int = field(init=False, default=0)  # calls that have ended on it
    errors: int = field(init=False, default=0)  # consecutive calls, up to the latest, that raised
    #: Whether a call has succeeded, as the first error after it has noticed: a success has no time for that.
    served: bool = field(init=False, default=False)
    fruitless_reloads: int = field(init=False, default=0)  # for errors, in a row, up to it; no call succeeded since
    #: The number of uses at which the end of a call takes the slow path: a policy may be due or, once it is retired, a
    #: drain waits for its last call. One comparison on the hot path covers both.
    alarm: float = field(init=False, default=math.inf)
    retired: bool = field(init=False, default=False)  # it takes no new calls, except those nested in its own
    dropped: bool = field(init=False, default=False)  # no call may run on it any more; its model is being released
    demanded: tuple[Reason, ...] = field(init=False, default=())  # why it is to be replaced, besides the policies
    pinned: bool = field(init=False, default=False)  # a rollback has made it current again

    def drop(self) -> M:
        model = self.model
        self.dropped = True
        del self.model
        return model

    def __repr__(self) -> str:
        return f"<generation {self.number}, {len(self.leases)} in flight>"


# One load or release: under way, or due and postponed.


class PostponedJob(NamedTuple):
    """What a policy asks for, and must wait."""

    reasons: tuple[Reason, ...]
    cause: PostponeCause
    until: float | None  # when it may begin, on the guard's clock; None while the guard is paused


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load, from the request to the release of the generation that it replaces; or that release alone."""

    reasons: tuple[Reason, ...]
    urgent: bool = field(kw_only=True)  # somebody asked for it explicitly, so it waits for no quiet moment
    replaces: bool = field(kw_only=True, default=False)  # there is a current generation that it has yet to replace
    after_call: bool = field(kw_only=True, default=False)  # asked for by the end of a call, where a pause may begin
    unloads: bool = field(kw_only=True, default=False)  # it loads none; those who need one meanwhile wait for its end
    by_policy: bool = field(kw_only=True, default=False)  # by nobody else, so it does not begin in a paused guard
    #: The last request that its load answers; later ones make that load stale. None before the load begins.
    covers: int | None = field(init=False, default=None)
    cancelled: bool = field(init=False, default=False)  # a rollback came before its model took calls: that is discarded
    threads: set[int] = field(init=False, default_factory=set)  # which do its work: a load may wait for itself
    has_turn: bool = field(init=False, default=False)  # it is the one reload of this host, or goes on without its turn
    ended: Future[None] = field(init=False, default_factory=promise)


#: How a wait for a load ends: None if a generation was installed, else the error that the waiter raises.
Outcome = LoadFailed | GuardClosed | None


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


#: A lease, which a context holds while a call runs: the call's generation and how deeply calls on it are nested. The
#: list is filled in the step that takes the lease, and emptied in the step that returns it. There is no call of a
#: function in these steps, and so no signal handler, which may raise. And a context that outlives its call (a task
#: started inside it) can tell.
Enclosing = list[Any]


class GuardState(Generic[M]):
    """State of one guard. Fields are read freely; they change only inside its methods, under ``lock``.

    A generation is put in service, retired, drained of its calls and released; or it is kept, and put back in service.
    """

    # Fewer than 30 attributes: with more, CPython 3.11 keeps them in a dict, and each lease takes 0.2 us longer.
    def __init__(self, name: str) -> None:
        self.name = name
        self.enclosing: ContextVar[Enclosing | None] = ContextVar(f"modelguard {name}", default=None)
        self.current: Generation[M] | None = None  # takes new calls
        self.previous: Generation[M] | None = None  # is kept for a rollback
        self.draining: set[Generation[M]] = set()  # retired, and to be released when their calls have ended
        self.abandoned: set[Generation[M]] = set()  # those of them whose calls have taken too long
        self.closed = False
        #: Each lease that an object holds, and not a running call: a forked child may have to take it again.
        self.held_leases: WeakRegistry[Any] = WeakRegistry()
        self.generations = 0  # the number of the last one that took calls
        self.unloaded = False  # there is none, because it was released until its next use
        self.outage = False  # there is none, because a reload has taken it out of service, and has no other yet
        self.postponed: PostponedJob | None = None
        self.last_release: GenerationReleased | None = None
        self.least_memory: int | None = None  # private, in bytes, that a release has left so far
        self.left_behind = LeftBehind()  # used by the one load that runs
        self.epoch = 0  # how many forks lie between this process and the one that made the guard
        self.job: LoadJob | None = None
        self.paused = False  # policies start nothing; what others ask for goes on
        self.unloads = 0  # how many wait to release the model; policies start nothing meanwhile
        self.watched = False  # somebody waits for the ends of calls
        #: Called with a generation that takes no new calls from now on, under ``lock``.
        self.on_retire: Callable[[Generation[M]], object] = lambda _: None
        self.requests = 0
        self.reloads = 0
        self.failure: LoadFailed | None = None
        self.retry_at = -math.inf
        self.model_bytes: int | None = None
        self._renew_locks()

    def _renew_locks(self) -> None:
        # For each change of a field, but for a generation's leases. Reentrant: the garbage collector may return a
        # dropped lease at any point, also under this lock.
        self.lock = threading.RLock()
        self.drained = threading.Condition(self.lock)  # notified when a call on a retired generation has ended
        # Those who wait for a load, each with the number of the request that it must answer; 0 for any load.
        self.waiting: dict[Future[Outcome], int] = {}

    # Calls

    def enclosing_generation(self) -> Generation[M] | None:
        """The generation of the call that encloses this one, if any."""
        outer = tuple(self.enclosing.get() or ())  # one read: another thread may be emptying the list
        return outer[0] if outer else None

    def depth(self, generation: Generation[M]) -> int:
        """How deeply calls on ``generation`` are nested in one that begins here."""
        if not (outer := self.enclosing.get()):
            return 1
        both = tuple(outer)  # one read, as above
        return both[1] + 1 if both and both[0] is generation else 1

    @contextmanager
    def running_on(self, generation: Generation[M]) -> Iterator[None]:
        """Run guarded functions that the block calls on ``generation``. The block itself does not count as a use."""
        enclosing = [generation, self.depth(generation)]
        token = self.enclosing.set(enclosing)
        try:
            yield
        finally:
            enclosing.clear()
            self.enclosing.reset(token)

    def take_lease(self, mine: Enclosing) -> Generation[M] | None:
        """Take a lease on the enclosing call's generation, else on the current one; None if there is neither."""
        generation = self.current
        if generation is None or self.enclosing.get():
            return self._take_nested_lease(mine)
        mine += generation, 1
        generation.leases.append(None)
        if generation.retired:  # in this very moment; whoever drains it waits for this lease, unless it came too late
            with self.lock:
                if generation.dropped:
                    del mine[:]
                    generation.leases.pop()
                    return self._take_nested_lease(mine)
        return generation

    def _take_nested_lease(self, mine: Enclosing) -> Generation[M] | None:
        outer = self.enclosing_generation() if self.enclosing.get() else None
        with self.lock:
            generation = self.current if outer is None or outer.dropped else outer
            if generation is None and not self.closed:
                generation = self._half_used_here()
            if generation is not None:
                mine += generation, self.depth(generation)
                generation.leases.append(None)
            return generation

    def _half_used_here(self) -> Generation[M] | None:
        """While no generation is current: one that is drained and whose drain waits for this very thread.

        A loop over a guarded generator calls other guarded functions between two steps. If these waited for the next
        generation, the drain would wait for the generator, and so for them.
        """
        waited_for = self.draining - self.abandoned
        return next((one for one in self.held_here() if one in waited_for and not one.dropped), None)

    def held_here(self) -> list[Generation[M]]:
        """The generations of leases that objects hold and that this thread last used."""
        return [one for lease in self.held_leases if (one := lease.held_here()) is not None]

    def hold_current(self) -> Generation[M] | None:
        """Take a lease on the current generation, if there is one, whatever call encloses this. It is no use of it."""
        with self.lock:
            if self.current is not None:
                self.current.leases.append(None)
            return self.current

    @staticmethod
    def count_use(generation: Generation[M], failed: bool | None) -> bool:  # noqa: FBT001 - a keyword would cost the hot path
        """Count a use whose lease was returned.

        Args:
            generation: What it was a use of.
            failed: Whether the model has; None if the call says nothing about it: it was cancelled, or did not fit.

        Returns:
            Whether a policy may be due or a drain waits.
        """
        generation.uses = uses = generation.uses + 1
        if failed:
            if generation.errors == 0 and uses > 1:
                generation.served = True
            if not call_context.rerunning.get():
                generation.errors += 1
            return True
        if failed is not None:
            generation.errors = 0
        return uses >= generation.alarm

    def retired_call_ended(self, generation: Generation[M]) -> bool:
        """Record the end of a call on a retired generation; true if it was the last call on an abandoned one."""
        with self.lock:
            self.drained.notify_all()
            if generation.leases or generation not in self.abandoned:
                return False
            self.abandoned.remove(generation)
            generation.dropped = True
            return True

    @property
    def number(self) -> int | None:
        """The number of the current generation; None if there is none."""
        current = self.current  # read once
        return None if current is None else current.number

    @property
    def version(self) -> str | None:
        """The version of the current model; None if it has none, or if there is no model."""
        current = self.current  # read once
        return None if current is None else current.version

    @property
    def in_flight(self) -> int:
        """Calls that run now, on the current generation and on those that are kept, being drained or abandoned."""
        with self.lock:
            generations = {self.current, self.previous, *self.draining, *self.abandoned}
            return sum(len(generation.leases) for generation in generations if generation is not None)

    # In service

    def set_alarm(self, generation: Generation[M], uses: float) -> None:
        """Have the end of a call ask the policy once ``uses`` calls have ended."""
        with self.lock:
            if not generation.retired:
                generation.alarm = 0 if self.watched else uses

    def watch(self, *, watched: bool) -> None:
        """Have the end of each call tell those who wait for it, or no longer. Of a guard without policies."""
        with self.lock:
            self.watched = watched
            if self.current is not None:
                self.set_alarm(self.current, math.inf)

    def postpone(self, job: PostponedJob | None) -> None:
        """Record what the policies ask for and must wait; None if that is nothing."""
        if job is not self.postponed:
            with self.lock:
                self.postponed = None if self.current is None else job

    # Out of service

    def retire_current(self, job: LoadJob | None = None) -> Generation[M] | None:
        """Take the current generation out of service and return it, to be drained and released.

        Args:
            job: What replaces it; nothing is retired for a job that was cancelled.
        """
        with self.lock:
            if job is not None and job.cancelled:
                return None
            old, self.current = self.current, None
            if old is not None:
                self._retire(old)
                self.outage = job is not None
            return old

    def await_next_use(self) -> None:
        """Count as released until the next use: another guard has had this model, and has released it."""
        with self.lock:
            self.unloaded = self.current is None

    def retire_until_next_use(self, *, if_unused: bool) -> Generation[M] | None:
        """Take the current generation out of service, to be released until its next use.

        Args:
            if_unused: Not if a call runs on it now.
        """
        with self.lock:
            if self.current is None or (if_unused and self.current.leases):
                return None
            self.unloaded = True
            self._forget_failures()  # a retry would load before the next use
            return self.retire_current()

    def end_outage(self) -> None:
        """Wait for the next use, and no longer for the next attempt of a load that has failed."""
        with self.lock:
            if self.outage and self.current is None and self.job is None:
                self.unloaded, self.outage = True, False
                self._forget_failures()

    def take_previous(self) -> Generation[M] | None:
        """Keep the previous generation no longer; returns it, to be drained and released."""
        with self.lock:
            previous, self.previous = self.previous, None
            if previous is not None:
                self._retire(previous)
            return previous

    def _retire(self, generation: Generation[M]) -> None:
        generation.retired = True
        generation.alarm = 0
        self.postponed = None
        self.draining.add(generation)
        self.on_retire(generation)

    def forget_current(self, generations: int) -> None:
        """Drop a current generation without a release, if it is the only one since there were ``generations``."""
        with self.lock:
            if self.generations == generations + 1:
                self.current, self.generations = None, generations

    # The end

    def drain(self, generation: Generation[M], timeout: float) -> int:
        """Wait until no call runs on ``generation``; returns how many still run after ``timeout`` seconds.

        With calls left, the generation is abandoned: :meth:`retired_call_ended` reports its last call.
        """
        with self.lock:
            # Decided once: a caller that came in the moment of the retirement may hold its lease for an instant more.
            if self.drained.wait_for(lambda: not generation.leases, timeout):
                generation.dropped = True
                return 0
            self.abandoned.add(generation)
            return max(1, len(generation.leases))

    def record_release(self, generation: Generation[M], event: GenerationReleased | None) -> None:
        """Record what the release of a drained generation gave back, if that is known."""
        with self.lock:
            self.draining.discard(generation)
            if event is None:
                return
            self.last_release = event
            least = self.least_memory
            self.least_memory = event.bytes_after if least is None else min(least, event.bytes_after)

    def has(self, model: object) -> bool:
        """Whether it is the current model, or the one that is kept."""
        with self.lock:
            return any(one is not None and one.model is model for one in (self.current, self.previous))

    # Waiting for a generation

    def wait_for(self, request: int = 0) -> Future[Outcome]:
        """Wait for a model whose load began after ``request`` was made; 0: for any, since there is none."""
        with self.lock:
            future: Future[Outcome] = promise()
            self.waiting[future] = request
            return future

    def stop_waiting(self, future: Future[Outcome]) -> None:
        """Remove a waiter whose time ran out."""
        with self.lock:
            self.waiting.pop(future, None)

    def _answered(self, covers: float) -> list[Future[Outcome]]:
        """Those whose requests a load has answered. They are told without the lock."""
        done = [future for future, request in self.waiting.items() if request <= covers]
        for future in done:
            del self.waiting[future]
        return done

    def raise_if_closed(self) -> None:
        if self.closed:
            raise GuardClosed(self.name)

    # Loads

    def request(self, reasons: tuple[Reason, ...]) -> tuple[Future[Outcome], LoadJob | None]:
        """Ask for a load that begins after this moment.

        Returns:
            What gets its outcome, and the job that the caller must start (None: one is under way).
        """
        with self.lock:
            self.raise_if_closed()
            job = self.request_if_idle(reasons, urgent=True)
            if job is None and self.job is not None:
                self.requests += 1
                self.job.urgent, self.job.by_policy = True, False
            return self.wait_for(self.requests), job

    def request_if_idle(
        self,
        reasons: tuple[Reason, ...],
        *,
        urgent: bool,
        after_call: bool = False,
        by_policy: bool = False,
        unloads: bool = False,
        instead_of: Generation[M] | None = None,
    ) -> LoadJob | None:
        """Ask for a load, or for the release of the current generation until its next use; None if it cannot begin now.

        That is: a job is under way, the guard is closed, or paused and a policy asks, ``instead_of`` is no longer
        current, or there is nothing to release.
        """
        with self.lock:
            if self.job is not None or self.closed or (by_policy and self._policies_wait):
                return None
            if instead_of not in (None, self.current) or (unloads and self.current is None):
                return None
            replaces = self.current is not None and not unloads
            self.job = job = LoadJob(reasons, urgent=urgent, replaces=replaces, unloads=unloads)
            job.after_call, job.by_policy = after_call, by_policy
            if unloads:
                job.covers = self.requests  # it answers no later one, also if it releases nothing
            else:
                self.requests += 1
            return job

    def begin(self, job: LoadJob) -> bool:
        """Record that the loader is about to be called, which answers all requests so far; false if it must not be."""
        with self.lock:
            if job.cancelled:
                return False
            job.covers = self.requests
            return not self.closed

    def install(
        self, job: LoadJob, generation: Generation[M], *, discardable: bool, keep: bool = False
    ) -> tuple[list[Generation[M]], list[Future[Outcome]]] | None:
        """Make ``generation`` the current one.

        Args:
            job: The load that made it.
            generation: Loaded, validated and warm.
            discardable: Whether a newer request may discard it unused, as long as there is a current generation.
            keep: Whether the generation that it replaces is kept for a rollback.

        Returns:
            The generations that the caller must drain and release, and those who wait, whom it must tell; None if
            ``generation`` must not be used.
        """
        with self.lock:
            covers = job.covers or 0
            stale = discardable and self.requests > covers and self.current is not None
            if self.closed or job.cancelled or stale:
                return None
            if self.current is not None or self.outage:
                self.reloads += 1
            over = [] if (outdated := self.take_previous()) is None else [outdated]
            old, self.current = self.current, generation
            self.generations, self.unloaded, self.outage = generation.number, False, False
            if old is not None:
                self._retire(old)
                if keep:
                    self.draining.discard(old)
                    self.previous = old
                else:
                    over.append(old)
            job.replaces = False  # done: the rest of the job is the end of the old generation
            self.model_bytes = max(self.model_bytes or 0, generation.model_bytes)
            self._forget_failures()
            return over, self._answered(covers)

    def fail(self, job: LoadJob, failure: LoadFailed, *, retry_at: float) -> None:
        """Record that a load has failed, and tell everyone who waits for it, once.

        Those who asked for a reload after it had begun wait on: their load has yet to begin.
        """
        with self.lock:
            if job.cancelled:
                return
            covers = self.requests if job.covers is None else job.covers
            if self.requests <= covers and self.job is job:
                # At the same time: a caller that came between the failure and the end of the job would wait in vain.
                self._end(job)
            # Not kept: the cause's traceback holds the loader's frames, and these may hold half a model.
            self.failure = failure.again(failure.retry_after)
            self.retry_at = retry_at
            waiting = self._answered(covers)
        for future in waiting:
            future.set_result(failure)

    def finish(self, job: LoadJob, followup: tuple[Reason, ...]) -> LoadJob | None:
        """End a job; returns the next one if requests came in after its load had begun, or callers have no model."""
        with self.lock:
            if self.job is not job:
                # Its failure has ended it (or this is a forked child): later requests have had a job of their own.
                return None
            self._end(job)
            covers = self.requests if job.covers is None else job.covers
            # Closed and reopened since this job installed its model: its waiters have made no request, and need a load.
            reopened = self.current is None and bool(self.waiting)
            if self.closed or (self.requests <= covers and not reopened):
                return None
            self.job = LoadJob(followup, urgent=True, replaces=self.current is not None)
            return self.job

    def _end(self, job: LoadJob) -> None:
        self.job = None
        job.ended.set_result(None)

    # What policies ask for, and must wait

    def set_paused(self, *, paused: bool) -> bool:
        """Let policies start nothing, or let them again; true if that is a change."""
        with self.lock:
            changed, self.paused = self.paused is not paused, paused
            if changed and not paused:
                self.postpone(None)
            return changed

    @contextmanager
    def about_to_unload(self) -> Iterator[None]:
        """Let policies start nothing for the block, and give up what they asked for and has not begun."""
        with self.lock:
            self.unloads += 1
        try:
            yield
        finally:
            with self.lock:
                self.unloads -= 1

    @property
    def load_unwanted(self) -> bool:
        """Whether what loads now will not be used: the guard is closed, or a rollback has cancelled the load."""
        return self.closed or ((job := self.job) is not None and job.cancelled)

    def holds_back(self, job: LoadJob) -> bool:
        """Whether a job must not begin: only a policy asked for it, and policies may start nothing now."""
        return job.by_policy and self._policies_wait

    @property
    def _policies_wait(self) -> bool:
        return self.paused or self.unloads > 0 or fork_hooks.exiting()

    def put_off(self, job: LoadJob) -> bool:
        """Give up a policy's job that has not begun; false if somebody else has asked for a load meanwhile."""
        with self.lock:
            if job.by_policy and not job.cancelled:
                job.covers, job.replaces = self.requests, False
            return job.by_policy

    # Rollback and close

    def roll_back(
        self, failure: LoadFailed, end_load: Callable[[], object]
    ) -> tuple[Generation[M], Generation[M]] | None:
        """Make the previous generation current again, and leave it there until its source changes.

        Args:
            failure: What those get who wait for a load that this cancels.
            end_load: Ends that load, where one can be ended. Called before another one can begin.

        Returns:
            The generation that takes calls now, and the one that took them, which the caller must drain and release.
            None if none is kept.
        """
        with self.lock:
            self.raise_if_closed()
            old, back = self.current, self.previous
            if old is None or back is None:
                return None
            self._retire(old)
            self.current, self.previous = back, None
            back.retired, back.pinned = False, True
            back.errors, back.demanded = 0, ()
            self._forget_failures()
            waiting: list[Future[Outcome]] = []
            if self.job is not None and self.job.replaces:
                self.job.cancelled, self.job.replaces, self.job.covers = True, False, self.requests
                waiting = self._answered(self.requests)
                end_load()
        for future in waiting:
            future.set_result(failure.again(failure.retry_after, back.number))
        return back, old

    def close(self) -> Generation[M] | None:
        """Refuse every further call; returns the generation that was current."""
        with self.lock:
            self.closed = True
            self.unloaded = self.outage = False
            old = self.retire_current()
            waiting = self._answered(math.inf)
        for future in waiting:
            future.set_result(GuardClosed(self.name))
        return old

    def reopen(self) -> None:
        """Accept calls again after :meth:`close`."""
        with self.lock:
            if self.closed:
                self.closed = False
                self._forget_failures()

    @property
    def word(self) -> State:
        """The word for what the guard does at this moment."""
        with self.lock:
            if self.closed:
                return "closed"
            if self.current is not None:
                replacing = self.job is not None and self.job.replaces
                return "degraded" if self.failures else "reloading" if replacing else "ready"
            if self.job is not None:
                return "draining" if self.outage or self.job.unloads else "loading"
            return "failed" if self.failures else "idle" if self.unloaded else "new"

    @property
    def failures(self) -> int:
        """How many loads in a row have failed."""
        failure = self.failure  # read once: a load may succeed meanwhile
        return 0 if failure is None else failure.attempt

    def _forget_failures(self) -> None:
        self.failure, self.retry_at = None, -math.inf

    # Fork

    def after_fork_in_child(self, jitter: float) -> None:
        """Keep the current and the previous generation; locks, leases and jitter are the child's own.

        Only the forking thread lives on. So the only leases left are those of the calls that enclose the fork, and
        those of generators and the like that this thread has begun.
        """
        held = [lease for lease in self.held_leases if lease.survives_fork()]
        self._renew_locks()
        self.epoch += 1
        self.postponed = self.last_release = self.least_memory = None
        self.watched = self.outage = False
        self.unloads = 0
        self.draining.clear()
        self.abandoned.clear()
        self.left_behind = LeftBehind()
        for generation in (self.current, self.previous):
            if generation is not None:
                generation.leases = []
                generation.uses = generation.errors = 0
                generation.jitter = jitter
        enclosing = self.enclosing.get()
        if enclosing:
            enclosing[0].leases = [None] * enclosing[1]
        for lease in held:
            lease.retake_in_child()
        self.job = None
        self.reloads = 0
        self._forget_failures()


class GuardContext(Generic[M]):
    """One guard, as loading, evaluating and releasing see it."""

    def __init__(self, options: GuardOptions[M], system: System) -> None:
        self.options = options  # set once, but for the guard of molds: see Engine.follow
        self.state: GuardState[M] = GuardState(options.name)
        self.system = system  # a test may replace it, to move a guard to another clock: read it anew each time
        self.family = options.family or KnownModels()  # what its loader has returned, and those of its replicas
        self.shown = ShownVersion(options.name)  # to `modelguard top`
        self.shown_pause = ShownPause(options.name)
        self.recorded: RecordedCalls | None = None  # the calls that a reload repeats
        if (rule := options.swap.replay) is not None:
            # Here, because few guards need it.
            from modelguard.lifecycle._replay import RecordedCalls

            self.recorded = RecordedCalls(rule, self.state.enclosing)

    def made(self, returned: object, jitter: float) -> Generation[M]:
        """Make the next generation of what the loader has returned."""
        model, version = unpacked(returned)
        born, began = self.system.clock(), self.system.wall_clock()
        return Generation(self.state.generations + 1, model, version=version, born=born, began=began, jitter=jitter)

    @property
    def name(self) -> str:
        return self.options.name
