"""The program that drives a function in a process of its own and measures what grows. Started by :mod:`._diagnose`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import itertools
import json
import os
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from modelguard.diagnosis import _census
from modelguard.environment import _allocator, _memory, _proc
from modelguard.errors import ModelGuardError

__all__ = ["main"]

_READINGS = 24
#: Shares of the time: the warm-up, the readings; what is left is for the tests that tell causes apart.
_WARM, _DRIVE = 0.15, 0.55
_FEWEST_CALLS = 4
_CALIBRATING = 10_000
_UNCOUNTED = 10**9
#: How many times the time may be exceeded if calls are so slow that there are too few readings.
_MOST_TIMES = 3
#: Bytes. So much growth, in enough readings, is decided: more would only endanger the machine.
_ENOUGH, _ENOUGH_READINGS = 200_000_000, 10
#: Inputs that are looked at to find some of one shape, and calls of a run that is traced.
_SHAPES, _TRACED = 400, 300
_FRAMES = 1
_MOST_ERRORS = 5


class _Target:
    """The function, and the inputs that it is called with in turn."""

    def __init__(self, function: Callable[..., Any], inputs: Iterator[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        self._function = function
        self._inputs = inputs
        self._loop = asyncio.new_event_loop() if _is_async(function) else None
        self.failures = 0
        self.errors: dict[str, None] = {}
        self.calls = 0

    def next_input(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return next(self._inputs)

    def run(self, count: int, *, until: float, given: Callable[[], Any] | None = None) -> int:
        """Call it so many times, or until the time is up; returns how many calls were made."""
        take = given or self.next_input
        if self._loop is not None:
            return self._loop.run_until_complete(self._run_async(count, until, take))
        for done in range(count):
            self._call(take())
            if time.monotonic() > until:
                return done + 1
        return count

    async def _run_async(self, count: int, until: float, take: Callable[[], Any]) -> int:
        for done in range(count):
            item = take()
            try:
                await self._function(*item[0], **item[1])
            except Exception as error:  # noqa: BLE001 - failures are counted
                self._failed(error)
            self.calls += 1
            if time.monotonic() > until:
                return done + 1
        return count

    def _call(self, item: Any) -> None:
        self.calls += 1
        try:
            result = self._function(*item[0], **item[1])
            if hasattr(type(result), "__next__"):
                deque(result, maxlen=0)
        except Exception as error:  # noqa: BLE001 - failures are counted
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self.errors[type(error).__name__] = None


def main() -> None:
    """Drive what the first argument describes, and write lines of JSON to the file that it names."""
    config = json.loads(sys.argv[1])
    with Path(config["answer"]).open("a", encoding="utf-8") as stream:

        def say(**line: Any) -> None:
            stream.write(json.dumps(line) + "\n")
            stream.flush()

        try:
            _drive(config, say)
        except Exception as error:
            say(error=f"{type(error).__name__}", message=str(error) if isinstance(error, _TOLD) else "")
            raise
    os._exit(0)  # whatever threads the function has left


_TOLD = (ImportError, AttributeError, NameError, SyntaxError, ValueError, TypeError, ModelGuardError)


def _drive(config: dict[str, Any], say: Callable[..., None]) -> None:
    sys.path.insert(0, str(Path.cwd()))
    function = _load(config["target"])
    target = _Target(function, _inputs(config, function))
    began, seconds = time.monotonic(), float(config["seconds"])
    say(phase="warm-up")
    size = _warm_up(target, began + _WARM * seconds)
    target.failures, target.calls = 0, 0
    gc.collect()
    before, sizes = _census.count(), _census.cache_sizes()
    _trim()
    target.run(size, until=time.monotonic() + _WARM * seconds)
    free = _fallen(lambda: None)  # what calls always leave behind, without any growth
    target.run(size, until=time.monotonic() + _WARM * seconds)
    target.failures, target.calls = 0, 0
    calls, private, compiled = [0], [_memory.private(fresh=True)], _compiled()
    until = began + (_WARM + _DRIVE) * seconds
    latest = began + _MOST_TIMES * seconds
    while time.monotonic() < (until if len(calls) >= _ENOUGH_READINGS else latest):
        # By time and not by calls: calls may become slower as more is held.
        target.run(_UNCOUNTED, until=time.monotonic() + _DRIVE * seconds / _READINGS)
        calls.append(target.calls)
        private.append(_memory.private(fresh=True))
        say(phase="drive", calls=target.calls, private=private[-1], first=private[0])
        if len(calls) >= _ENOUGH_READINGS and private[-1] - private[0] > _ENOUGH:
            break
    measured: dict[str, Any] = {"calls": calls, "private": private, "failures": target.failures}
    measured |= {"errors": list(target.errors)[:_MOST_ERRORS], "before": before, "after": _census.count()}
    measured |= {"compiled": _compiled() - compiled, "libraries": [n for n in _census.LIBRARIES if n in sys.modules]}
    say(measured=measured)
    until = max(began + seconds, time.monotonic() + (1 - _WARM - _DRIVE) * seconds)
    say(phase="tests")
    measured |= _given_back(free, sizes)
    measured |= _rates(target, size, until)
    measured |= _traced(target, min(_TRACED, max(_FEWEST_CALLS, target.calls)), until)
    say(measured=measured, done=True)


def _load(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is not callable")
    function: Callable[..., Any] = found
    return function


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _inputs(config: dict[str, Any], function: Callable[..., Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    if config["generate"]:
        return (_as_arguments(each) for each in _load(config["generate"])())
    if config["inputs"]:
        given = [_as_arguments(each) for each in config["inputs"]]
        _require_fit(function, given[0])
        return itertools.cycle(given)
    _require_fit(function, ((), {}))
    return itertools.repeat(((), {}))


def _as_arguments(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A list or tuple is positional arguments, a dict is arguments by name, anything else the one argument."""
    if isinstance(given, dict):
        return (), given
    return (tuple(given), {}) if isinstance(given, list | tuple) else ((given,), {})


