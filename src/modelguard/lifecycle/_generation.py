"""One loaded model and the calls that run on it."""

from __future__ import annotations

import math
import os
from typing import Generic, TypeVar

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
        """Give up the model and return it, for the release."""
        model = self.model
        self.dropped = True
        del self.model
        return model

    def __repr__(self) -> str:
        return f"<generation {self.number}, {len(self.leases)} in flight>"
