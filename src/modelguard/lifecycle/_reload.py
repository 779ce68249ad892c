"""One load from its start to the release of what it replaced: wait, load, install, drain, release. Or that release.

First how one generation is made: load, validate and warm up a model, in time, and measure what that took.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from modelguard import _units, telemetry
from modelguard.environment import _effect
from modelguard.errors import CudaAfterFork, LoadFailed, LoadTimeout, ModelRejected, shortened, text_of, told
from modelguard.facts._gpu import Gpu, free_after, use_of
from modelguard.lifecycle import _guard_options, _models
from modelguard.lifecycle._models import is_plain_value
from modelguard.lifecycle._readings import AtLoad, Readings
from modelguard.lifecycle._release import drain_and_release, release, release_and_report
from modelguard.lifecycle._state import Generation, GuardContext, LoadJob, Outcome
from modelguard.runtime import call_context, waiting
from modelguard.runtime.background import start_thread
from modelguard.runtime.waiting import resolve
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import PROTECT_MEMORY, Reason

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import Replay
    from modelguard.lifecycle._replay import RecordedCalls
    from modelguard.telemetry import DiscardCause, HostLockHeld, Swap


M = TypeVar("M")
T = TypeVar("T")

#: Seconds between two turns of the stall meter. Python's own switch interval is 5 ms.
_BEAT = 0.005


class Late(Exception):
    """The work was not done in time. It goes on in its thread, and its result goes to ``when_late``."""


class Unwanted(Exception):
    """The load was ended, since its guard was closed or rolled back. Who waits after that gets another one."""


class Rejected(Exception):
    """The model was loaded but is not accepted."""


def _load_and_measure(
    guard: GuardContext[M], before: int, discard: Callable[[Generation[M], DiscardCause], None]
) -> Generation[M]:
    """Load, validate and warm up a model, and measure what that took; ``discard`` gets one that is rejected."""
    system = guard.system
    handed_out_before, started = system.handed_out(), system.clock()
    on_gpus = {one.device: one.allocated for one in system.gpu.devices()}
    with StallMeter() as meter:
        generation = _load(guard)
        try:
            _prove(guard, generation)
        except BaseException:
            discard(generation, "rejected")
            raise
        system.try_trim()  # what only the load needed: 30 to 60 MB for ja_ginza
    # A load that reuses free memory makes the process grow by less than the model, but all of it is handed out.
    growth, handed_out = system.private() - before, system.handed_out()
    taken = 0 if handed_out is None or handed_out_before is None else handed_out - handed_out_before
    generation.written_bytes = max(0, growth, taken)
    mapped = _models.find(generation.model).size(generation.model) or 0
    generation.model_bytes = max(generation.written_bytes, mapped)
    devices = system.gpu.devices()
    generation.gpu_bytes = {one.device: max(0, one.allocated - on_gpus.get(one.device, 0)) for one in devices}
    generation.gpu_allocated = sum(one.allocated for one in devices) if devices else None
    generation.born, generation.began = system.clock(), system.wall_clock()
    generation.uses = generation.errors = 0
    generation.load_seconds, generation.stall_seconds = system.clock() - started, meter.longest
    return generation


def _load(guard: GuardContext[M]) -> Generation[M]:
    generation = guard.made(resolve(guard.options.load()), guard.system.random())
    if (model := generation.model) is None:
        raise Rejected("the loader returned None; return the model")
    if isinstance(model, GeneratorType):
        raise Rejected("the loader returned a generator; return the model instead of yielding it")
    # Of some models, such as a dict, no more is known than those that the guard has.
    if not is_plain_value(model) and (guard.state.has(model) or not guard.family.add(model)):
        raise Rejected(
            "the loader returned a model that it has returned before; make a new one at each call, without a cache"
        )
    return generation


def _prove(guard: GuardContext[M], generation: Generation[M]) -> None:
    """Validate and warm up. Guarded functions that this calls run on the new generation."""
    with guard.state.running_on(generation), call_context.stay():
        if guard.options.validate is not None:
            _validate(guard, generation, guard.options.validate)
        if guard.options.warmup is not None:
            resolve(guard.options.warmup(generation.model))
        if guard.options.swap.replay is not None and guard.recorded is not None:
            _replay(guard, generation, guard.recorded, guard.options.swap.replay)
    if generation.number == 1:
        _guard_options.check_gpu(guard.options.reload_on, guard.system.gpu, loaded=True)


def _validate(guard: GuardContext[M], generation: Generation[M], validate: Callable[..., object]) -> None:
    try:
        answer = _verdict(guard, generation, validate)
        rejected = answer is not None and not answer
    except Rejected:
        raise
    except BaseException as error:  # it runs in the guard's thread, so not even KeyboardInterrupt is the user's
        raise Rejected(f"validate raised {told(error)}") from error
    if rejected:
        raise Rejected(f"validate returned {shortened(answer)}")


def _verdict(guard: GuardContext[M], generation: Generation[M], validate: Callable[..., object]) -> object:
    if not guard.options.validates_both:
        return resolve(validate(generation.model))
    with _lent_current(guard) as old:
        return resolve(validate(generation.model, None if old is None else old.model))


def _replay(guard: GuardContext[M], generation: Generation[M], calls: RecordedCalls, rule: Replay) -> None:
    """Compare with the current model on recorded calls, when both are warm.

    Raises:
        Rejected: Too few answers agree, or they take too long.
    """
    from modelguard.lifecycle._replay import Side, compare  # here, because few guards need it

    running_on = guard.state.running_on
    with _lent_current(guard) as current:
        if current is None:
            return
        started = guard.system.clock()
        # Calls that the recorded ones make on the same guard are counted here, and not as traffic.
        shadow = Generation(current.number, current.model, born=current.born, began=current.began, jitter=0.0)
        found = compare(
            calls,
            rule,
            guard.system.clock,
            new=Side(generation.model, partial(running_on, generation)),
            current=Side(shadow.model, partial(running_on, shadow)),
            retired=lambda: current.retired,
        )
        objection = found.objection
        event = telemetry.ReplayFinished(
            guard=guard.name,
            generation=generation.number,
            version=generation.version,
            current=current.number,
            recorded=found.recorded,
            compared=found.compared,
            agreed=found.agreed,
            slowdown=found.slowdown,
            seconds=guard.system.clock() - started,
            accepted=objection is None,
        )
        telemetry.emit(event)
    if objection is not None:
        raise Rejected(f"replay: {objection}")


@contextmanager
def _lent_current(guard: GuardContext[M]) -> Iterator[Generation[M] | None]:
    """Keep the current generation from being released in the block, and a replica's from calls; None if there is none.

    Raises:
        Rejected: A call has kept the replica to itself for too long.
    """
    # If there is none, the call that waits for this load has the replica.
    with nullcontext(enter_result=True) if guard.state.current is None else guard.options.alone() as alone:
        if not alone:
            raise Rejected("the current model, which it is compared with, was in use for all of drain_timeout")
        current = guard.state.hold_current()
        try:
            yield current
        finally:
            if current is not None:
                current.leases.pop()
                if current.retired and guard.state.retired_call_ended(current):
                    release_and_report(guard, current, drain_seconds=None)  # closed meanwhile, and given up


def _within(
    timeout: float | None,
    work: Callable[[], T],
    *,
    start_thread: Callable[[Callable[[], None], str], None],
    name: str,
    when_late: Callable[[T], None],
) -> T:
    """Run ``work``; with a timeout, in a thread of its own, since a thread cannot be stopped but only left behind.

    Raises:
        Late: ``timeout`` seconds have passed. If the work ends after all, ``when_late`` disposes of its result.
    """
    if timeout is None:
        return work()
    outcome = waiting.start(work, name, start_thread)
    try:
        return outcome.result(timeout)
    except TimeoutError:
        if outcome.done():  # in this very moment, or it raised a TimeoutError of its own
            return outcome.result()

    def dispose(late: Future[T]) -> None:
        if late.exception() is None:
            when_late(late.result())

    outcome.add_done_callback(dispose)
    raise Late


class StallMeter:
    """The longest time in which no other Python thread could run: how long a call beside the load stood still."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self._thread = start_thread(self._beat, "modelguard-stall-meter")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _beat(self) -> None:
        last = time.perf_counter()
        while not self._over.wait(_BEAT):
            now = time.perf_counter()
            self.longest = max(self.longest, now - last - _BEAT)
            last = now
        self.longest = max(self.longest, time.perf_counter() - last - _BEAT)


