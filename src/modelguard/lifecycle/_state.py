"""The state of one guard, under one lock. It starts no thread, reads no clock and emits no event.

Which generation takes calls, which calls run on it, which load is under way and who waits for it: each change of these
is a short method here. The work itself is done elsewhere: :mod:`._engine` asks for loads, :mod:`._reload` runs them and
:mod:`._release` ends a generation.
"""

from __future__ import annotations

import math
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from modelguard import _reruns
from modelguard.errors import GuardClosed, LoadFailed
from modelguard.lifecycle._creep import Creep
from modelguard.lifecycle._enclosing import EnclosingCalls
from modelguard.lifecycle._generation import Generation
from modelguard.lifecycle._known_models import is_plain_value
from modelguard.lifecycle._load_job import LoadJob, PostponedJob
from modelguard.lifecycle._waiters import Outcome, Waiters

if TYPE_CHECKING:
    from modelguard.telemetry import GenerationReleased, Reason

M = TypeVar("M")


class HeldLease(Protocol):
    """A lease that an object holds, rather than a running call."""

    def held_here(self) -> Generation[Any] | None:
        """Its generation, if this thread last used it; None otherwise and after its end."""
        ...

    def survives_fork(self) -> bool:
        """Whether a child that was just forked still uses it."""
        ...

    def retake_in_child(self) -> None:
        """Take it again in that child."""
        ...