def _require_fit(function: Callable[..., Any], given: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    with contextlib.suppress(ValueError):  # functions of C have no signature
        inspect.signature(function).bind(*given[0], **given[1])


def _warm_up(target: _Target, until: float) -> int:
    """Call until the time is up; returns how many calls make up a reading."""
    count, began = 0, time.monotonic()
    while count < _FEWEST_CALLS or time.monotonic() < until:
        count += target.run(_FEWEST_CALLS, until=until)
    # The first calls may have loaded a model, so they say nothing of the later ones.
    share, began = (until - began) / _WARM * _DRIVE / _READINGS, time.monotonic()
    count = target.run(_CALIBRATING, until=began + share)
    return max(1, int(share * count / (time.monotonic() - began)))


def _trim() -> None:
    with contextlib.suppress(ModelGuardError):
        _allocator.trim()


def _fallen(act: Callable[[], object]) -> int:
    before = _memory.private(fresh=True)
    act()
    _trim()
    return max(0, before - _memory.private(fresh=True))


def _given_back(free: int, sizes: dict[int, int]) -> dict[str, Any]:
    """What a trim, a collection and empty caches give back; of a trim, what is more than at the start."""
    found: dict[str, Any] = {"trimmed": max(0, _fallen(lambda: None) - free)}
    freed: list[int] = []
    found["collected"] = _fallen(lambda: freed.append(gc.collect()))
    found["garbage"] = freed[0]
    # Iterated once: emptying one cache must not hide another.
    found["cleared"] = {name: _fallen(clear) for name, clear in list(_census.caches(sizes))}
    return found


def _rates(target: _Target, size: int, until: float) -> dict[str, Any]:
    """Growth per call with one input, with inputs of one shape, and with inputs that fail or do not."""
    share = max(0.0, (until - time.monotonic()) * 0.7)
    works, failing = _sorted_out(target, time.monotonic() + share / 4)
    share *= 3 / 4
    groups: dict[Any, list[Any]] = {}
    for item in works:
        groups.setdefault(_shape(item), []).append(item)
    alike = max(groups.values(), key=len, default=[])
    tries: dict[str, list[Any]] = {"repeats": works[:1]}
    if len(groups) > 1 and len(alike) > 1:
        tries["same_shape"] = alike
    if failing and works:
        tries |= {"failing": failing, "succeeding": works}
    end = time.monotonic()
    found: dict[str, Any] = {}
    for name, items in tries.items():
        end += share / len(tries)
        found[name] = _rate(target, size, items, end) if items else None
    return found


def _sorted_out(target: _Target, until: float) -> tuple[list[Any], list[Any]]:
    """New inputs that work, and some that fail."""
    works: list[Any] = []
    failing: list[Any] = []
    while len(works) + len(failing) < _SHAPES and (time.monotonic() < until or not works + failing):
        item, failures = target.next_input(), target.failures
        target.run(1, until=until, given=lambda item=item: item)  # type: ignore[misc]
        (failing if target.failures > failures else works).append(item)
    return works, failing


def _rate(target: _Target, size: int, items: list[Any], until: float) -> float | None:
    again = itertools.cycle(items)
    began = time.monotonic()
    target.run(size, until=(began + until) / 2, given=lambda: next(again))
    before, count = _memory.private(fresh=True), 0
    while time.monotonic() < until:
        count += target.run(size, until=until, given=lambda: next(again))
    return (_memory.private(fresh=True) - before) / count if count else None


def _shape(given: Any) -> Any:
    """Lengths and dimensions, without contents."""
    if hasattr(given, "shape"):
        return tuple(given.shape)
    if isinstance(given, str | bytes):
        return len(given)
    if isinstance(given, dict):
        return tuple((key, _shape(value)) for key, value in sorted(given.items()))
    return tuple(map(_shape, given)) if isinstance(given, list | tuple) else type(given).__name__


def _traced(target: _Target, count: int, until: float) -> dict[str, Any]:
    """What Python's allocators keep of each call, by line. Tracing slows calls down, so it comes last."""
    gc.collect()
    tracemalloc.start(_FRAMES)
    try:
        target.run(_FEWEST_CALLS, until=until)
        before = tracemalloc.take_snapshot()
        made = target.run(count, until=max(until, time.monotonic() + 1))
        gc.collect()
        changed = tracemalloc.take_snapshot().compare_to(before, "lineno")
    finally:
        tracemalloc.stop()
    grown = [line for line in changed if line.size_diff > 0 and line.traceback[0].filename != tracemalloc.__file__]
    lines = {f"{line.traceback[0].filename}:{line.traceback[0].lineno}": line.size_diff / made for line in grown[:20]}
    return {"traced": lines, "traced_calls": made}


def _compiled() -> int:
    """Written bytes of machine code without a file."""
    mappings = _proc.if_readable(_proc.smaps, None) or []
    own = [each for each in mappings if "x" in each.access and not each.is_file and not each.name.startswith("[v")]
    return sum(each.sizes.get("Private_Dirty", 0) for each in own)


if __name__ == "__main__":
    main()
