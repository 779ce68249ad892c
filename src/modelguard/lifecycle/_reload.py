"""One load from its start to the release of what it replaced: wait, load, install, drain, release. Or that release."""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from modelguard import _units, telemetry
from modelguard.errors import CudaAfterFork, LoadFailed, LoadTimeout, ModelRejected
from modelguard.facts._gpu import Gpu, free_after, use_of
from modelguard.lifecycle import _loading
from modelguard.lifecycle._generation import Generation, LoadJob
from modelguard.lifecycle._readings import AtLoad, Readings
from modelguard.lifecycle._release import drain_and_release, release
from modelguard.lifecycle._state import GuardContext
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import PROTECT_MEMORY, Reason

if TYPE_CHECKING:
    from modelguard.telemetry import DiscardCause, HostLockHeld, Swap


# After a call that failed because of the GPU: free what it left there, and give obscure errors a name.


#: Of the memory of all GPUs together: so much more than after the load, in tensors, calls for a reload.
_STAYS = 0.1


def named(guard: str, gpu: Gpu, error: BaseException) -> BaseException:
    """The error that says what is wrong, if torch's own does not."""
    if not gpu.is_after_fork(error):
        return error
    better = CudaAfterFork(guard)
    better.__cause__ = error
    return better


def free(guard: GuardContext[Any], generation: Generation[Any], error: BaseException) -> tuple[Reason, ...]:
    """Free the GPU memory that a call which ran out of it has left, and report it.

    The traceback keeps its lines, and loses the local variables of the calls that have ended.

    Returns:
        Why the model must be replaced; empty if it need not.
    """
    gpu = guard.runtime.gpu
    before = use_of(gpu)
    free_after(gpu, error)
    after = use_of(gpu)
    telemetry.emit(
        telemetry.GpuOutOfMemory(
            guard=guard.name,
            generation=generation.number,
            reserved_before=None if before is None else before.reserved,
            reserved_after=None if after is None else after.reserved,
            allocated=None if after is None else after.allocated,
            retry=guard.options.retry,
        )
    )
    # Other calls on it have tensors of their own, which say nothing.
    if after is None or generation.gpu_allocated is None or len(generation.leases) > 1:
        return ()
    left = after.allocated - generation.gpu_allocated
    if left <= _STAYS * sum(one.total for one in gpu.devices()):
        return ()
    return (Reason("gpu_out_of_memory", f"a call ran out of GPU memory and left {_units.format_bytes(left)} there"),)


M = TypeVar("M")

#: A moment counts as quiet when no call has run for this many seconds. Calls of one burst follow each other faster.
QUIET = 0.05
_POLL = 0.01

#: While it loads, a model takes more memory than afterwards: ja_ginza peaks at 1.17 times its size.
PEAK = 1.25

#: Reloads for errors, and their second attempts.
_FOR_ERRORS = frozenset({"errors", "retry"})
#: Seconds between two readings of the free memory while a load waits: each opens a few files, about 0.1 ms.
_ROOM_INTERVAL = 0.25


class Deferred(NamedTuple):
    seconds: float
    growth: int


NOT_DEFERRED = Deferred(0.0, 0)


def _fruitless_reloads(old: Generation[Any] | None, job: LoadJob) -> int:
    """How many reloads for errors will have led to a model that replaces ``old``, without a call that succeeded."""
    if old is None or not old.errors or all(reason.kind not in _FOR_ERRORS for reason in job.reasons):
        return 0
    return 1 if old.served else old.fruitless_reloads + 1


def _ulimits() -> list[tuple[str, int]]:
    """Limits of this process at which ``malloc`` fails while memory is free: their ``ulimit`` option, and bytes."""
    import resource  # here: few loads run out of memory

    named = {"ulimit -v allows it to map": resource.RLIMIT_AS, "ulimit -d allows it as data": resource.RLIMIT_DATA}
    found = [(what, resource.getrlimit(which)[0]) for what, which in named.items()]
    return [(what, most) for what, most in found if most != resource.RLIM_INFINITY]


