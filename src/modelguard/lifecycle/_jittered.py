"""A policy whose bound each process brings forward, so that replicas do not act in step."""

from __future__ import annotations

from modelguard.lifecycle._policy import Snapshot, Value
from modelguard.lifecycle._source_policies import checked_jitter

__all__ = ["Jittered"]

#: How much wider the jitter of a process's first generation is, and the part of the bound that it takes at most.
_FIRST, _FIRST_MOST = 5, 0.5


class Jittered(Value):
    """A policy whose bound each process brings forward by a random part, so that replicas do not reload in step.

    The first generation does so by five times as much, at most by half. Replicas that were started together are spread
    over half of the bound then, and stay apart: ``benchmarks/fleet.py`` shows what less would do.
    """

    jitter: float

    def _set_jitter(self, jitter: object) -> None:
        self._set(jitter=checked_jitter(jitter))

    def _brought_forward(self, now: Snapshot) -> float:
        """By which part of the bound this process is early."""
        widest = max(self.jitter, min(_FIRST * self.jitter, _FIRST_MOST)) if now.first else self.jitter
        return widest * now.jitter