# Inline mode, for tests: no policies, reloads or background work; models load in the thread that needs them.


_lock = threading.RLock()


class Inline(NamedTuple):
    """The step of who waits for a model: it is loaded by that caller."""

    guard: GuardContext[Any]

    def block(self) -> None:
        with _lock:
            if self._is_needed():
                self._install(resolve(self.guard.options.load()))

    async def suspend(self) -> None:
        if self._is_needed():
            made = self.guard.options.load()
            loaded = await made if asyncio.iscoroutine(made) else made
            with _lock:
                if self._is_needed():  # another task may have been faster
                    self._install(loaded)

    def _is_needed(self) -> bool:
        self.guard.state.raise_if_closed()
        return self.guard.state.current is None

    def _install(self, loaded: object) -> None:
        state, number = self.guard.state, self.guard.state.generations
        installed = state.install(LoadJob((), urgent=True), self.guard.made(loaded, 0.0), discardable=False)
        _tell([] if installed is None else installed[1])
        call_context.after_inline(partial(state.forget_current, number))  # the next use loads in the normal way


def _tell(waiting: Iterable[Future[Outcome]]) -> None:
    for future in waiting:
        future.set_result(None)


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


def free(
    guard: GuardContext[Any], generation: Generation[Any], error: BaseException, *, retry: bool
) -> tuple[Reason, ...]:
    """Free the GPU memory that a call which ran out of it has left, and report it.

    The traceback keeps its lines, and loses the local variables of the calls that have ended.

    Returns:
        Why the model must be replaced; empty if it need not.
    """
    gpu = guard.system.gpu
    before = use_of(gpu)
    free_after(gpu, error)
    after = use_of(gpu)
    event = telemetry.GpuOutOfMemory(
        guard=guard.name,
        generation=generation.number,
        reserved_before=None if before is None else before.reserved,
        reserved_after=None if after is None else after.reserved,
        allocated=None if after is None else after.allocated,
        retry=retry,
    )
    telemetry.emit(event)
    # Other calls on it have tensors of their own, which say nothing.
    if after is None or generation.gpu_allocated is None or len(generation.leases) > 1:
        return ()
    left = after.allocated - generation.gpu_allocated
    if left <= _STAYS * sum(one.total for one in gpu.devices()):
        return ()
    return (Reason("gpu_out_of_memory", f"a call ran out of GPU memory and left {_units.format_bytes(left)} there"),)