class Reload(Generic[M]):
    """The work behind one job. Runs in a background thread.

    Args:
        guard: Whose model is loaded.
        readings: Are started anew for the generation that is installed.
        job: What was requested.
    """

    def __init__(self, guard: GuardContext[M], readings: Readings, job: LoadJob) -> None:
        self._guard = guard
        self._readings = readings
        self._job = job
        self._fruitless_reloads = 0

    def run(self) -> None:
        """Do all of it. Never raises: failures go to those who wait, and to an event."""
        self._job.threads.add(threading.get_ident())
        try:
            if self._job.unloads:
                self._unload()
            elif self._job.replaces:
                self._replace()
            else:
                self._load_and_install("first", lock="none")
        except BaseException as error:  # noqa: BLE001 - a fault of ours must not leave callers waiting forever
            self.fail(LoadFailed, f"{type(error).__name__}: {error}", error)

    def fail(self, kind: type[LoadFailed], reason: str, cause: BaseException | None) -> None:
        """End in failure: tell those who wait, and set the time of the next attempt."""
        if self._job.cancelled:  # nobody waits for it
            return
        state, runtime = self._guard.state, self._guard.runtime
        attempt = state.failures + 1
        wait = self._guard.options.backoff.seconds(attempt, runtime.random())
        current = None if state.current is None else state.current.number
        failure = kind(self._guard.name, reason, attempt=attempt, retry_after=wait, current=current)
        failure.__cause__ = cause
        try:
            telemetry.emit(
                telemetry.LoadErrored(
                    guard=self._guard.name,
                    attempt=attempt,
                    error=failure.reason,
                    retry_after=wait,
                    current=current,
                )
            )
        except BaseException:  # noqa: BLE001 - whatever becomes of the event, those who wait must not wait for ever
            with suppress(BaseException):
                logger.exception("modelguard could not report that the load of guard %r failed", self._guard.name)
        state.fail(self._job, failure, retry_at=runtime.clock() + wait)

    def _unload(self) -> None:
        """Release the model until its next use."""
        guard, reasons = self._guard, self._job.reasons
        requested = any(reason.kind == "requested" for reason in reasons)
        old = guard.state.retire_until_next_use(if_unused=not requested)
        if old is not None:
            self._release_previous()
            telemetry.emit(telemetry.UnloadStarted(guard=guard.name, generation=old.number, reasons=reasons))
            drain_and_release(guard, old)

    def _replace(self) -> None:
        guard, runtime = self._guard, self._guard.runtime
        with runtime.host_lock.held(sleep=runtime.sleep, clock=runtime.clock, cancelled=self._is_cancelled) as lock:
            deferred = self._wait_for_quiet()
            if self._is_cancelled() and guard.state.put_off(self._job):
                return
            if self._protects_memory():
                self._release_previous()
            swap = self._choose_swap()
            self._fruitless_reloads = _fruitless_reloads(guard.state.current, self._job)
            # Before an outage begins: a probe may take its time.
            at_load = self._readings.before_load() if swap == "drain_first" else None
            if swap == "load_first":
                old, since = guard.state.current, None
            else:
                old, since = guard.state.retire_current(self._job), runtime.clock()
                if old is not None:
                    drain_and_release(guard, old)
            self._load_and_install(swap, lock=lock, deferred=deferred, since=since, at_load=at_load)
            if old is not None and old.dropped and guard.state.current is not None:
                guard.state.left_behind.record(runtime.private(), one_copy=swap == "drain_first")

    # Before the load

    def _is_cancelled(self) -> bool:
        """Whether the reload is not wanted any more: closed, rolled back, or paused before a policy's reload began."""
        state = self._guard.state
        return state.closed or self._job.cancelled or state.holds_back(self._job)

    def _wait_for_quiet(self) -> Deferred:
        """Wait for the beginning of a pause between calls, at most ``defer``, and while there is memory to wait.

        The beginning, because that leaves most of the pause: a load that starts late in a pause meets the next calls.
        """
        guard, runtime, job = self._guard, self._guard.runtime, self._job
        started = since = runtime.clock()
        before = runtime.private()
        uses, call_ended, read = None, job.after_call, -math.inf
        while not job.urgent and not self._is_cancelled():
            generation, now = guard.state.current, runtime.clock()
            if generation is None or now - started >= guard.options.swap.defer:
                break
            if now - read >= _ROOM_INTERVAL:
                if self._memory_is_short():
                    break
                read = now
            if generation.leases or generation.uses != uses:
                call_ended = call_ended or uses is not None
                uses, since = generation.uses, now
            elif call_ended and now - since >= QUIET:
                break
            runtime.sleep(_POLL)
        seconds = runtime.clock() - started
        return Deferred(seconds, max(0, runtime.private() - before) if seconds else 0)

    def _memory_is_short(self) -> bool:
        """Whether this reload is to free memory, and there is less than a second copy would need."""
        if not self._protects_memory():
            return False
        room = self._guard.runtime.headroom()
        return room is not None and room < PEAK * (self._guard.state.model_bytes or 0)

    def _protects_memory(self) -> bool:
        return any(reason.kind in PROTECT_MEMORY for reason in self._job.reasons)

    def _release_previous(self) -> None:
        """Release what is kept for a rollback, if there is anything."""
        previous = self._guard.state.take_previous()
        if previous is not None:
            drain_and_release(self._guard, previous)

    def _choose_swap(self) -> Swap:
        guard = self._guard
        size, room = guard.state.model_bytes, guard.runtime.headroom()
        chosen: Swap
        if guard.options.swap.mode == "auto":
            need = int(PEAK * (size or 0))
            if room is not None and room < need and guard.state.previous is not None:
                self._release_previous()
                room = guard.runtime.headroom()
            chosen = "load_first" if room is None or room >= need else "drain_first"
            free = "an unknown amount" if room is None else _units.format_bytes(room)
            why = f"a second copy needs {_units.format_bytes(need)} while it loads, and {free} is free"
            if chosen == "load_first" and (too_small := self._gpu_too_small()) is not None:
                chosen, why = "drain_first", too_small
            if chosen == "load_first" and guard.state.left_behind.is_too_much(size or 0):
                chosen, crept = "drain_first", _units.format_bytes(guard.state.left_behind.amount)
                why = f"earlier reloads left {crept} behind in all, which it returns"
        else:
            chosen, why = guard.options.swap.mode, "set by the guard's author"
        telemetry.emit(telemetry.SwapChosen(guard=guard.name, swap=chosen, why=why, model_bytes=size, headroom=room))
        return chosen

    def _gpu_too_small(self) -> str | None:
        """Why a GPU cannot hold a second copy; None if all can, or if it is not known."""
        current = self._guard.state.current
        for device, size in {} if current is None else current.gpu_bytes.items():
            need, room = int(PEAK * size), self._guard.runtime.gpu.room(device)
            if size and room is not None and room < need:
                free = _units.format_bytes(room)
                return f"a second copy needs {_units.format_bytes(need)} on GPU {device}, and {free} is free"
        return None

    # Load and install

    def _load_and_install(
        self,
        swap: Swap,
        *,
        lock: HostLockHeld,
        deferred: Deferred = NOT_DEFERRED,
        since: float | None = None,
        at_load: AtLoad | None = None,
    ) -> None:
        """Make a generation and install it. One that became stale while it loaded is made once more."""
        guard = self._guard
        for discardable in (True, False):
            if not guard.state.begin(self._job):
                return
            at_load = self._readings.before_load() if at_load is None else at_load
            loaded = self._make(lock=lock, deferred=deferred)
            if loaded is None:
                return
            generation = loaded.generation
            generation.fruitless_reloads = self._fruitless_reloads
            waited = 0.0 if since is None else guard.runtime.clock() - since
            keep = guard.options.swap.keep_previous and swap == "load_first" and not self._protects_memory()
            installed, over = guard.state.install(self._job, generation, discardable=discardable, keep=keep)
            if installed:
                guard.shown.show(generation.version)
                self._readings.loaded(generation, at_load, replaced=swap != "first")
                self._emit_finished(loaded, swap, waited)
                for old in over:
                    drain_and_release(guard, old)
                return
            at_load = None
            cancelled: DiscardCause = "rolled_back" if self._job.cancelled else "stale"
            self._discard(generation, "closed" if guard.state.closed else cancelled)

    def _make(self, *, lock: HostLockHeld, deferred: Deferred) -> _loading.Made[M] | None:
        """Make a generation; None if that failed, which has then been reported."""
        guard = self._guard
        telemetry.emit(
            telemetry.LoadStarted(
                guard=guard.name,
                generation=guard.state.generations + 1,
                reasons=self._job.reasons,
                deferred_seconds=deferred.seconds,
                deferred_growth=deferred.growth,
                host_lock=lock,
            )
        )
        before = guard.runtime.private()
        try:
            return _loading.make(guard, self._job, self._discard)
        except _loading.Late:
            late = f"the loader did not end within load_timeout={guard.options.load_timeout:g} s and was abandoned"
            self.fail(LoadTimeout, late, None)
        except _loading.Rejected as rejection:
            free_after(guard.runtime.gpu, rejection.__cause__ or rejection)
            self.fail(ModelRejected, str(rejection), rejection.__cause__)
        except BaseException as error:  # noqa: BLE001 - whatever a loader raises is the load's failure
            shortage = self._shortage(before) if isinstance(error, MemoryError) else ""  # while the load still holds it
            free_after(guard.runtime.gpu, error)  # who waits keeps the error, and would keep half a model
            cause = named(guard.name, guard.runtime.gpu, error)
            said = "; ".join(filter(None, (str(cause), shortage)))
            self.fail(LoadFailed, f"{type(cause).__name__}: {said}", cause)
        return None

    def _shortage(self, before: int) -> str:
        """What a load that ran out of memory had taken, and what was left."""
        runtime = self._guard.runtime
        private, room = runtime.private(), runtime.headroom()
        free = "an unknown amount" if room is None else _units.format_bytes(room)
        limits = "".join(f"; {_units.format_bytes(most)} is the most that {what}" for what, most in _ulimits())
        return (
            f"the load had taken {_units.format_bytes(max(0, private - before))}; this process has "
            f"{_units.format_bytes(private)} of private memory, and {free} is free{limits}"
        )

    def _emit_finished(self, loaded: _loading.Made[M], swap: Swap, waited: float) -> None:
        gpu = use_of(self._guard.runtime.gpu)
        telemetry.emit(
            telemetry.LoadFinished(
                guard=self._guard.name,
                generation=loaded.generation.number,
                version=loaded.generation.version,
                reasons=self._job.reasons,
                seconds=loaded.seconds,
                stall_seconds=loaded.stall,
                model_bytes=loaded.generation.model_bytes,
                swap=swap,
                waited_seconds=waited,
                gpu_allocated=None if gpu is None else gpu.allocated,
                gpu_reserved=None if gpu is None else gpu.reserved,
            )
        )

    def _discard(self, generation: Generation[M], cause: DiscardCause) -> None:
        release(self._guard, generation)
        event = telemetry.LoadDiscarded(guard=self._guard.name, cause=cause, version=generation.version)
        telemetry.emit(event)
