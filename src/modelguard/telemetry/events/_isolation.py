"""Events of the worker processes of isolated functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modelguard.telemetry.events._base import Event
from modelguard.telemetry.reasons import Reason

#: Why a worker of an isolated function ended. ``"recycled"``: a policy was due, and a fresh worker took its place;
#: ``"reforked"``: one of the workers took the place of the mold, and a child of that one took this one's place;
#: ``"crashed"``: it ended by itself, or was killed by somebody else; ``"timeout"``: killed because its call took too
#: long; ``"cancelled"``: killed because its caller was interrupted; ``"closed"``: its mold ended; ``"idle"``: nobody
#: has called, and the mold stays (``Idle(keep="mold")``).
WorkerEndCause = Literal["recycled", "reforked", "crashed", "timeout", "cancelled", "closed", "idle"]


@dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """A worker of an isolated function takes calls.

    Attributes:
        generation: The number of its mold.
        worker: Its process id.
        seconds: From the order to start it until it took calls.
    """

    generation: int
    worker: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WorkerEnded(Event):
    """A worker of an isolated function has ended.

    Attributes:
        generation: The number of its mold.
        worker: Its process id; 0 if it never started.
        cause: The reason.
        detail: How it ended if it crashed: a signal's name or an exit status.
        age: Seconds since it was started.
    """

    generation: int
    worker: int
    cause: WorkerEndCause
    detail: str
    age: float


@dataclass(frozen=True, kw_only=True)
class WorkersReleased(Event):
    """Nobody has called an isolated function, so all of its workers have ended. Its mold stays for the next call.

    Attributes:
        generation: The number of the mold.
        reasons: Which policies were due.
        workers: How many have ended.
        bytes_before: What the mold and its workers held, in bytes; what they share is counted once.
        bytes_after: What is left, mostly the mold's.
        seconds: From the order to the end of the last one.
    """

    generation: int
    reasons: tuple[Reason, ...]
    workers: int
    bytes_before: int
    bytes_after: int
    seconds: float

    @property
    def freed(self) -> int:
        """Bytes that went back to the system."""
        return self.bytes_before - self.bytes_after
