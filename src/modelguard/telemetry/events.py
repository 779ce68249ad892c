"""The events. Times are seconds, sizes are bytes of private memory, errors are their one-line text."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Event:
    """What every event carries.

    Attributes:
        guard: Name of the guard.
        pid: Process in which it happened.
        time: Seconds since the epoch.
    """

    guard: str
    pid: int = field(default_factory=os.getpid)
    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class ReloadDue(Event):
    """A policy has become due; a reload follows, or a recycling of the worker."""

    generation: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RecycleAsked(Event):
    """In a forked child that shares its model: the server was asked for a fresh worker instead of a reload."""

    generation: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SwapChosen(Event):
    """How the next generation replaces the serving one, and why.

    Attributes:
        swap: ``"load_first"`` or ``"drain_first"``.
        why: The figures behind the choice, or that the guard's author chose it.
        model_bytes: Size of the model as measured at its load, None before the first measurement.
        headroom: Bytes that may still be allocated, None where nothing tells.
    """

    swap: str
    why: str
    model_bytes: int | None
    headroom: int | None


@dataclass(frozen=True, kw_only=True)
class LoadStarted(Event):
    """The loader is about to be called.

    Attributes:
        generation: The number that the new generation will bear.
        reasons: Why it is loaded.
        deferred_seconds: How long the load waited for a moment without calls.
        slot: Who was kept from loading meanwhile: ``"host"`` (this user's processes on this host), ``"process"``
            (no lock file could be used), ``"timed out"`` (the holder kept it too long), ``"none"`` (first load).
    """

    generation: int
    reasons: tuple[str, ...]
    deferred_seconds: float
    slot: str


@dataclass(frozen=True, kw_only=True)
class LoadFinished(Event):
    """A new generation serves.

    Attributes:
        seconds: Loading, validation and warm-up together.
        stall_seconds: The longest time during the load in which no other Python thread could run.
        model_bytes: Growth of private memory over the load, or what the model's adapter says where that is more.
        swap: ``"load_first"``, ``"drain_first"`` or ``"first"``.
        waited_seconds: For ``drain_first``, how long no generation served.
    """

    generation: int
    reasons: tuple[str, ...]
    seconds: float
    stall_seconds: float
    model_bytes: int
    swap: str
    waited_seconds: float


@dataclass(frozen=True, kw_only=True)
class LoadErrored(Event):
    """A load failed. If a generation serves, it serves on.

    Attributes:
        attempt: How many loads have failed in a row.
        retry_after: Seconds until the next attempt.
        serving: Number of the generation that serves on, None if there is none.
    """

    attempt: int
    error: str
    retry_after: float
    serving: int | None


@dataclass(frozen=True, kw_only=True)
class LoadDiscarded(Event):
    """A model was loaded and not used: a newer request made it stale, the guard was closed, or it came too late."""

    why: str


@dataclass(frozen=True, kw_only=True)
class GenerationReleased(Event):
    """A generation was unloaded and dropped, and what that gave back.

    Attributes:
        bytes_before: Private memory before the release.
        bytes_after: Private memory after drop, collection and trim.
        alive: True if the model still lives, False if it is gone, None if its type cannot be watched.
        holders: Who still refers to it, at most five, in words.
        collected: Whether ``gc.collect()`` was needed.
        trim: ``"glibc"``, ``"jemalloc"``, ... or why nothing was trimmed.
        seconds: Duration of the release itself.
        drain_seconds: How long its last calls took to end, None if they outlasted ``drain_timeout``.
        error: What ``unload`` raised, None if it did not.
    """

    generation: int
    bytes_before: int
    bytes_after: int
    alive: bool | None
    holders: tuple[str, ...]
    collected: bool
    trim: str
    seconds: float
    drain_seconds: float | None
    error: str | None

    @property
    def freed(self) -> int:
        """Bytes given back; negative if the process grew meanwhile."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True, kw_only=True)
class GenerationAbandoned(Event):
    """Calls on a replaced generation outlasted ``drain_timeout``; it is released when the last of them ends."""

    generation: int
    in_flight: int
    drain_timeout: float


@dataclass(frozen=True, kw_only=True)
class MemoryTrimmed(Event):
    """Freed memory was given back because ``trim_every`` asked for it.

    Attributes:
        bytes_before: Private memory before.
        bytes_after: Private memory after.
        trim: The allocator in force, or why nothing was trimmed.
        seconds: Duration of the trim.
    """

    bytes_before: int
    bytes_after: int
    trim: str
    seconds: float

    @property
    def freed(self) -> int:
        """Bytes given back; negative if the process grew meanwhile."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True, kw_only=True)
class PolicyFutile(Event):
    """A policy would be due at once again after every reload, so it is ignored for this generation."""

    generation: int
    policy: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class CallbackErrored(Event):
    """A callable of the guard's author (a policy, a recycler) raised; the guard went on without it."""

    callback: str
    error: str


@dataclass(frozen=True, kw_only=True)
class BatchFinished(Event):
    """A batch was computed. Made only if somebody listens: a hook of yours, or a log at level DEBUG.

    Attributes:
        size: Its items.
        waiting: Items that wait for the next one.
        wait_seconds: How long the first of its items had waited.
        run_seconds: How long it ran, with what was run again.
        failed: Items whose answer is an error.
        reruns: How often the function was called again to find the items at fault.
    """

    size: int
    waiting: int
    wait_seconds: float
    run_seconds: float
    failed: int
    reruns: int


@dataclass(frozen=True, kw_only=True)
class BatchErrored(Event):
    """The batch function raised, or did not return one result for each item.

    Attributes:
        size: Items of the batch.
        failed: Items that have an error for an answer; the rest succeeded when they were run again.
        error: What it raised on the whole batch.
        reruns: How often it was called again to find the items at fault.
    """

    size: int
    failed: int
    error: str
    reruns: int


@dataclass(frozen=True, kw_only=True)
class RequestsRefused(Event):
    """Requests were turned away or dropped since the last event of this kind; told once a second at most.

    Attributes:
        full: Refused since the queue was full.
        late: Refused since by the measured rate the deadline could not be met.
        open: Refused since the circuit was open.
        expired: Dropped at their deadline.
        cancelled: Dropped since their caller was gone.
        waiting: Items that wait now.
    """

    full: int
    late: int
    open: int
    expired: int
    cancelled: int
    waiting: int


@dataclass(frozen=True, kw_only=True)
class CircuitOpened(Event):
    """Several batches in a row have failed, or a probe has: requests are refused for a while.

    Attributes:
        failures: How many have failed in a row.
        retry_after: Seconds until the next probe.
        error: What the last one failed with.
    """

    failures: int
    retry_after: float
    error: str


@dataclass(frozen=True, kw_only=True)
class CircuitClosed(Event):
    """The probe has succeeded: requests are let in again."""
