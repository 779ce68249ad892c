"""The events: their fields, and their level and sentence in the log. ``_metrics.py`` has what is counted of them.

Times are seconds, sizes are bytes of private memory, errors are one line of text.
"""

import logging
import os
import time
from dataclasses import dataclass, field
from typing import ClassVar, Literal, dataclass_transform, get_origin

from modelguard import _units
from modelguard.telemetry.reasons import PROTECT_MEMORY, Reason

#: Seconds. A shorter wait for a pause would be shown as 0.0.
_WORTH_MENTIONING = 0.05


def _numbered(generation: int, version: str | None) -> str:
    return f"generation {generation}{_in_brackets(version)}"


def _in_brackets(version: str | None) -> str:
    return "" if version is None else f" (version {version})"


# What all events have in common.


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
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

    _usual_level: ClassVar[int]
    _says: ClassVar[str]  #: The sentence of most events. ``{0}`` is the event.

    def __init_subclass__(cls, *, level: int = logging.INFO) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls._usual_level = level
        cls.__module__ = "modelguard.telemetry"  # where users import it from

    def _level(self) -> int:
        return self._usual_level

    def _sentence(self) -> str:
        """What the log says after the guard's name."""
        return self._says.format(self)


# What several events have in common.


@dataclass(frozen=True, kw_only=True)
class _OfGeneration:
    """What happens to a generation, and why."""

    generation: int
    reasons: tuple[Reason, ...]

    @property
    def _why(self) -> str:
        return ", ".join(map(str, self.reasons))


@dataclass(frozen=True, kw_only=True)
class _Freed:
    """What gives memory back."""

    bytes_before: int
    bytes_after: int
    seconds: float

    @property
    def freed(self) -> int:
        """Bytes returned to the system; negative if the process grew meanwhile."""
        return self.bytes_before - self.bytes_after

    @property
    def _returned(self) -> str:
        size = _units.format_bytes(abs(self.freed))
        return f"{size} returned to the system" if self.freed >= 0 else f"memory grew by {size} meanwhile"


@dataclass(frozen=True, kw_only=True)
class _Trimmed(_Freed):
    """What has an allocator give memory back."""

    trimmed_by: str | None
    trim_error: str | None
    in_use: int | None = None
    held: int | None = None


# Events of guards, pools and replicas: their loads, releases and policies.


#: How a generation replaced another one; ``"first"`` replaced none.
Swap = Literal["first", "load_first", "drain_first"]

#: Which lock a load held. ``"host"``: it excluded the loads of all this user's processes on this host; ``"process"``:
#: it excluded only loads in this process, because no lock file can be used; ``"timed_out"``: none, because another load
#: held the lock too long; ``"cancelled"``: none, because the guard was closed, or because the load that holds the lock
#: waits for this one; ``"none"``: none, as for first loads.
HostLockHeld = Literal["host", "process", "timed_out", "cancelled", "none"]

#: Why a loaded model was not used: the guard was closed, the load took longer than its timeout, ``validate``,
#: the warm-up or ``replay`` failed, ``rollback()`` was called, or a newer reload request replaced it.
DiscardCause = Literal["closed", "late", "rejected", "rolled_back", "stale"]

#: Why something that a policy asks for waits. ``"paused"``: ``pause()`` was called; ``"min_lifetime"``: the model has
#: not taken calls for that long.
PostponeCause = Literal["paused", "min_lifetime"]

#: A callable that the user has given.
Callback = Literal["reload_on", "probe", "recycle", "release", "unload"]


class ReloadDue(_OfGeneration, Event):
    """A policy has become due; a reload follows."""

    _says = "reload due after generation {0.generation}: {0._why}"


class ReloadPostponed(_OfGeneration, Event):
    """Policies have become due, and what they ask for must wait. Each policy is reported once for each generation.

    Attributes:
        generation: The number of the generation that would be replaced or released.
        reasons: The policies that were not reported before.
        cause: Why it waits.
        seconds: For how long; None while the guard is paused.
        worker: The process id of the worker of an isolated function that would be replaced; None if it is the
            generation.
    """

    cause: PostponeCause
    seconds: float | None
    worker: int | None = None

    def _level(self) -> int:
        # a paused guard holds back a policy that protects memory
        if self.cause == "paused" and any(reason.kind in PROTECT_MEMORY for reason in self.reasons):
            return logging.WARNING
        return logging.INFO

    def _sentence(self) -> str:
        until = "the guard is paused" if self.seconds is None else f"waits {self.seconds:.1f} s for min_lifetime"
        what = f"generation {self.generation}" if self.worker is None else f"worker {self.worker}"
        return f"{what} is due, but {until}: {self._why}"


