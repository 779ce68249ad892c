"""What all events have in common."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all events.

    Attributes:
        guard: The name of the guard, pool or batched function.
        pid: The process in which it happened.
        time: When it happened, in seconds since the epoch.
    """

    guard: str
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)
