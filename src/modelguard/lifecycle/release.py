"""The end of a generation, and the proof of it."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from modelguard import telemetry
from modelguard.lifecycle import adapting, loading

if TYPE_CHECKING:
    from modelguard.lifecycle.core import Core
    from modelguard.lifecycle.generation import Generation
    from modelguard.lifecycle.runtime import Runtime
    from modelguard.lifecycle.settings import Settings

M = TypeVar("M")

#: A release that leaves this share of the model's size more behind than the best one did calls for a collection.
#: ja_ginza dies by reference count and yet leaves 2 MB of cyclic garbage a load, which would add up.
CREEP = 0.05

#: Bytes that private memory may move by while other calls run, which tell nothing of the model. MiniLM, whose weights
#: are a mapped file, has 10 MB of private memory, and readings beside its calls differ by 9.
NOISE = 16 * 2**20

#: How many holders of a model that will not die are named.
MAX_HOLDERS = 5


def see_off(core: Core[M], old: Generation[M], *, settings: Settings[M], runtime: Runtime) -> None:
    """Wait for a retired generation's calls and release it, or abandon it to them when ``drain_timeout`` is over."""
    started = runtime.clock()
    remaining = core.drain(old, settings.drain_timeout)
    if remaining:
        telemetry.emit(
            telemetry.GenerationAbandoned(
                guard=core.name, generation=old.number, in_flight=remaining, drain_timeout=settings.drain_timeout
            )
        )
        return
    bury(core, old, settings=settings, runtime=runtime, drain_seconds=runtime.clock() - started)


def bury(
    core: Core[M], old: Generation[M], *, settings: Settings[M], runtime: Runtime, drain_seconds: float | None
) -> None:
    """Release a generation on which no call runs any more, and tell what came of it."""
    event = None
    try:
        event = release(core, old, unload=settings.unload, runtime=runtime, drain_seconds=drain_seconds)
    except Exception as error:  # noqa: BLE001 - the new generation serves well, whatever the old one's end is like
        telemetry.emit(
            telemetry.CallbackErrored(guard=core.name, callback="release", error=f"{type(error).__name__}: {error}")
        )
    core.released(old, event)
    if event is not None:
        telemetry.emit(event)


def release(
    core: Core[M],
    generation: Generation[M],
    *,
    unload: Callable[[M], object] | None,
    runtime: Runtime,
    drain_seconds: float | None = 0.0,
) -> telemetry.GenerationReleased:
    """Unload and drop a generation's model, and give its memory back to the system.

    In this order: the ``unload`` hook, the drop, ``gc.collect()`` only where the drop did not suffice (a collection
    stalls every thread, about 80 ms for 1.5 million objects), the library's own caches, the allocator's. The drop
    did not suffice if the model is still alive, or if less memory came back than the model took, or than came back
    from earlier ones.
    """
    started, before = runtime.clock(), runtime.private()
    model = core.take(generation)
    error = _run_unload(unload, model)
    adapter = adapting.find(model)
    watch = _watch(model)
    # A loader that imports its libraries makes its first model look as large as they are; its next one tells.
    successor = core.serving
    expected = min(generation.model_bytes, successor.model_bytes) if successor is not None else generation.model_bytes
    del model

    collected = False
    alive = None if watch is None else watch() is not None
    if alive is not False:
        gc.collect()
        collected = True
        alive = None if watch is None else watch() is not None
    trimmed, after = _give_back(adapter, runtime)
    left_behind = 0 if core.floor is None else after - core.floor
    missing = expected - (before - after)
    if not collected and (missing > max(expected / 2, NOISE) or left_behind > max(expected * CREEP, NOISE)):
        # The model itself died by reference count, and yet memory is held: by cycles inside it, most likely.
        gc.collect()
        collected = True
        trimmed, after = _give_back(adapter, runtime)
    return telemetry.GenerationReleased(
        guard=core.name,
        generation=generation.number,
        bytes_before=before,
        bytes_after=after,
        alive=alive,
        holders=() if watch is None or not alive else holders(watch),
        collected=collected,
        trim=trimmed,
        seconds=runtime.clock() - started,
        drain_seconds=drain_seconds,
        error=error,
    )


def _run_unload(unload: Callable[[M], object] | None, model: M) -> str | None:
    if unload is None:
        return None
    try:
        loading.finished(unload(model))
    except BaseException as error:  # noqa: BLE001 - the release goes on whatever the hook does, and the event tells
        return f"{type(error).__name__}: {error}"
    return None


def _give_back(adapter: adapting.Adapter, runtime: Runtime) -> tuple[str, int]:
    adapter.released()
    return runtime.trim(), runtime.private()


def _watch(model: object) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(model)
    except TypeError:  # dict, list, tuple, ...
        return None


def holders(watch: weakref.ref[Any]) -> tuple[str, ...]:
    """Say in words who refers to an object, at most five of them."""
    target = watch()
    if target is None:
        return ()
    found: list[str] = []
    # A plain loop: a comprehension's or generator's own hold on `target` would be found as well.
    for referrer in gc.get_referrers(target):
        words = _describe(referrer, target)
        if words not in found:
            found.append(words)
        if len(found) == MAX_HOLDERS:
            break
    return tuple(found)


_SUSPENDED = (
    (types.GeneratorType, "gi_code", "gi_frame"),
    (types.CoroutineType, "cr_code", "cr_frame"),
    (types.AsyncGeneratorType, "ag_code", "ag_frame"),
)


def _describe(referrer: Any, target: object) -> str:
    try:
        return _in_words(referrer, target)
    except Exception:  # noqa: BLE001 - a referrer may be anything, with a repr or attributes that raise
        return f"a {type(referrer).__qualname__}"


def _in_words(referrer: Any, target: object) -> str:
    call = _describe_call(referrer)
    if call is not None:
        return call
    if isinstance(referrer, types.CellType):
        return "a closure's variable"
    if isinstance(referrer, types.MethodType):
        return f"the bound method {referrer.__qualname__}"
    if isinstance(referrer, dict):
        return _describe_dict(referrer, target)
    attributes = getattr(referrer, "__dict__", None)
    if isinstance(attributes, dict):
        for name, value in list(attributes.items()):
            if value is target:
                return f"attribute {name!r} of a {type(referrer).__module__}.{type(referrer).__qualname__}"
    return f"a {type(referrer).__qualname__}" + (
        f" of {len(referrer)}" if isinstance(referrer, list | tuple | set) else ""
    )


def _describe_call(referrer: Any) -> str | None:
    if isinstance(referrer, types.FrameType):  # of a call that runs, the garbage collector knows nothing
        return f"a traceback, through an ended call of {_place(referrer.f_code, referrer)}"
    for kind, code, frame in _SUSPENDED:
        if isinstance(referrer, kind):
            return f"a suspended call of {_place(getattr(referrer, code), getattr(referrer, frame))}"
    return None


def _place(code: types.CodeType, frame: types.FrameType | None) -> str:
    line = code.co_firstlineno if frame is None else frame.f_lineno
    return f"{code.co_qualname} ({code.co_filename}:{line})"


def _describe_dict(referrer: dict[Any, Any], target: object) -> str:
    key = next((repr(name) for name, value in list(referrer.items()) if value is target), "?")
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", None) is referrer:
            return f"the global {key} of module {module.__name__}"
    return f"key {key} of a dict"