#: A moment counts as quiet when no call has run for this many seconds. Calls of one burst follow each other faster.
QUIET = 0.05
_POLL = 0.01

#: While it loads, a model takes more memory than afterwards: ja_ginza peaks at 1.17 times its size.
PEAK = 1.25

#: Reloads for errors, and their second attempts.
_FOR_ERRORS = frozenset({"errors", "retry"})
#: Seconds between two readings of the free memory while a load waits: each opens a few files, about 0.1 ms.
_ROOM_INTERVAL = 0.25


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
        lent: Says whether a reload that has the turn waits for this one.
    """

    def __init__(self, guard: GuardContext[M], readings: Readings, job: LoadJob, *, lent: Callable[[], bool]) -> None:
        self._guard = guard
        self._readings = readings
        self._job = job
        self._lent = lent
        self._fruitless_reloads = 0
        self._host_lock: HostLockHeld = "none"
        self._deferred, self._growth_meanwhile = 0.0, 0
        self._pause: int | None = None  # the uses of the model at its beginning; None if there is none to wait for

    def run(self) -> None:
        """Do all of it. Never raises: failures go to those who wait, and to an event."""
        self._job.threads.add(threading.get_ident())
        try:
            if self._job.unloads:
                self._unload()
            elif self._job.replaces:
                self._replace()
            else:
                self._load_and_install("first")
        except BaseException as error:  # noqa: BLE001 - a fault of ours must not leave callers waiting forever
            self.fail(LoadFailed, told(error), error)

    def fail(self, kind: type[LoadFailed], reason: str, cause: BaseException | None) -> None:
        """End in failure: tell those who wait, and set the time of the next attempt."""
        if self._job.cancelled:  # nobody waits for it
            return
        state, system = self._guard.state, self._guard.system
        attempt = state.failures + 1
        wait = self._guard.options.loading.backoff.seconds(attempt, system.random())
        current = state.number
        failure = kind(self._guard.name, reason, attempt=attempt, retry_after=wait, current=current)
        failure.__cause__ = cause
        try:
            again = None if state.closed else wait
            event = telemetry.LoadErrored(
                guard=self._guard.name, attempt=attempt, error=failure.reason, retry_after=again, current=current
            )
            telemetry.emit(event)
        except BaseException:  # noqa: BLE001 - whatever becomes of the event, those who wait must not wait for ever
            with suppress(BaseException):
                logger.exception("modelguard could not report that the load of guard %r failed", self._guard.name)
        state.fail(self._job, failure, retry_at=system.clock() + wait)

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
        system, lock = self._guard.system, self._guard.system.host_lock
        while True:  # without the turn while it waits for a pause: nobody else could load meanwhile
            self._wait_for_quiet()
            with lock.held(sleep=system.sleep, clock=system.clock, cancelled=self._needs_no_turn) as held:
                if held in ("timed_out", "cancelled") or not self._pause_is_over():
                    self._host_lock, self._job.has_turn = held, True
                    self._replace_in_turn()
                    return

    def _replace_in_turn(self) -> None:
        guard, system = self._guard, self._guard.system
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
            old, since = guard.state.retire_current(self._job), system.clock()
            if old is not None:
                drain_and_release(guard, old)
        self._load_and_install(swap, since, at_load)
        if old is not None and old.dropped and guard.state.current is not None:
            guard.state.left_behind.record(system.recent_private(), one_copy=swap == "drain_first")

    # Before the load

    def _is_cancelled(self) -> bool:
        """Whether the reload is not wanted any more: closed, rolled back, or held back before a policy's began."""
        state = self._guard.state
        return state.closed or self._job.cancelled or state.holds_back(self._job)

    def _needs_no_turn(self) -> bool:
        return self._is_cancelled() or self._lent()

    def _wait_for_quiet(self) -> None:
        """Wait for the beginning of a pause between calls, at most ``defer`` in all, and while there is memory to wait.

        The beginning, because that leaves most of the pause: a load that starts late in a pause meets the next calls.
        """
        guard, system, job = self._guard, self._guard.system, self._job
        started = since = system.clock()
        before: int | None = None
        uses, call_ended, read = None, job.after_call or self._pause is not None, -math.inf
        self._pause, left = None, guard.options.swap.defer - self._deferred
        while not job.urgent and not self._is_cancelled():
            generation, now = guard.state.current, system.clock()
            if generation is None or now - started >= left:
                break
            if now - read >= _ROOM_INTERVAL:
                if self._memory_is_short():
                    break
                read = now
            if generation.leases or generation.uses != uses:
                call_ended = call_ended or uses is not None
                uses, since = generation.uses, now
            elif call_ended and now - since >= QUIET:
                self._pause = uses
                break
            before = system.private() if before is None else before  # of many processes, that takes 0.1 s of CPU time
            system.sleep(_POLL)
        self._deferred += system.clock() - started
        self._growth_meanwhile += 0 if before is None else max(0, system.private() - before)

    def _pause_is_over(self) -> bool:
        """Whether calls have come in the pause that was found, as while others had the turn."""
        current = self._guard.state.current
        return self._pause is not None and current is not None and bool(current.leases or current.uses != self._pause)

    def _memory_is_short(self) -> bool:
        """Whether this reload is to free memory, and there is less than a second copy would need."""
        if not self._protects_memory():
            return False
        room = self._guard.system.headroom()
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
        size, room = guard.state.model_bytes, guard.system.headroom()
        chosen: Swap
        if guard.options.swap.mode == "auto":
            need = int(PEAK * (size or 0))
            if room is not None and room < need and guard.state.previous is not None:
                self._release_previous()
                room = guard.system.headroom()
            chosen = "load_first" if room is None or room >= need else "drain_first"
            free = "an unknown amount" if room is None else _units.format_bytes(room)
            why = f"a second copy needs {_units.format_bytes(need)} while it loads, and {free} is free"
            if chosen == "load_first" and (too_small := self._gpu_too_small()) is not None:
                chosen, why = "drain_first", too_small
            if chosen == "load_first" and guard.state.left_behind.is_too_much(size or 0):
                chosen, crept = "drain_first", _units.format_bytes(guard.state.left_behind.amount)
                why = f"earlier reloads left {crept} behind in all, which it returns"
        else:
            chosen, why = guard.options.swap.mode, "it is fixed for this guard"
        telemetry.emit(telemetry.SwapChosen(guard=guard.name, swap=chosen, why=why, model_bytes=size, headroom=room))
        return chosen

    def _gpu_too_small(self) -> str | None:
        """Why a GPU cannot hold a second copy; None if all can, or if it is not known."""
        current = self._guard.state.current
        for device, size in {} if current is None else current.gpu_bytes.items():
            need, room = int(PEAK * size), self._guard.system.gpu.room(device)
            if size and room is not None and room < need:
                free = _units.format_bytes(room)
                return f"a second copy needs {_units.format_bytes(need)} on GPU {device}, and {free} is free"
        return None

    # Load and install

    def _load_and_install(self, swap: Swap, since: float | None = None, at_load: AtLoad | None = None) -> None:
        """Make a generation and install it. One that became stale while it loaded is made once more.

        Args:
            swap: How it takes the place of another one.
            since: When calls began to wait for it; None if they do not.
            at_load: What its source is, if that is known already.
        """
        guard = self._guard
        for discardable in (True, False):
            if not guard.state.begin(self._job):
                return
            at_load = self._readings.before_load() if at_load is None else at_load
            generation = self._make()
            if generation is None:
                return
            generation.fruitless_reloads = self._fruitless_reloads
            waited = 0.0 if since is None else guard.system.clock() - since
            keep = guard.options.swap.keep_previous and swap == "load_first" and not self._protects_memory()
            installed = guard.state.install(self._job, generation, discardable=discardable, keep=keep)
            if installed is not None:
                over, waiting = installed
                try:  # who waits for a load finds it shown, logged and counted
                    guard.shown.show(generation.version)
                    self._readings.loaded(generation, at_load, replaced=swap != "first")
                    self._emit_finished(generation, swap, waited)
                finally:
                    _tell(waiting)
                for old in over:
                    drain_and_release(guard, old)
                return
            at_load = None
            cancelled: DiscardCause = "rolled_back" if self._job.cancelled else "stale"
            self._discard(generation, "closed" if guard.state.closed else cancelled)

    def _make(self) -> Generation[M] | None:
        """Make a generation; None if there is none, which has then been reported."""
        guard = self._guard
        event = telemetry.LoadStarted(
            guard=guard.name,
            generation=guard.state.generations + 1,
            reasons=self._job.reasons,
            deferred_seconds=self._deferred,
            deferred_growth=self._growth_meanwhile,
            host_lock=self._host_lock,
        )
        telemetry.emit(event)
        before = guard.system.private()
        try:
            return self._in_time(before)
        except Late:
            timeout = guard.options.loading.timeout
            self.fail(
                LoadTimeout, f"the loader did not end within Loading(timeout={timeout:g}) and was abandoned", None
            )
        except Unwanted:
            ended_by: DiscardCause = "rolled_back" if self._job.cancelled else "closed"
            telemetry.emit(telemetry.LoadDiscarded(guard=guard.name, cause=ended_by))
        except Rejected as rejection:
            free_after(guard.system.gpu, rejection.__cause__ or rejection)
            self.fail(ModelRejected, str(rejection), rejection.__cause__)
        except BaseException as error:  # noqa: BLE001 - whatever a loader raises is the load's failure
            shortage = self._shortage(before) if isinstance(error, MemoryError) else ""  # while the load still holds it
            free_after(guard.system.gpu, error)  # who waits keeps the error, and would keep half a model
            cause = named(guard.name, guard.system.gpu, error)
            said = "; ".join(filter(None, (text_of(cause), shortage)))
            self.fail(LoadFailed, f"{type(cause).__name__}: {said}", cause)
        return None

    def _in_time(self, before: int) -> Generation[M]:
        """Load, validate and warm up a model within the timeout of the load.

        Args:
            before: The private memory in bytes before it.

        Raises:
            Late: That has passed. The loader's thread is left behind.
            Rejected: The loader returned no model, or ``validate`` rejected it.
            Unwanted: The loader has ended it.
            BaseException: Whatever the loader or the warm-up raised.
        """
        guard = self._guard
        with guard.system.returning():  # ends here with the wait for a loader that does not end
            return _within(
                guard.options.loading.timeout,
                partial(self._work, before),
                start_thread=guard.system.start_thread,
                name=f"modelguard-loader-{guard.name}",
                when_late=lambda generation: self._discard(generation, "late"),
            )

    def _work(self, before: int) -> Generation[M]:
        me, threads = threading.get_ident(), self._job.threads
        added = me not in threads  # else it is the thread of the job, which goes on
        threads.add(me)
        try:
            return _load_and_measure(self._guard, before, self._discard)
        finally:
            _effect.end_openmp_pool()  # this thread may be kept, and idle for minutes
            if added:
                threads.discard(me)  # the next thread may get the same identity

    def _shortage(self, before: int) -> str:
        """What a load that ran out of memory had taken, and what was left."""
        system = self._guard.system
        private, room = system.private(), system.headroom()
        free = "an unknown amount" if room is None else _units.format_bytes(room)
        limits = "".join(f"; {_units.format_bytes(most)} is the most that {what}" for what, most in _ulimits())
        return (
            f"the load had taken {_units.format_bytes(max(0, private - before))}; this process has "
            f"{_units.format_bytes(private)} of private memory, and {free} is free{limits}"
        )

    def _emit_finished(self, loaded: Generation[M], swap: Swap, waited: float) -> None:
        gpu = use_of(self._guard.system.gpu)
        event = telemetry.LoadFinished(
            guard=self._guard.name,
            generation=loaded.number,
            version=loaded.version,
            reasons=self._job.reasons,
            seconds=loaded.load_seconds,
            stall_seconds=loaded.stall_seconds,
            model_bytes=loaded.model_bytes,
            swap=swap,
            waited_seconds=waited,
            gpu_allocated=None if gpu is None else gpu.allocated,
            gpu_reserved=None if gpu is None else gpu.reserved,
        )
        telemetry.emit(event)

    def _discard(self, generation: Generation[M], cause: DiscardCause) -> None:
        release(self._guard, generation)
        event = telemetry.LoadDiscarded(guard=self._guard.name, cause=cause, version=generation.version)
        telemetry.emit(event)