class GuardPaused(Event):
    """``pause()`` was called: policies start nothing until ``resume()``."""

    _says = "paused: policies start nothing until resume()"


class GuardResumed(Event):
    """``resume()`` was called after ``pause()``: policies decide again."""

    _says = "resumed: policies decide again"


class UnloadStarted(_OfGeneration, Event):
    """The model is released until its next use: ``Idle`` is due, or ``unload()`` was called.

    ``GenerationReleased`` follows when its memory is returned.
    """

    _says = "generation {0.generation} is released until the next use: {0._why}"


class IdleEnded(Event):
    """The guard was closed while its model, or its workers, were released until the next use: there is none."""

    _says = "closed while its model was released until the next use"


class RolledBack(Event, level=logging.WARNING):
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

    def _sentence(self) -> str:
        replaced = _numbered(self.replaced, self.replaced_version)
        return f"rolled back to {_numbered(self.generation, self.version)}, from {replaced}"


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

    @property
    def outcome(self) -> Literal["accepted", "rejected", "not_compared"]:
        """What came of it."""
        if not self.accepted:
            return "rejected"
        return "accepted" if self.compared else "not_compared"

    def _level(self) -> int:
        return logging.INFO if self.outcome == "accepted" else logging.WARNING

    def _sentence(self) -> str:
        which = f"{_numbered(self.generation, self.version)} against generation {self.current}"
        if self.outcome == "not_compared":
            return f"{which}: none of {self.recorded} recorded calls could be compared"
        slowdown = "" if self.slowdown is None else f", and the median call takes {self.slowdown:.2f} times as long"
        agreed = f"{self.agreed} of {self.compared} answers agree ({self.recorded} calls were recorded)"
        return f"{which}: {agreed}{slowdown}; {self.outcome} after {self.seconds:.2f} s"


class RecycleAsked(_OfGeneration, Event):
    """A policy has become due in a process that is replaced as a whole: the server was asked for a new process."""

    _says = "asked the server for a new process after generation {0.generation}: {0._why}"


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

    _says = "replacing the model by {0.swap}: {0.why}"


class LoadStarted(_OfGeneration, Event):
    """The loader is about to be called.

    Attributes:
        generation: The number of the new generation.
        reasons: Why it is loaded.
        deferred_seconds: How long the load waited for a pause between calls.
        deferred_growth: Bytes by which private memory grew in that time.
        host_lock: Which lock the load holds.
    """

    deferred_seconds: float
    deferred_growth: int
    host_lock: HostLockHeld

    def _sentence(self) -> str:
        waited = self.deferred_seconds >= _WORTH_MENTIONING
        grown = f", in which memory grew by {_units.format_bytes(self.deferred_growth)}" if self.deferred_growth else ""
        deferred = f", deferred by {self.deferred_seconds:.1f} s{grown}" if waited else ""
        return f"loading generation {self.generation}: {self._why}{deferred}"


class LoadFinished(_OfGeneration, Event):
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

    seconds: float
    stall_seconds: float
    model_bytes: int
    swap: Swap
    waited_seconds: float
    version: str | None = None
    gpu_allocated: int | None = None
    gpu_reserved: int | None = None

    def _sentence(self) -> str:
        size, stall = _units.format_bytes(self.model_bytes), self.stall_seconds * 1e3
        ready = f"{_numbered(self.generation, self.version)} is ready after {self.seconds:.2f} s"
        return f"{ready} ({size}, longest stall {stall:.0f} ms)"


