"""Which generation takes calls, which is kept, and how the others end: the part of a guard's state that swaps change.

A generation is put in service, retired, drained of its calls and released; or it is kept, and put back in service.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from modelguard.lifecycle._call_state import CallState
from modelguard.lifecycle._creep import Creep
from modelguard.lifecycle._generation import Generation
from modelguard.lifecycle._known_models import is_plain_value
from modelguard.lifecycle._load_job import LoadJob, PostponedJob

if TYPE_CHECKING:
    from modelguard.telemetry import GenerationReleased

__all__ = ["GenerationState"]

M = TypeVar("M")


class GenerationState(CallState[M]):
    """The generations of one guard, from the moment in which they take calls to their release.

    Attributes:
        generations: The number of the last one that took calls.
        pinned: A rollback has made the current generation current again, and its source has not changed since.
        unloaded: There is no generation because it was released until its next use.
        postponed: What the policies of the current generation ask for, and must wait.
        least_memory: The least private memory, in bytes, that a release has left so far.
        creep: What replacements leave behind. Used by the one load that runs.
        epoch: How many forks lie between this process and the one that made the guard.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.generations = 0
        self.pinned = False
        self.unloaded = False
        self.postponed: PostponedJob | None = None
        self.last_release: GenerationReleased | None = None
        self.least_memory: int | None = None
        self.creep = Creep()
        self._released_model: weakref.ref[Any] | None = None
        self.epoch = 0

    # In service

    def put_in_service(self, generation: Generation[M], *, keep: bool) -> list[Generation[M]]:
        """Make ``generation`` the current one; returns those that the caller must drain and release.

        Args:
            generation: Takes calls from now on.
            keep: Whether the generation that it replaces is kept for a rollback.
        """
        with self.lock:
            over = [] if (outdated := self.take_previous()) is None else [outdated]
            self.pinned = False
            self.generations = generation.number
            old, self.current = self.current, generation
            if old is not None:
                self._retire(old)
                if keep:
                    self.draining.discard(old)
                    self.previous = old
                else:
                    over.append(old)
            self.unloaded = False
            return over

    def put_back_previous(self) -> tuple[Generation[M], Generation[M]] | None:
        """Make the previous generation current again, and pin it; None if none is kept, or none is current.

        Returns:
            The generation that takes calls now, and the one that took them, which the caller must drain and release.
        """
        with self.lock:
            old, back = self.current, self.previous
            if old is None or back is None:
                return None
            self._retire(old)
            self.current, self.previous, self.pinned = back, None, True
            back.retired = False
            back.errors = 0
            return back, old

    def set_alarm(self, generation: Generation[M], uses: float) -> None:
        """Have the end of a call ask the policy once ``uses`` calls have ended."""
        with self.lock:
            if not generation.retired:
                generation.alarm = uses

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
            self.unloaded, self.pinned = True, False
            return self.retire_current()

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

    def take_model(self, generation: Generation[M]) -> M:
        """Take the model out of a drained generation, for its release."""
        with self.lock:
            model = generation.drop()
            try:
                self._released_model = weakref.ref(model)
            except TypeError:  # dict, list, tuple, ...
                self._released_model = None
            return model

    def record_release(self, generation: Generation[M], event: GenerationReleased | None) -> None:
        """Record what the release of a drained generation gave back, if that is known."""
        with self.lock:
            self.draining.discard(generation)
            if event is None:
                return
            self.last_release = event
            least = self.least_memory
            self.least_memory = event.bytes_after if least is None else min(least, event.bytes_after)

    def knows(self, model: object) -> bool:
        """Whether it is the current model, the one that is kept, or the last that was released. Values do not count."""
        if is_plain_value(model):
            return False
        with self.lock:
            current = None if self.current is None else self.current.model
            released = None if self._released_model is None else self._released_model()
            previous = None if self.previous is None else self.previous.model
            return any(model is known for known in (current, previous, released))

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
        self.draining.clear()
        self.abandoned.clear()
        self.creep = Creep()
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
