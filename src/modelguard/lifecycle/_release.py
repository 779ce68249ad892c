"""The end of a generation: wait for its calls, release its model, and prove that the memory came back."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from modelguard import _units, telemetry
from modelguard.errors import told
from modelguard.facts._gpu import GpuUse, use_of
from modelguard.lifecycle._state import Generation, GuardContext
from modelguard.runtime.waiting import resolve

if TYPE_CHECKING:
    from modelguard.lifecycle.system import System, Trim


M = TypeVar("M")

#: A release that leaves this share of the model's size more behind than the best release did calls for a collection.
#: ja_ginza dies by reference count and still leaves 2 MB of cyclic garbage per load, which would add up.
LEFT_SHARE = 0.05

#: The lowest reference count of an immortal object (PEP 683), whose memory no release returns.
IMMORTAL = 1 << 31

#: Bytes by which private memory may change while other calls run, which say nothing about the model. MiniLM, whose
#: weights are a mapped file, has 10 MB of private memory, and readings beside its calls differ by 9 MB.
NOISE = 16 * 2**20

#: How often a collection is tried beside another one, and how many seconds apart: half a second in all.
_TRIES, _PAUSE = 50, 0.01

#: How often, with the same pauses, it is looked whether a census has ended: it may take 10 s of CPU time.
_COUNTED = 3000

#: How often, with the same pauses, a model is looked at before it is reported as alive.
_LOOKS = 5

#: Thaws what ``assert_no_growth`` has frozen, which a model that is dropped meanwhile is part of; None while none runs.
thaw: Callable[[], None] | None = None


def drain_and_release(guard: GuardContext[M], old: Generation[M], timeout: float | None = None) -> None:
    """Wait for a retired generation's calls and release it; after its drain timeout, abandon it to them."""
    started = guard.system.clock()
    timeout = guard.options.swap.drain_timeout if timeout is None else timeout
    remaining = guard.state.drain(old, timeout)
    if remaining:
        event = telemetry.GenerationAbandoned(
            guard=guard.name, generation=old.number, version=old.version, in_flight=remaining, drain_timeout=timeout
        )
        telemetry.emit(event)
        return
    release_and_report(guard, old, drain_seconds=guard.system.clock() - started)


def release_and_report(guard: GuardContext[M], old: Generation[M], *, drain_seconds: float | None) -> None:
    """Release a generation on which no call runs any more, and emit what came of it."""
    event = None
    try:
        event = release(guard, old, drain_seconds=drain_seconds)
    except Exception as error:  # noqa: BLE001 - the new generation works, however the old one's release ends
        telemetry.emit(telemetry.CallbackErrored(guard=guard.name, callback="release", error=told(error)))
    guard.state.record_release(old, event)
    guard.shown.show(guard.state.version)
    if event is None:
        return
    current = guard.state.current
    if current is not None and current.gpu_allocated is not None and event.gpu_allocated is not None:
        current.gpu_allocated = min(current.gpu_allocated, event.gpu_allocated)
    telemetry.emit(event)


def release(
    guard: GuardContext[M], generation: Generation[M], *, drain_seconds: float | None = 0.0
) -> telemetry.GenerationReleased:
    """Unload and drop a generation's model, and return its memory to the system.

    In this order: the ``unload`` hook, the drop, ``gc.collect()`` only if the drop was not enough (a collection stalls
    every thread, about 80 ms for 1.5 million objects), torch's cache of GPU memory, the allocator's. The drop was not
    enough if the model is still alive, or if less memory came back than the model took, or than came back from earlier
    models.
    """
    with guard.system.returning():
        return _release(guard, generation, drain_seconds)


def _release(
    guard: GuardContext[M], generation: Generation[M], drain_seconds: float | None
) -> telemetry.GenerationReleased:
    system = guard.system
    started, before, gpu_before = system.clock(), system.recent_private(), use_of(system.gpu)
    handed_out = system.handed_out()
    model = generation.drop()
    error = unload(guard, model)
    watch, immortal = _watch(model), _is_immortal(model)
    del model

    collected = not immortal and (watch is None or watch() is not None)
    if collected:
        _collect(system)
    trim, after, gpu_after = _trim(system)
    if not (collected or immortal) and (
        _too_little_came_back(guard, generation, before, after) or _stays_on_gpu(generation, gpu_before, gpu_after)
    ):
        # The model itself died by reference count, but memory is still held: most likely by cycles inside it.
        _collect(system)
        collected = True
        trim, after, gpu_after = _trim(system)
    alive = None if watch is None else immortal or _lives_on(watch, system)
    return telemetry.GenerationReleased(
        guard=guard.name,
        generation=generation.number,
        version=generation.version,
        bytes_before=before,
        bytes_after=after,
        alive=alive,
        holders=() if watch is None or immortal or not alive else _holders_of(watch),
        collected=collected,
        trimmed_by=trim.allocator,
        trim_error=trim.error,
        seconds=system.clock() - started,
        drain_seconds=drain_seconds,
        error=error,
        in_use=system.in_use(),
        held=system.held(),
        immortal=immortal,
        gpu_reserved_before=None if gpu_before is None else gpu_before.reserved,
        gpu_reserved_after=None if gpu_after is None else gpu_after.reserved,
        gpu_allocated=None if gpu_after is None else gpu_after.allocated,
        kept=None if alive or immortal or trim.error else _why_kept(guard, generation, before - after, handed_out),
    )