class LoadErrored(Event, level=logging.WARNING):
    """A load failed. The current generation, if there is one, keeps taking calls.

    Attributes:
        attempt: How many consecutive loads have failed.
        error: The error.
        retry_after: Seconds until the next attempt; None if the guard is closed, and there is none.
        current: Number of the generation that keeps taking calls; None if there is none.
    """

    attempt: int
    error: str
    retry_after: float | None
    current: int | None

    def _sentence(self) -> str:
        kept = "no model is loaded" if self.current is None else f"generation {self.current} stays in use"
        again = "the guard is closed" if self.retry_after is None else f"next attempt in {self.retry_after:.1f} s"
        return f"load failed (attempt {self.attempt}): {self.error}; {kept}, {again}"


class LoadDiscarded(Event):
    """A model was loaded but not used.

    Attributes:
        cause: The reason.
        version: The version of the model; None if the loader gave none.
    """

    cause: DiscardCause
    version: str | None = None

    def _sentence(self) -> str:
        why = {
            "closed": "the guard was closed",
            "late": "it was ready only after the timeout of its load",
            "rejected": "validate, warmup or replay failed",
            "rolled_back": "rollback() was called during its load",
            "stale": "a newer reload request replaced it",
        }
        return f"a loaded model{_in_brackets(self.version)} was discarded: {why[self.cause]}"


