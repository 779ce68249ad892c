"""Making one generation: load, validate and warm up a model, in time, and measure what that took."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from modelguard import telemetry
from modelguard.environment import _effect
from modelguard.lifecycle import _adapters, _guard_options
from modelguard.lifecycle._generation import Generation, LoadJob
from modelguard.lifecycle._guard_options import Unpacked, unpacked
from modelguard.lifecycle._release import release_and_report
from modelguard.lifecycle._state import GuardContext
from modelguard.runtime import own_thread
from modelguard.runtime.background import start_thread
from modelguard.runtime.waiting import resolve

if TYPE_CHECKING:
    from modelguard.lifecycle._guard_options import Replay
    from modelguard.lifecycle._recorded_calls import RecordedCalls
    from modelguard.telemetry import DiscardCause

M = TypeVar("M")
T = TypeVar("T")

#: Seconds between two turns of the stall meter. Python's own switch interval is 5 ms.
_BEAT = 0.005


@dataclass
class Made(Generic[M]):
    """A model that was made.

    Attributes:
        generation: The model, validated and warm.
        seconds: Loading, validation and warm-up together.
        stall: The longest time, in seconds, in which no other Python thread could run.
    """

    generation: Generation[M]
    seconds: float
    stall: float


class Late(Exception):
    """The work was not done in time. It goes on in its thread, and its result goes to ``when_late``."""


class Rejected(Exception):
    """The model was loaded but is not accepted."""


#: Releases a generation that was made and is not used.
Discard = Callable[[Generation[M], "DiscardCause"], None]


def make(guard: GuardContext[M], job: LoadJob, discard: Discard[M]) -> Made[M]:
    """Load, validate and warm up a model within ``load_timeout``.

    Args:
        guard: Whose model.
        job: The load that it is made for.
        discard: Called with a generation that was rejected, or came too late.

    Raises:
        Late: ``load_timeout`` has passed. The loader's thread is left behind.
        Rejected: The loader returned no model, or ``validate`` rejected it.
        BaseException: Whatever the loader or the warm-up raised.
    """

    def work() -> Made[M]:
        job.threads.add(threading.get_ident())
        try:
            return _make(guard, discard)
        finally:
            _effect.end_openmp_pool()  # this thread may be kept, and idle for minutes
            job.threads.discard(threading.get_ident())  # the next thread may get the same identity

    with guard.runtime.returning():  # ends here with the wait for a loader that does not end
        return _within(
            guard.options.load_timeout,
            work,
            start_thread=guard.runtime.start_thread,
            name=f"modelguard-loader-{guard.name}",
            when_late=lambda made: discard(made.generation, "late"),
        )


def _make(guard: GuardContext[M], discard: Discard[M]) -> Made[M]:
    runtime = guard.runtime
    before, handed_out_before, started = runtime.private(), runtime.handed_out(), runtime.clock()
    on_gpus = {one.device: one.allocated for one in runtime.gpu.devices()}
    with StallMeter() as meter:
        generation = _load(guard)
        try:
            _prove(guard, generation)
        except BaseException:
            discard(generation, "rejected")
            raise
        runtime.try_trim()  # what only the load needed: 30 to 60 MB for ja_ginza
    # A load that reuses free memory makes the process grow by less than the model, but all of it is handed out.
    growth, handed_out = runtime.private() - before, runtime.handed_out()
    taken = 0 if handed_out is None or handed_out_before is None else handed_out - handed_out_before
    generation.written_bytes = max(0, growth, taken)
    mapped = _adapters.find(generation.model).size(generation.model) or 0
    generation.model_bytes = max(generation.written_bytes, mapped)
    devices = runtime.gpu.devices()
    generation.gpu_bytes = {one.device: max(0, one.allocated - on_gpus.get(one.device, 0)) for one in devices}
    generation.gpu_allocated = sum(one.allocated for one in devices) if devices else None
    generation.born = runtime.clock()
    generation.uses = generation.errors = 0
    generation.load_seconds = runtime.clock() - started
    return Made(generation, seconds=generation.load_seconds, stall=meter.longest)


def _load(guard: GuardContext[M]) -> Generation[M]:
    model, version = unpacked(resolve(guard.options.load()))
    if model is None:
        raise Rejected("the loader returned None; return the model")
    if isinstance(model, GeneratorType):
        raise Rejected("the loader is a generator function; return the model instead of yielding it")
    if guard.state.knows(model):
        raise Rejected(
            "the loader returned the model that it should replace; make a new one at each call, without a cache"
        )
    family = guard.options.family
    if family is not None and not family.add(model):
        raise Rejected(
            "the loader returned a model that it has returned before; make a new one at each call, without a cache"
        )
    number = guard.state.generations + 1
    runtime = guard.runtime
    born, began = runtime.clock(), runtime.wall_clock()
    return Generation(number, model, version=version, born=born, began=began, jitter=runtime.random())


def _prove(guard: GuardContext[M], generation: Generation[M]) -> None:
    """Validate and warm up. Guarded functions that this calls run on the new generation."""
    with guard.state.running_on(generation), own_thread.stay():
        if guard.options.validate is not None:
            _validate(guard, generation)
        if guard.options.warmup is not None:
            resolve(guard.options.warmup(generation.model))
        if guard.options.swap.replay is not None and guard.recorded is not None:
            _replay(guard, generation, guard.recorded, guard.options.swap.replay)
    if generation.number == 1:
        _guard_options.check_gpu(guard.options.reload_on, guard.runtime.gpu, loaded=True)


def _validate(guard: GuardContext[M], generation: Generation[M]) -> None:
    try:
        answer = _verdict(guard, generation)
        rejected = answer is not None and not answer
    except Exception as error:
        raise Rejected(f"validate raised {type(error).__name__}: {error}") from error
    if rejected:
        raise Rejected(f"validate returned {answer!r}")


def _verdict(guard: GuardContext[M], generation: Generation[M]) -> object:
    validate = guard.options.validate
    assert validate is not None  # noqa: S101 - the caller has looked
    if not guard.options.validates_both:
        return resolve(validate(generation.model))
    with _lent_current(guard) as old:
        return resolve(validate(generation.model, None if old is None else old.model))


def _replay(guard: GuardContext[M], generation: Generation[M], calls: RecordedCalls, rule: Replay) -> None:
    """Compare with the current model on recorded calls, when both are warm.

    Raises:
        Rejected: Too few answers agree, or they take too long.
    """
    from modelguard.lifecycle._replaying import compare  # here, because few guards need it

    with _lent_current(guard) as current:
        if current is None:
            return
        started = guard.runtime.clock()
        found = compare(guard, calls, rule, new=generation, current=current)
        objection = found.objection
        telemetry.emit(
            telemetry.ReplayFinished(
                guard=guard.name,
                generation=generation.number,
                version=generation.version,
                current=current.number,
                recorded=found.recorded,
                compared=found.compared,
                agreed=found.agreed,
                slowdown=found.slowdown,
                seconds=guard.runtime.clock() - started,
                accepted=objection is None,
            )
        )
    if objection is not None:
        raise Rejected(f"replay: {objection}")


@contextmanager
def _lent_current(guard: GuardContext[M]) -> Iterator[Generation[M] | None]:
    """Keep the current generation from being released in the block; None if there is none."""
    current = None
    try:
        with guard.state.lent_current() as current:
            yield current
    finally:
        if current is not None and current.retired and guard.state.retired_call_ended(current):
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
    outcome: Future[T] = Future()
    lock = threading.Lock()
    left_behind = False

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            outcome.set_exception(error)
            return
        with lock:
            if not left_behind:
                outcome.set_result(result)
                return
        when_late(result)

    start_thread(run, name)
    try:
        return outcome.result(timeout)
    except TimeoutError:
        with lock:
            if outcome.done():  # it ended in this very moment, or raised a TimeoutError of its own
                return outcome.result()
            left_behind = True
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


_active = False
_lock = threading.RLock()
_undo: list[Callable[[], object]] = []


@contextmanager
def inline() -> Iterator[None]:
    """Run every guard of this process inline inside the block.

    A guard without a model calls its loader in the thread that needs the model, and the loader's own error is raised;
    there is no warm-up, no validation and no policy. At the end, models that were loaded inline are dropped, so that
    the next use loads them in the normal way.
    """
    global _active
    _active = True
    try:
        yield
    finally:
        _active = False
        while _undo:
            _undo.pop()()


def active() -> bool:
    return _active


def load(guard: GuardContext[M]) -> None:
    with _lock:
        guard.state.raise_if_closed()
        if guard.state.current is None:
            _install(guard, unpacked(resolve(guard.options.load())))


async def aload(guard: GuardContext[M]) -> None:
    """:func:`load` on the running event loop."""
    guard.state.raise_if_closed()
    if guard.state.current is None:
        made: Any = guard.options.load()
        loaded = unpacked(await made if asyncio.iscoroutine(made) else made)
        with _lock:
            if guard.state.current is None:  # another task may have been faster
                _install(guard, loaded)


def unload(guard: GuardContext[Any]) -> None:
    with _lock:
        guard.state.retire_until_next_use(if_unused=False)


def _install(guard: GuardContext[Any], loaded: Unpacked) -> None:
    state, number = guard.state, guard.state.generations
    runtime = guard.runtime
    born, began = runtime.clock(), runtime.wall_clock()
    generation = Generation(number + 1, loaded.model, version=loaded.version, born=born, began=began, jitter=0.0)
    state.install(LoadJob((), urgent=True), generation, discardable=False)
    _undo.append(lambda: state.forget_current(number))
