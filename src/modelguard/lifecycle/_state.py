"""The state of one guard, under one lock. It starts no thread, reads no clock and emits no event.

Which load is under way, who waits for it, and what that makes of the generations (:mod:`._generation_state`) and of the
calls that run on them (:mod:`._call_state`): each change is a short method. The work itself is done elsewhere:
:mod:`._engine` asks for loads, :mod:`._reload` runs them and :mod:`._release` ends a generation.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from modelguard.errors import GuardClosed, LoadFailed
from modelguard.lifecycle._generation import Generation
from modelguard.lifecycle._generation_state import GenerationState
from modelguard.lifecycle._load_job import LoadJob
from modelguard.lifecycle._waiters import Outcome, Waiters

if TYPE_CHECKING:
    from modelguard.telemetry import Reason

M = TypeVar("M")


class GuardState(GenerationState[M]):
    """State of one guard. Fields are read freely; they change only inside its methods, under ``lock``.

    Attributes:
        job: The load under way, if any.
        paused: Policies start nothing. What others ask for goes on.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.job: LoadJob | None = None
        self.paused = False
        self.requests = 0
        self.reloads = 0
        self.failures = 0
        self.failure: LoadFailed | None = None
        self.retry_at = -math.inf
        self.model_bytes: int | None = None

    def _renew_locks(self) -> None:
        super()._renew_locks()
        self.job_ended = threading.Condition(self.lock)
        self.waiting = Waiters()

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
            self.job.covers = self.requests  # it answers no later one, also if it releases nothing
            return self.job

    def wait_for_end_of_job(self, job: LoadJob | None, timeout: float | None) -> bool:
        """Wait until ``job``, or the one under way, has ended; false if ``timeout`` seconds have passed."""
        with self.lock:
            job = self.job if job is None else job
            return job is None or self.job_ended.wait_for(lambda: self.job is not job, timeout)

    def begin(self, job: LoadJob) -> bool:
        """Record that the loader is about to be called, which answers all requests so far; false if it must not be."""
        with self.lock:
            if job.cancelled:
                return False
            job.covers = self.requests
            return not self.closed

    def install(
        self, job: LoadJob, generation: Generation[M], *, discardable: bool, keep: bool = False
    ) -> tuple[bool, list[Generation[M]]]:
        """Make ``generation`` the current one.

        Args:
            job: The load that made it.
            generation: Loaded, validated and warm.
            discardable: Whether a newer request may discard it unused, as long as there is a current generation.
            keep: Whether the generation that it replaces is kept for a rollback.

        Returns:
            Whether it is current now, and the generations that the caller must drain and release.
        """
        with self.lock:
            covers = job.covers or 0
            stale = discardable and self.requests > covers and self.current is not None
            if self.closed or job.cancelled or stale:
                return False, []
            if generation.number > 1 and not self.unloaded:
                self.reloads += 1
            over = self.put_in_service(generation, keep=keep)
            job.replaces = False  # done: the rest of the job is the end of the old generation
            self.model_bytes = max(self.model_bytes or 0, generation.model_bytes)
            self.failures, self.failure, self.retry_at = 0, None, -math.inf
            waiting = self.waiting.pop(covers)
        for future in waiting:
            future.set_result(None)
        return True, over

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
                self.postpone(None)
            return changed

    def holds_back(self, job: LoadJob) -> bool:
        """Whether a job must not begin, because the guard is paused and only a policy asked for it."""
        return self.paused and job.by_policy

    def put_off(self, job: LoadJob) -> bool:
        """Give up a policy's job that has not begun; false if somebody else has asked for a load meanwhile."""
        with self.lock:
            if job.by_policy and not job.cancelled:
                job.covers, job.replaces = self.requests, False
            return job.by_policy

    # Rollback, close, fork

    def roll_back(self, failure: LoadFailed) -> tuple[Generation[M], Generation[M]] | None:
        """Make the previous generation current again, and leave it there until its source changes.

        Args:
            failure: What those get who wait for a load that this cancels.

        Returns:
            The generation that takes calls now, and the one that took them, which the caller must drain and release.
            None if none is kept.
        """
        with self.lock:
            self.raise_if_closed()
            swapped = self.put_back_previous()
            if swapped is None:
                return None
            self.failures, self.failure, self.retry_at = 0, None, -math.inf
            waiting: list[Future[Outcome]] = []
            if self.job is not None and self.job.replaces:
                self.job.cancelled, self.job.replaces, self.job.covers = True, False, self.requests
                waiting = self.waiting.pop(self.requests)
        for future in waiting:
            future.set_result(failure.again(failure.retry_after, swapped[0].number))
        return swapped

    def close(self) -> Generation[M] | None:
        """Refuse every further call; returns the generation that was current."""
        with self.lock:
            self.closed = True
            self.unloaded = self.pinned = False
            old = self.retire_current()
            waiting = self.waiting.pop(math.inf)
        for future in waiting:
            future.set_result(GuardClosed(self.name))
        return old

    def reopen(self) -> None:
        """Accept calls again after :meth:`close`."""
        with self.lock:
            self.closed = False

    def after_fork_in_child(self, jitter: float) -> None:
        """Keep the current and the previous generation; loads, failures and counters are the child's own."""
        super().after_fork_in_child(jitter)
        self.job = None
        self.reloads = self.failures = 0
        self.failure, self.retry_at = None, -math.inf
