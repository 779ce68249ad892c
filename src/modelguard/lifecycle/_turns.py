"""Replicas are replaced one at a time: whose turn it is, and how policies on memory count for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from modelguard.lifecycle import _fork
from modelguard.lifecycle._policy import Horizon, Policy, Snapshot, alternatives
from modelguard.telemetry.reasons import Reason

__all__ = ["Turns", "in_turn"]

#: Seconds after which a replica loses a turn that it has not used, for example because it was closed.
_UNUSED = 5.0


class Turns:
    """Gives one replica after another the turn to be replaced.

    Args:
        loading: Whether a replica is being replaced, for each.
        loaded: Whether it has a model, for each.
        clock: Returns the time in seconds.
    """

    fork_rank = 2  # its lock is taken after those of the engines, and nothing else while it is held

    def __init__(
        self, loading: Sequence[Callable[[], bool]], loaded: Sequence[Callable[[], bool]], clock: Callable[[], float]
    ) -> None:
        self._loading = loading
        self._loaded = loaded
        self._clock = clock
        self._lock = threading.RLock()  # reentrant: a signal handler may call another replica
        self._born: dict[int, tuple[int, float]] = {}  # of each replica, its generation and when that was first seen
        self._baselines: dict[int, int | None] = {}
        self._holder: tuple[int, float] | None = None
        _fork.register(self)

    def see(self, replica: int, now: Snapshot) -> None:
        """Note what a replica has read."""
        with self._lock:
            if self._born.get(replica, (0, 0.0))[0] != now.generation:
                self._born[replica] = now.generation, self._clock() - now.age
            self._baselines[replica] = now.baseline

    def take(self, replica: int) -> bool:
        """Give a replica its turn, unless another one is being replaced."""
        with self._lock:
            if any(loading() for other, loading in enumerate(self._loading) if other != replica):
                return False
            now = self._clock()
            if self._holder is not None:
                holder, since = self._holder
                if holder != replica and now - since < _UNUSED and not self._was_replaced(holder, since):
                    return False
            self._holder = replica, now
            return True

    def before_fork(self) -> None:
        """Keep other threads out while the process forks: a child asks the policies in its first moment."""
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        """Let them in again."""
        self._lock.release()

    def after_fork_in_child(self) -> None:
        """The same: the thread that has forked is the one that holds the lock."""
        self._lock.release()

    def _was_replaced(self, replica: int, since: float) -> bool:
        return self._born.get(replica, (0, 0.0))[1] > since

    def is_oldest(self, replica: int) -> bool:
        """Whether no other replica has taken calls for longer."""
        with self._lock:
            return replica == min(self._with_models(replica), key=lambda one: (self._born[one][1], one))

    def baseline(self, replica: int) -> int | None:
        """Private memory when the youngest replica had settled; None until then. It has the models of all others."""
        with self._lock:
            youngest = max(self._with_models(replica), key=lambda one: self._born[one][1])
            return self._baselines[youngest]

    def _with_models(self, replica: int) -> list[int]:
        """Replicas that have a model, as this one has; others have released theirs until their next use."""
        return [one for one in list(self._born) if one == replica or self._loaded[one]()]


def in_turn(policy: Policy | None, replica: int, turns: Turns) -> Policy | None:
    """The policy of one replica: due only in its turn, and on memory only if it is the oldest."""
    joined: Policy | None = None
    for member in alternatives(policy):
        mine = _InTurn(member, replica, turns)
        joined = mine if joined is None else joined | mine
    return joined


class _InTurn(Policy):
    """One policy of one replica.

    Memory is that of the whole process, so it grows when another replica is loaded, and says nothing about which model
    grows. It counts from the youngest replica's baseline, and the oldest replica goes first.
    """

    def __init__(self, policy: Policy, replica: int, turns: Turns) -> None:
        self._policy = policy
        self._replica = replica
        self._turns = turns
        self.kind = policy.kind  # type: ignore[misc] # of the class elsewhere
        self.reads_memory = policy.reads_memory
        self.renews = policy.renews
        self.watches_source = policy.watches_source
        self.unloads = policy.unloads
        self.restricts = policy.restricts

    def due(self, now: Snapshot) -> bool:
        return bool(self.reasons(now))

    def reasons(self, now: Snapshot) -> tuple[Reason, ...]:
        self._turns.see(self._replica, now)
        if self.unloads:  # which loads nothing, so several may at once
            return self._policy.reasons(now)
        if self.reads_memory:
            if not self._turns.is_oldest(self._replica):
                return ()
            now = replace(now, baseline=self._turns.baseline(self._replica))
        reasons = self._policy.reasons(now)
        return reasons if reasons and self._turns.take(self._replica) else ()

    def horizon(self, now: Snapshot) -> Horizon:
        self._turns.see(self._replica, now)
        own = self._policy.horizon(now)
        return Horizon(uses=max(own.uses, 1), seconds=max(own.seconds, 1.0)) if self._policy.due(now) else own

    def parts(self) -> tuple[Policy, ...]:
        return self._policy.parts()

    def futile(self, now: Snapshot) -> str | None:
        return self._policy.futile(now)

    def __repr__(self) -> str:
        return repr(self._policy)
