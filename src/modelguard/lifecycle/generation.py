"""One loaded model and the calls that run on it."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

M = TypeVar("M")


class Generation(Generic[M]):
    """A model from its load to its release.

    Attributes:
        leases: One entry per call that runs on it now. A list, because ``append`` and ``pop`` are atomic and cost a
            quarter of a lock: a call takes its lease first and looks at ``retired`` afterwards, a swap sets
            ``retired`` first and looks at the leases afterwards, so one of them always sees the other.
        uses: Calls that have ended on it.
        errors: Calls in a row, up to the last, that raised.
        alarm: The number of uses at which the end of a call must take the slow way: a policy may be due, or,
            once it is retired, somebody waits for its last call. One comparison on the hot path serves both.
        retired: It serves no new calls, save those nested in its own.
        dropped: Nobody may run on it any more; its model is being released.
    """

    __slots__ = (
        "__weakref__",
        "alarm",
        "born",
        "dropped",
        "errors",
        "jitter",
        "leases",
        "model",
        "model_bytes",
        "number",
        "retired",
        "uses",
    )

    def __init__(self, number: int, model: M, *, born: float, jitter: float, model_bytes: int = 0) -> None:
        self.number = number
        self.model = model
        self.born = born
        self.jitter = jitter
        self.model_bytes = model_bytes
        self.leases: list[None] = []
        self.uses = 0
        self.errors = 0
        self.alarm: float = math.inf
        self.retired = False
        self.dropped = False

    def drop(self) -> M:
        """Give the model up, for the release to dispose of."""
        model = self.model
        self.dropped = True
        del self.model
        return model

    def __repr__(self) -> str:
        return f"<generation {self.number}, {len(self.leases)} in flight>"


#: What a context holds while a call runs: its generation, and how deep calls on it are nested. The call's end empties
#: the list, so that a context that outlives its call (a task started inside it) can tell.
Mark = list[Any]