class GuardState(EnclosingCalls[M]):
    """State of one guard. Fields are read freely; they change only inside its methods, under ``lock``.

    Attributes:
        current: The generation that takes new calls; None if there is none.
        job: The load under way, if any.
        unloaded: There is no generation because it was released until its next use.
        paused: Policies start nothing. What others ask for goes on.
        postponed: What the policies of the current generation ask for, and must wait.
        least_memory: The least private memory, in bytes, that a release has left so far.
        creep: What replacements leave behind. Used by the one load that runs.
        epoch: How many forks lie between this process and the one that made the guard.
        held_leases: Leases that objects hold, which a forked child may have to take again.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.current: Generation[M] | None = None
        self.job: LoadJob | None = None
        self.draining: set[Generation[M]] = set()
        self.abandoned: set[Generation[M]] = set()
        self.closed = False
        self.unloaded = False
        self.paused = False
        self.postponed: PostponedJob | None = None
        self.requests = 0
        self.generations = 0
        self.reloads = 0
        self.failures = 0
        self.failure: LoadFailed | None = None
        self.retry_at = -math.inf
        self.model_bytes: int | None = None
        self.last_release: GenerationReleased | None = None
        self.least_memory: int | None = None
        self.creep = Creep()
        self._released_model: weakref.ref[Any] | None = None
        self.epoch = 0
        self.held_leases: weakref.WeakSet[HeldLease] = weakref.WeakSet()
        self._renew_locks()

    def _renew_locks(self) -> None:
        # Reentrant: the garbage collector may return a dropped lease at any point, also under this lock.
        self.lock = threading.RLock()
        self.drained = threading.Condition(self.lock)
        self.job_ended = threading.Condition(self.lock)
        self.waiting = Waiters()

    # Calls

    def enter(self) -> Generation[M] | None:
        """Take a lease on the enclosing call's generation, else on the current one; None if there is neither.

        :meth:`Engine.wrapper` writes out the common case of this.
        """
        outer = self.enclosing_generation() if self.enclosing.get() else None
        with self.lock:
            generation = self.current if outer is None or outer.dropped else outer
            if generation is None and not self.closed:
                generation = self._half_used_here()
            if generation is not None:
                generation.leases.append(None)
            return generation

    def _half_used_here(self) -> Generation[M] | None:
        """While no generation is current: one that is drained and whose drain waits for this very thread.

        A loop over a guarded generator calls other guarded functions between two steps. If these waited for the next
        generation, the drain would wait for the generator, and so for them.
        """
        held = (lease.held_here() for lease in list(self.held_leases))
        waited_for = self.draining - self.abandoned
        return next((one for one in held if one in waited_for and not one.dropped), None)

    @staticmethod
    def leave(generation: Generation[M], failed: bool) -> bool:  # noqa: FBT001 - a keyword would cost the hot path
        """Return a lease; true if a policy may be due or a drain waits."""
        generation.leases.pop()
        generation.uses = uses = generation.uses + 1
        if failed:
            if generation.errors == 0 and uses > 1:
                generation.served = True
            if not _reruns.active():
                generation.errors += 1
            return True
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
    def in_flight(self) -> int:
        """Calls that run now, on the current generation and on those that are being drained or were abandoned."""
        with self.lock:
            generations = {*self.draining, *self.abandoned} | ({self.current} if self.current is not None else set())
            return sum(len(generation.leases) for generation in generations)

    # Waiting for a generation

    def wait_for_any(self) -> Future[Outcome]:
        """Wait for any generation to be installed. The caller has seen that there is none.

        Raises:
            GuardClosed: The guard is closed.
        """
        with self.lock:
            self.raise_if_closed()
            return self.waiting.add(0)

    def wait_for_request(self, request: int) -> Future[Outcome]:
        """Wait for a model whose load began after ``request`` was made."""
        with self.lock:
            if self.closed:
                done: Future[Outcome] = Future()
                done.set_result(GuardClosed(self.name))
                return done
            return self.waiting.add(request)

    def stop_waiting(self, future: Future[Outcome]) -> None:
        """Remove a waiter whose time ran out."""
        with self.lock:
            self.waiting.remove(future)

    def raise_if_closed(self) -> None:
        """Raise GuardClosed after ``close()``."""
        if self.closed:
            raise GuardClosed(self.name)

    # Loads

    def request(self, reasons: tuple[Reason, ...], *, urgent: bool) -> tuple[int, LoadJob | None]:
        """Ask for a load that begins after this moment.

        Returns:
            The number of the request, and the job that the caller must start (None: one is under way).
        """
        with self.lock:
            self.raise_if_closed()
            self.requests += 1
            if self.job is not None:
                self.job.urgent = self.job.urgent or urgent
                self.job.by_policy = False
                return self.requests, None
            self.job = LoadJob(reasons, urgent=urgent, replaces=self.current is not None)
            return self.requests, self.job

    def request_if_idle(
        self,
        reasons: tuple[Reason, ...],
        *,
        urgent: bool,
        after_call: bool = False,
        by_policy: bool = False,
        instead_of: Generation[M] | None = None,
    ) -> LoadJob | None:
        """Ask for a load unless one is under way, the guard is closed, or ``instead_of`` is no longer current."""
        with self.lock:
            if self._refuses_jobs(by_policy=by_policy) or instead_of not in (None, self.current):
                return None
            job = self.request(reasons, urgent=urgent)[1]
            if job is not None:
                job.after_call = after_call
                job.by_policy = by_policy
            return job

    def _refuses_jobs(self, *, by_policy: bool) -> bool:
        return self.job is not None or self.closed or (by_policy and self.paused)

    def request_unload(
        self, reasons: tuple[Reason, ...], *, instead_of: Generation[M] | None = None, by_policy: bool = False
    ) -> LoadJob | None:
        """Ask for the release of the current generation until its next use; None if it cannot begin now.

        That is: a load is under way, the guard is closed, or there is no generation, or not ``instead_of``.
        """
        with self.lock:
            if self._refuses_jobs(by_policy=by_policy) or self.current is None:
                return None
            if instead_of not in (None, self.current):
                return None
            self.job = LoadJob(reasons, urgent=True, unloads=True)
            return self.job

    def wait_for_end_of_job(self, job: LoadJob | None, timeout: float | None) -> bool:
        """Wait until ``job``, or the one under way, has ended; false if ``timeout`` seconds have passed."""
        with self.lock:
            job = self.job if job is None else job
            return job is None or self.job_ended.wait_for(lambda: self.job is not job, timeout)

    def begin(self, job: LoadJob) -> bool:
        """Record that the loader is about to be called, which answers all requests so far; false if closed."""
        with self.lock:
            job.covers = self.requests
            return not self.closed

    def install(
        self, job: LoadJob, generation: Generation[M], *, discardable: bool
    ) -> tuple[bool, Generation[M] | None]:
        """Make ``generation`` the current one.

        Args:
            job: The load that made it.
            generation: Loaded, validated and warm.
            discardable: Whether a newer request may discard it unused, as long as there is a current generation.

        Returns:
            Whether it is current now, and the generation that it replaced, which the caller must drain and release.
        """
        with self.lock:
            covers = job.covers or 0
            stale = discardable and self.requests > covers and self.current is not None
            if self.closed or stale:
                return False, None
            self.generations = generation.number
            old, self.current = self.current, generation
            job.replaces = False  # done: the rest of the job is the end of the old generation
            if old is not None:
                self._retire(old)
            if generation.number > 1 and not self.unloaded:
                self.reloads += 1
            self.unloaded = False
            self.model_bytes = max(self.model_bytes or 0, generation.model_bytes)
            self.failures, self.failure, self.retry_at = 0, None, -math.inf
            waiting = self.waiting.pop(covers)
        for future in waiting:
            future.set_result(None)
        return True, old

    def fail(self, job: LoadJob, failure: LoadFailed, *, retry_at: float) -> None:
        """Record that a load has failed, and tell everyone who waits for it, once.

        Those who asked for a reload after it had begun wait on: their load has yet to begin.
        """
        with self.lock:
            covers = self.requests if job.covers is None else job.covers
            if self.requests <= covers and self.job is job:
                # At the same time: a caller that came between the failure and the end of the job would wait in vain.
                self.job = None
                self.job_ended.notify_all()
            self.failures = failure.attempt
            # Not kept: the cause's traceback holds the loader's frames, and these may hold half a model.
            self.failure = failure.again(failure.retry_after)
            self.retry_at = retry_at
            waiting = self.waiting.pop(covers)
        for future in waiting:
            future.set_result(failure)

    def finish(self, job: LoadJob, followup: tuple[Reason, ...]) -> LoadJob | None:
        """End a job; returns the next one if requests came in after its load had begun, or callers have no model.

        Args:
            job: What has ended.
            followup: The reasons of the next job.
        """
        with self.lock:
            if self.job is not job:
                # Its failure has ended it (or this is a forked child): later requests have had a job of their own.
                return None
            self.job = None
            self.job_ended.notify_all()
            covers = self.requests if job.covers is None else job.covers
            # Closed and reopened since this job installed its model: its waiters have made no request, and need a load.
            reopened = self.current is None and bool(self.waiting)
            if self.closed or (self.requests <= covers and not reopened):
                return None
            self.job = LoadJob(followup, urgent=True, replaces=self.current is not None)
            return self.job

    # What policies ask for, and must wait

    def set_paused(self, *, paused: bool) -> bool:
        """Let policies start nothing, or let them again; true if that is a change."""
        with self.lock:
            changed, self.paused = self.paused is not paused, paused
            if changed and not paused:
                self.postponed = None
            return changed

    def postpone(self, job: PostponedJob | None) -> None:
        """Record what the policies ask for and must wait; None if that is nothing."""
        if job is not self.postponed:
            with self.lock:
                self.postponed = None if self.current is None else job

    def holds_back(self, job: LoadJob) -> bool:
        """Whether a job must not begin, because the guard is paused and only a policy asked for it."""
        return self.paused and job.by_policy

    def put_off(self, job: LoadJob) -> bool:
        """Give up a policy's job that has not begun; false if somebody else has asked for a load meanwhile."""
        with self.lock:
            if job.by_policy:
                job.covers, job.replaces = self.requests, False
            return job.by_policy

    # The end of a generation

    def retire_current(self) -> Generation[M] | None:
        """Take the current generation out of service and return it, to be drained and released."""
        with self.lock:
            old, self.current = self.current, None
            if old is not None:
                self._retire(old)
            return old

    def retire_until_next_use(self, *, if_unused: bool) -> Generation[M] | None:
        """Take the current generation out of service, to be released until its next use.

        Args:
            if_unused: Not if a call runs on it now.
        """
        with self.lock:
            if self.current is None or (if_unused and self.current.leases):
                return None
            self.unloaded = True
            return self.retire_current()

    def set_alarm(self, generation: Generation[M], uses: float) -> None:
        """Have the end of a call ask the policy once ``uses`` calls have ended."""
        with self.lock:
            if not generation.retired:
                generation.alarm = uses

    def _retire(self, generation: Generation[M]) -> None:
        generation.retired = True
        generation.alarm = 0
        self.postponed = None
        self.draining.add(generation)

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

    def take_model(self, generation: Generation[M]) -> M:
        """Take the model out of a drained generation, for its release."""
        with self.lock:
            model = generation.drop()
            try:
                self._released_model = weakref.ref(model)
            except TypeError:  # dict, list, tuple, ...
                self._released_model = None
            return model

    def knows(self, model: object) -> bool:
        """Whether it is the current model, or the last one that was released. Plain values do not count."""
        if is_plain_value(model):
            return False
        with self.lock:
            current = None if self.current is None else self.current.model
            released = None if self._released_model is None else self._released_model()
            return model is current or model is released

    def record_release(self, generation: Generation[M], event: GenerationReleased | None) -> None:
        """Record what the release of a drained generation gave back, if that is known."""
        with self.lock:
            self.draining.discard(generation)
            if event is None:
                return
            self.last_release = event
            least = self.least_memory
            self.least_memory = event.bytes_after if least is None else min(least, event.bytes_after)

    def close(self) -> Generation[M] | None:
        """Refuse every further call; returns the generation that was current."""
        with self.lock:
            self.closed = True
            self.unloaded = False
            old = self.retire_current()
            waiting = self.waiting.pop(math.inf)
        for future in waiting:
            future.set_result(GuardClosed(self.name))
        return old

    def reopen(self) -> None:
        """Accept calls again after :meth:`close`."""
        with self.lock:
            self.closed = False

    def forget_current(self, generations: int) -> None:
        """Drop a current generation without a release, if it is the only one since there were ``generations``."""
        with self.lock:
            if self.generations == generations + 1:
                self.current, self.generations = None, generations

    # Fork

    def after_fork_in_child(self, jitter: float) -> None:
        """Keep the current generation; threads, locks, counters and jitter are the child's own.

        Only the forking thread lives on. So the only leases left are those of the calls that enclose the fork, and
        those of generators and the like that this thread has begun.
        """
        held = [lease for lease in self.held_leases if lease.survives_fork()]
        self._renew_locks()
        self.epoch += 1
        self.job = self.postponed = None
        self.draining.clear()
        self.abandoned.clear()
        self.reloads = self.failures = 0
        self.failure, self.retry_at, self.last_release, self.least_memory = None, -math.inf, None, None
        self.creep = Creep()
        generation = self.current
        if generation is not None:
            generation.leases = []
            generation.uses = generation.errors = 0
            generation.jitter = jitter
        enclosing = self.enclosing.get()
        if enclosing:
            enclosing[0].leases = [None] * enclosing[1]
        for lease in held:
            lease.retake_in_child()