def _collect(system: System) -> None:
    if thaw is not None:
        thaw()
    from modelguard.facts import _holders  # here: most models die by reference count

    for _ in range(_COUNTED):
        if not _holders.is_counting():
            break
        system.sleep(_PAUSE)
    for _ in range(_TRIES):
        before = _collections()
        gc.collect()
        if _collections() > before:
            return
        system.sleep(_PAUSE)  # another thread collects, and may have looked at the model before it was dropped


def _lives_on(watch: weakref.ref[Any], system: System) -> bool:
    for _ in range(_LOOKS):
        if watch() is None:
            return False
        system.sleep(_PAUSE)  # another thread that takes its figures, as for a status, lets it go at once
    return watch() is not None


def _collections() -> int:
    """How many collections of all objects there have been. Beside that of another thread ``gc.collect()`` is none."""
    return int(gc.get_stats()[-1]["collections"])


def _holders_of(watch: weakref.ref[Any]) -> tuple[str, ...]:
    from modelguard.facts import _holders  # here: few models live on

    return _holders.of_object(watch)


def _why_kept(
    guard: GuardContext[Any], generation: Generation[Any], returned: int, handed_out_before: int | None
) -> str | None:
    """Why much less has come back than the load took; None if enough has."""
    took = _expected(guard, generation)
    if took - returned <= max(took / 2, NOISE):
        return None
    if generation.pid != os.getpid():
        return "it was loaded before a fork, so other processes still use its pages"
    handed_out = guard.system.handed_out()
    back = None if handed_out is None or handed_out_before is None else handed_out_before - handed_out
    said = f"{_units.format_bytes(max(0, returned))} of {_units.format_bytes(took)} came back"
    if back is None:
        return f"{said}; the allocator does not say how much of it was freed"
    if took - back > max(took / 2, NOISE):
        return f"{said}: parts of it or libraries that it imported are in use, or as much was allocated meanwhile"
    return f"{said}: {_units.format_bytes(back)} were freed, but lie between blocks that are in use"


def _expected(guard: GuardContext[Any], generation: Generation[Any]) -> int:
    # A loader that imports its libraries makes its first model look as large as they are; the next model corrects that.
    successor = guard.state.current
    return generation.written_bytes if successor is None else min(generation.written_bytes, successor.written_bytes)


def _too_little_came_back(guard: GuardContext[M], generation: Generation[M], before: int, after: int) -> bool:
    state, expected = guard.state, _expected(guard, generation)
    left_behind = 0 if state.least_memory is None else after - state.least_memory
    missing = expected - (before - after)
    return missing > max(expected / 2, NOISE) or left_behind > max(expected * LEFT_SHARE, NOISE)


def _stays_on_gpu(generation: Generation[Any], before: GpuUse | None, after: GpuUse | None) -> bool:
    """Whether less than half of what the load had allocated on GPUs came back."""
    if before is None or after is None:
        return False
    taken = sum(generation.gpu_bytes.values())
    return taken - (before.allocated - after.allocated) > max(taken / 2, NOISE)


def unload(guard: GuardContext[M], model: M) -> str | None:
    """Call the ``unload`` hook, if there is one; returns its error as text."""
    if guard.options.unload is None:
        return None
    try:
        resolve(guard.options.unload(model))
    except BaseException as error:  # noqa: BLE001 - the release goes on whatever the hook does; the event reports it
        return told(error)
    return None


def _trim(system: System) -> tuple[Trim, int, GpuUse | None]:
    """What came of it, and what the process has from then on: private memory, and GPU memory."""
    system.gpu.empty_cache()
    return system.try_trim(), system.private(), use_of(system.gpu)


def _is_immortal(model: object) -> bool:
    # Without the GIL, functions, classes and modules have counts as high, and are released all the same.
    known: Callable[[object], bool] | None = getattr(sys, "_is_immortal", None)  # since 3.14
    return sys.getrefcount(model) >= IMMORTAL if known is None else known(model)


def _watch(model: object) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(model)
    except TypeError:  # dict, list, tuple, ...
        return None