class GenerationReleased(_Trimmed, Event):
    """A generation was unloaded and dropped.

    Attributes:
        generation: Its number.
        bytes_before: Private memory before the release.
        bytes_after: Private memory after unload, collection and trim.
        freed: The difference: bytes returned to the system; negative if the process grew meanwhile.
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
    alive: bool | None
    holders: tuple[str, ...]
    collected: bool
    drain_seconds: float | None
    error: str | None
    immortal: bool = False
    version: str | None = None
    gpu_reserved_before: int | None = None
    gpu_reserved_after: int | None = None
    gpu_allocated: int | None = None
    kept: str | None = None

    @property
    def gpu_freed(self) -> int | None:
        """Bytes returned to the GPUs; negative if more was reserved meanwhile, None without GPU."""
        if self.gpu_reserved_before is None or self.gpu_reserved_after is None:
            return None
        return self.gpu_reserved_before - self.gpu_reserved_after

    def _level(self) -> int:
        return logging.WARNING if self.alive or self.immortal else logging.INFO

    def _sentence(self) -> str:
        model = _numbered(self.generation, self.version)
        if self.immortal:
            return (
                f"{model} was dropped, but stays in memory until the process ends: "
                "prefork.prepare() made its objects immortal, and each further generation adds as much"
            )
        if self.alive:
            return f"{model} was dropped but is still alive, held by: {'; '.join(self.holders) or 'unknown'}"
        gpu = f", {_units.format_bytes(self.gpu_freed)} to the GPU" if self.gpu_freed else ""
        kept = "" if self.kept is None else f" ({self.kept})"
        return f"{model} released, {self._returned}{gpu}{kept}"


class GenerationAbandoned(Event, level=logging.WARNING):
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

    def _sentence(self) -> str:
        calls = f"{self.in_flight} of its calls outlasted drain_timeout={self.drain_timeout:g} s"
        model = _numbered(self.generation, self.version)
        return f"{model} is abandoned: {calls}; it will be released when they end"


class MemoryTrimmed(_Trimmed, Event):
    """Freed memory was returned to the system, because of ``trim_every``.

    Attributes:
        bytes_before: Private memory before.
        bytes_after: Private memory after.
        freed: The difference: bytes returned to the system; negative if the process grew meanwhile.
        trimmed_by: The allocator that did it; None if none could.
        trim_error: Why none could; None if one did.
        seconds: Duration of the trim.
        in_use: As for ``GenerationReleased``.
        held: As for ``GenerationReleased``.
    """

    _says = "trimmed, {0._returned}"


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

    def _sentence(self) -> str:
        freed, left = _units.format_bytes(self.freed), _units.format_bytes(self.reserved_after)
        advice = "" if self.advice is None else f". {self.advice}"
        return f"emptied torch's cache because of {self.policy}: {freed} returned to the GPU, {left} reserved{advice}"


class GpuOutOfMemory(Event, level=logging.WARNING):
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

    def _sentence(self) -> str:
        then = "is run once more" if self.retry else "failed"
        left = "" if self.allocated is None else f"; {_units.format_bytes(self.allocated)} stay allocated"
        return f"a call on generation {self.generation} ran out of GPU memory and {then}{left}"


class PolicyIgnored(Event, level=logging.WARNING):
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

    def _sentence(self) -> str:
        cause = "" if self.cause is None else f"; what grows in this process: {self.cause}"
        return f"{self.policy} is ignored for generation {self.generation}: {self.detail}{cause}"


class CallbackErrored(Event, level=logging.WARNING):
    """A callable that the user has given (a policy, a probe, a recycler) raised; the guard continued without it.

    A probe of ``Changed`` that takes longer than its ``timeout`` counts as one that raised ``TimeoutError``.
    """

    callback: Callback
    error: str

    _says = "{0.callback} raised {0.error}"


# Events of batched functions.


class BatchFinished(Event, level=logging.DEBUG):  # it comes with every batch
    """A batch was computed. Emitted only if there is a user-defined hook, or if the log is at level DEBUG.

    Attributes:
        size: The number of its items.
        waiting: The number of items that wait for the next batch.
        wait_seconds: How long the first of its items waited.
        run_seconds: How long it ran, including reruns.
        failed: The number of items with an error as their result, also of those whose callers have left meanwhile:
            these are ``expired`` or ``cancelled`` in the status, and not ``failed``.
        reruns: How often the function was called again to find the failing items.
        weight: The weight of the batch, with padding; 0 if items have no weights.
        padding: How much of it is padding; 0 unless the function was declared to pad.
        hung: How many other batches have been running for longer than ``hang_after``.
    """

    size: int
    waiting: int
    wait_seconds: float
    run_seconds: float
    failed: int
    reruns: int
    weight: float = 0.0
    padding: float = 0.0
    hung: int = 0

    _says = "a batch of {0.size} took {0.run_seconds:.3f} s; {0.waiting} waiting"


class BatchErrored(Event, level=logging.WARNING):
    """The batch function raised, did not return one result for each item, or has been running for too long.

    Attributes:
        size: The number of items in the batch.
        failed: The number of items that got an error; the others succeeded when they were run again.
        error: The error that the function raised for the whole batch.
        reruns: How often it was called again to find the failing items.
        hung: How many batches have been running for longer than ``hang_after``.
    """

    size: int
    failed: int
    error: str
    reruns: int
    hung: int = 0

    def _sentence(self) -> str:
        kept = (self.size - self.failed, "succeeded when they were run again")
        count, what = kept if self.reruns else (self.failed, "fail")
        return f"a batch failed with {self.error}; {count} of {self.size} items {what}"


class BatchSizeChosen(Event):
    """``AutoSize`` lets batches have more or fewer items than before, by a quarter at least.

    Also emitted if ``slo`` gets out of reach or within reach. At most once a second.

    Attributes:
        size: Most items in a batch from now on.
        previous: Most items before; 0 in the first event.
        slo: The latency goal in seconds; None if there is none any more, and ``size`` was given.
        item_seconds: How long one item alone takes, by what was measured, on the safe side.
        reachable: Whether that is within the goal. If it is not, items run alone.
    """

    size: int
    previous: int
    slo: float | None
    item_seconds: float
    reachable: bool

    def _level(self) -> int:
        return logging.INFO if self.reachable else logging.WARNING

    def _sentence(self) -> str:
        if self.slo is None:
            return f"batches of at most {self.size}, as configured"
        slo = f"slo={self.slo:g} s"
        if self.reachable:
            return f"batches of at most {self.size}, for {slo}; one item alone takes {self.item_seconds:.3g} s"
        return f"{slo} is out of reach: one item alone takes {self.item_seconds:.3g} s; items run alone"


class RequestsRefused(Event, level=logging.WARNING):
    """Requests were refused or dropped since the last event of this kind. Emitted at most once a second.

    Attributes:
        full: Refused because the queue was full.
        late: Refused because, at the measured rate, the deadline could not be met.
        open: Refused because the circuit was open.
        quota: Refused because as many items with their key were waiting as the quota allows.
        expired: Dropped at their deadline.
        cancelled: Dropped because their caller no longer waits.
        waiting: Items that are waiting now.
    """

    full: int
    late: int
    open: int
    quota: int
    expired: int
    cancelled: int
    waiting: int

    def _sentence(self) -> str:
        counts = {
            "queue full": self.full,
            "too late": self.late,
            "circuit open": self.open,
            "over the quota of their key": self.quota,
            "expired": self.expired,
            "cancelled": self.cancelled,
        }
        listed = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
        return f"requests without a result: {listed}; {self.waiting} waiting"


class CircuitOpened(Event, level=logging.WARNING):
    """Several consecutive runs have failed, or a probe has failed: requests are refused for a while.

    Attributes:
        failures: How many consecutive runs have failed: batches, or calls of an isolated function.
        retry_after: Seconds until the next probe.
        error: The error of the last one.
    """

    failures: int
    retry_after: float
    error: str

    _says = "circuit open after {0.failures} failed runs, next try in {0.retry_after:.1f} s: {0.error}"


class CircuitClosed(Event):
    """The probe has succeeded: requests are accepted again."""

    _says = "circuit closed"


# Events of the worker processes of isolated functions.


#: Why a worker of an isolated function ended. ``"recycled"``: a policy was due, and a fresh worker took its place;
#: ``"crashed"``: it ended by itself, or was killed by somebody else; ``"timeout"``: killed because its call took too
#: long; ``"cancelled"``: killed because its caller was interrupted, or had less time than that; ``"closed"``: its mold
#: ended; ``"idle"``: nobody has called, and the mold stays (``Idle(keep="mold")``).
WorkerEndCause = Literal["recycled", "crashed", "timeout", "cancelled", "closed", "idle"]


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

    _says = "worker {0.worker} takes calls after {0.seconds:.3f} s"


class WorkerEnded(Event):
    """A worker of an isolated function has ended. One that ends before it takes calls is logged, and no event.

    Attributes:
        generation: The number of its mold.
        worker: Its process id.
        cause: The reason.
        detail: How it ended if it crashed: a signal's name or an exit status.
        age: Seconds since it was started.
    """

    generation: int
    worker: int
    cause: WorkerEndCause
    detail: str
    age: float

    def _level(self) -> int:
        return logging.WARNING if self.cause in {"crashed", "timeout"} else logging.INFO

    def _sentence(self) -> str:
        why = {
            "recycled": "a policy was due",
            "crashed": f"it crashed ({self.detail})",
            "timeout": "its call took longer than the timeout",
            "cancelled": "its caller was interrupted, or had less time than the timeout",
            "closed": "its mold ended",
            "idle": "nobody has called",
        }
        return f"worker {self.worker} ended after {self.age:.1f} s: {why[self.cause]}"


class WorkersReleased(_OfGeneration, _Freed, Event):
    """Nobody has called an isolated function, so all of its workers have ended. Its mold stays for the next call.

    Attributes:
        generation: The number of the mold.
        reasons: Which policies were due.
        workers: How many have ended.
        bytes_before: What the mold and its workers held, in bytes; what they share is counted once.
        bytes_after: What is left, mostly the mold's.
        freed: The difference: bytes that went back to the system.
        seconds: From the order to the end of the last one.
    """

    workers: int

    _says = "{0.workers} workers ended until the next call, {0._returned}: {0._why}"


# What ``modelguard.diagnosis.watch`` reports.


class GrowthFound(Event, level=logging.WARNING):
    """``modelguard.diagnosis.watch`` has decided that the memory of this process grows with its calls, and why.

    Attributes:
        guard: The name that ``watch`` was given.
        cause: The main cause, such as ``"spacy strings"``; None if none is known.
        share: Its share of the growth, from 0 to 1.
        seen: The evidence, in a sentence.
        fix: What to do.
        growth: Bytes by which private memory grew while it was watched.
        calls: Calls meanwhile; milliseconds if no calls are counted.
    """

    cause: str | None
    share: float
    seen: str
    fix: str
    growth: int
    calls: int

    def _sentence(self) -> str:
        grown = f"memory grows with the calls, by {_units.format_bytes(self.growth)} so far"
        if self.cause is None:
            return f"{grown}; the cause is not known"
        return f"{grown}, {self.share:.0%} of it by {self.cause}: {self.seen}. {self.fix}"


Event.__module__ = "modelguard.telemetry"

#: The names of all events, and of the kinds of words in their fields.
NAMES = [
    name
    for name, kind in globals().items()
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Event))
]
