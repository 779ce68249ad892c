"""Events of guards, pools and replicas: their loads, releases and policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from modelguard.telemetry.events._base import Event
from modelguard.telemetry.reasons import Reason

#: How a generation replaced another one; ``"first"`` replaced none.
Swap = Literal["first", "load_first", "drain_first"]

#: Which lock a load held. ``"host"``: it excluded the loads of all this user's processes on this host; ``"process"``:
#: it excluded only loads in this process, because no lock file can be used; ``"timed_out"``: none, because another load
#: held the lock too long; ``"cancelled"``: none, because the guard was closed; ``"none"``: none, as for first loads.
HostLockHeld = Literal["host", "process", "timed_out", "cancelled", "none"]

#: Why a loaded model was not used: the guard was closed, the load took longer than ``load_timeout``, ``validate``,
#: the warm-up or ``replay`` failed, ``rollback()`` was called, or a newer reload request replaced it.
DiscardCause = Literal["closed", "late", "rejected", "rolled_back", "stale"]

#: Why something that a policy asks for waits. ``"paused"``: ``pause()`` was called; ``"min_lifetime"``: the model has
#: not taken calls for that long.
PostponeCause = Literal["paused", "min_lifetime"]

#: A callable that the user has given.
Callback = Literal["reload_on", "probe", "recycle", "release", "unload"]


@dataclass(frozen=True, kw_only=True)
class ReloadDue(Event):
    """A policy has become due; a reload follows."""

    generation: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True)
class ReloadPostponed(Event):
    """Policies have become due, and what they ask for must wait. Each policy is reported once for each generation.

    Attributes:
        generation: The number of the generation that would be replaced or released.
        reasons: The policies that were not reported before.
        cause: Why it waits.
        seconds: For how long; None while the guard is paused.
        worker: The process id of the worker of an isolated function that would be replaced; None if it is the
            generation.
    """

    generation: int
    reasons: tuple[Reason, ...]
    cause: PostponeCause
    seconds: float | None
    worker: int | None = None


@dataclass(frozen=True, kw_only=True)
class GuardPaused(Event):
    """``pause()`` was called: policies start nothing until ``resume()``."""


@dataclass(frozen=True, kw_only=True)
class GuardResumed(Event):
    """``resume()`` was called after ``pause()``: policies decide again."""


@dataclass(frozen=True, kw_only=True)
class UnloadStarted(Event):
    """The model is released until its next use: ``Idle`` is due, or ``unload()`` was called.

    ``GenerationReleased`` follows when its memory is returned.
    """

    generation: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True)
class RolledBack(Event):
    """``rollback()`` has made the previous generation current again.

    Attributes:
        generation: Its number.
        version: The version of its model; None if the loader gave none.
        replaced: Number of the generation that took calls until then, which is released.
        replaced_version: The version of that one's model.
    """

    generation: int
    version: str | None
    replaced: int
    replaced_version: str | None


@dataclass(frozen=True, kw_only=True)
class ReplayFinished(Event):
    """A new model was compared with the current one on recorded calls. It holds no input and no answer.

    Attributes:
        generation: The number of the new generation.
        version: The version of its model; None if the loader gave none.
        current: The number of the generation that takes calls.
        recorded: How many calls were kept.
        compared: How many of them the current model has answered again, in time, with something to compare.
        agreed: How many of these answers the new model gave too.
        slowdown: The time of a call on the new model over that on the current one, the median; None if fewer than ten
            calls were timed on both, and time was not up.
        seconds: How long it took.
        accepted: Whether the new model keeps to the rule. If not, ``LoadErrored`` follows, with the reason.
    """

    generation: int
    version: str | None
    current: int
    recorded: int
    compared: int
    agreed: int
    slowdown: float | None
    seconds: float
    accepted: bool


@dataclass(frozen=True, kw_only=True)
class RecycleAsked(Event):
    """A policy has become due in a process that is replaced as a whole: the server was asked for a new process."""

    generation: int
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, kw_only=True)
class SwapChosen(Event):
    """How the next generation replaces the current one, and why.

    Attributes:
        swap: ``"load_first"`` or ``"drain_first"``.
        why: The figures behind the choice, or a note that the guard's option made it. Text for users.
        model_bytes: Size of the model as measured at its load; None before the first measurement.
        headroom: Bytes that may still be allocated; None if unknown.
    """

    swap: Swap
    why: str
    model_bytes: int | None
    headroom: int | None


@dataclass(frozen=True, kw_only=True)
class LoadStarted(Event):
    """The loader is about to be called.

    Attributes:
        generation: The number of the new generation.
        reasons: Why it is loaded.
        deferred_seconds: How long the load waited for a pause between calls.
        deferred_growth: Bytes by which private memory grew in that time.
        host_lock: Which lock the load holds.
    """

    generation: int
    reasons: tuple[Reason, ...]
    deferred_seconds: float
    deferred_growth: int
    host_lock: HostLockHeld


@dataclass(frozen=True, kw_only=True)
class LoadFinished(Event):
    """A new generation takes calls.

    Attributes:
        generation: Its number.
        reasons: Why it was loaded.
        seconds: Loading, validation and warm-up together.
        stall_seconds: The longest time during the load in which no other Python thread could run.
        model_bytes: Growth of private memory during the load, or the size that the model's adapter reports if larger.
        swap: How it replaced the old generation.
        waited_seconds: With ``drain_first``, how long no generation took calls.
        version: The version of its model; None if the loader gave none.
        gpu_allocated: GPU memory of this process in tensors, on all devices, in bytes; None if it has not used CUDA.
        gpu_reserved: GPU memory that torch has reserved for this process.
    """

    generation: int
    reasons: tuple[Reason, ...]
    seconds: float
    stall_seconds: float
    model_bytes: int
    swap: Swap
    waited_seconds: float
    version: str | None = None
    gpu_allocated: int | None = None
    gpu_reserved: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadErrored(Event):
    """A load failed. The current generation, if there is one, keeps taking calls.

    Attributes:
        attempt: How many consecutive loads have failed.
        error: The error.
        retry_after: Seconds until the next attempt.
        current: Number of the generation that keeps taking calls; None if there is none.
    """

    attempt: int
    error: str
    retry_after: float
    current: int | None


@dataclass(frozen=True, kw_only=True)
class LoadDiscarded(Event):
    """A model was loaded but not used.

    Attributes:
        cause: The reason.
        version: The version of the model; None if the loader gave none.
    """

    cause: DiscardCause
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationReleased(Event):
    """A generation was unloaded and dropped.

    Attributes:
        generation: Its number.
        bytes_before: Private memory before the release.
        bytes_after: Private memory after unload, collection and trim.
        alive: True if the model still exists, False if it was freed, None if its type cannot be watched.
        holders: Descriptions of objects that still refer to it, at most five.
        collected: Whether ``gc.collect()`` was needed.
        trimmed_by: The allocator that returned free memory to the system (``"glibc"``, ...); None if none could.
        trim_error: Why none could; None if one did.
        seconds: Duration of the release itself.
        drain_seconds: How long its last calls took to end; None if they outlasted ``drain_timeout``.
        error: The error that ``unload`` raised; None if it did not.
        in_use: Bytes that malloc has handed out afterwards, in the whole process; None if it gives no figure.
        held: Bytes that malloc has taken from the system and not returned by then; None if it gives no figure. For
            glibc and mimalloc an upper bound: they count pages that were never touched.
        immortal: Whether ``prefork.prepare`` had made the model immortal. Then its objects stay in memory until the
            process ends, and each further generation that is made immortal adds its size. No collection was tried, and
            no holders were looked for.
        version: The version of its model; None if the loader gave none.
        gpu_reserved_before: GPU memory that torch had reserved before the release, on all devices, in bytes; None if
            this process has not used CUDA.
        gpu_reserved_after: The same after the cache was emptied.
        gpu_allocated: GPU memory in tensors by then.
        kept: Why less than half of what the load took came back, although the model is gone and free memory was
            returned; None if more did, and for differences below 16 MB.
    """

    generation: int
    bytes_before: int
    bytes_after: int
    alive: bool | None
    holders: tuple[str, ...]
    collected: bool
    trimmed_by: str | None
    trim_error: str | None
    seconds: float
    drain_seconds: float | None
    error: str | None
    in_use: int | None = None
    held: int | None = None
    immortal: bool = False
    version: str | None = None
    gpu_reserved_before: int | None = None
    gpu_reserved_after: int | None = None
    gpu_allocated: int | None = None
    kept: str | None = None

    @property
    def freed(self) -> int:
        """Bytes returned to the system; negative if the process grew meanwhile."""
        return self.bytes_before - self.bytes_after

    @property
    def gpu_freed(self) -> int | None:
        """Bytes returned to the GPUs; negative if more was reserved meanwhile, None without GPU."""
        if self.gpu_reserved_before is None or self.gpu_reserved_after is None:
            return None
        return self.gpu_reserved_before - self.gpu_reserved_after


@dataclass(frozen=True, kw_only=True)
class GenerationAbandoned(Event):
    """Calls on a replaced or closed generation outlasted the wait for them; it is released when the last of them ends.

    Attributes:
        generation: Its number.
        in_flight: How many calls still run on it.
        drain_timeout: How long they were waited for: the guard's ``drain_timeout``, or the ``timeout`` of ``close()``.
    """

    generation: int
    in_flight: int
    drain_timeout: float
    version: str | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryTrimmed(Event):
    """Freed memory was returned to the system, because of ``trim_every``.

    Attributes:
        bytes_before: Private memory before.
        bytes_after: Private memory after.
        trimmed_by: The allocator that did it; None if none could.
        trim_error: Why none could; None if one did.
        seconds: Duration of the trim.
        in_use: As for ``GenerationReleased``.
        held: As for ``GenerationReleased``.
    """

    bytes_before: int
    bytes_after: int
    trimmed_by: str | None
    trim_error: str | None
    seconds: float
    in_use: int | None = None
    held: int | None = None

    @property
    def freed(self) -> int:
        """Bytes returned to the system; negative if the process grew meanwhile."""
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True, kw_only=True)
class GpuCacheEmptied(Event):
    """A policy on GPU memory has found torch's cache too large, which no reload helps against, and it was emptied.

    Attributes:
        generation: The number of the generation.
        policy: The policy, as written in the code.
        reserved_before: GPU memory that torch had reserved before, on all devices, in bytes.
        reserved_after: The same afterwards.
        allocated: GPU memory in tensors, in bytes.
        seconds: Duration.
        advice: What to change if it did not help, or if the cache grew back. Text for users; None the first time.
    """

    generation: int
    policy: str
    reserved_before: int
    reserved_after: int
    allocated: int
    seconds: float
    advice: str | None

    @property
    def freed(self) -> int:
        """Bytes returned to the GPUs."""
        return self.reserved_before - self.reserved_after


@dataclass(frozen=True, kw_only=True)
class GpuOutOfMemory(Event):
    """A call ran out of GPU memory. What its traceback kept alive was freed, and torch's cache emptied.

    Attributes:
        generation: The number of the generation.
        reserved_before: GPU memory that torch had reserved before, on all devices, in bytes; None if it gives no
            figures.
        reserved_after: The same afterwards.
        allocated: GPU memory in tensors afterwards.
        retry: Whether the call is run once more.
    """

    generation: int
    reserved_before: int | None
    reserved_after: int | None
    allocated: int | None
    retry: bool


@dataclass(frozen=True, kw_only=True)
class PolicyFutile(Event):
    """A policy is ignored for this generation.

    It would be due again immediately after every reload, or its probe returns values that change too often.

    Attributes:
        generation: The number of the generation.
        policy: The policy, as written in the code.
        detail: Why a reload cannot help. Text for users.
        cause: What makes this process grow, such as ``"onednn plans"``, if ``modelguard.diagnosis.watch`` has found it;
            None otherwise.
    """

    generation: int
    policy: str
    detail: str
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class CallbackErrored(Event):
    """A callable that the user has given (a policy, a probe, a recycler) raised; the guard continued without it.

    A probe of ``Changed`` that takes longer than its ``timeout`` counts as one that raised ``TimeoutError``.
    """

    callback: Callback
    error: str
