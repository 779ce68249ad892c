"""``assert_no_growth``: memory must not grow with the number of calls."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

from modelguard import _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import runtime
from modelguard.testing import _reading

__all__ = ["assert_no_growth"]

#: Calls of the rounds, in multiples of the first. A leak grows by as much per call in the last as in the first.
_ROUNDS = (1, 2, 4, 8)
#: A round that grows by less than this share of the one before, per call, is no leak but the end of something.
_PERSISTS = 0.5
#: What names types and lines in a failure.
_NAMED = 5
_LINES = 3
_PAGE = 4096
_MB = 10**6
_MALLOC = "given out by malloc"


@dataclass
class _Meter:
    """One way to read memory.

    Attributes:
        name: For the message.
        read: Takes a reading.
        unit: "bytes" or "blocks".
        noise: Growth of a round up to here is not looked at.
        per_call: The same for each call of the round: what grows less is not a leak of every call.
        grown: Growth of each round.
    """

    name: str
    read: Callable[[], int]
    unit: str
    noise: int
    per_call: float
    grown: list[int] = field(default_factory=list)

    def persists(self, calls: list[int]) -> bool:
        """Whether the latest round grew as the ones before it did, call for call."""
        latest = self.grown[-1]
        if latest <= max(self.noise, self.per_call * calls[-1]):
            return False
        if len(self.grown) == 1:
            return True
        return latest / calls[-1] >= _PERSISTS * self.grown[-2] / calls[-2]

    def __str__(self) -> str:
        told = (_units.format_bytes(one) if self.unit == "bytes" else f"{one:,} blocks" for one in self.grown)
        return f"{self.name}: +{', +'.join(told)}"


def assert_no_growth(
    fn: Callable[[Any], object], inputs: Iterable[Any], *, calls: int = 100, tolerance: int | str = 32
) -> None:
    """Fail if memory grows with the calls of ``fn``, and say what grew.

    After ``calls`` calls to warm up, it is called ``calls``, then 2, 4 and 8 times as often; garbage is collected and
    free memory given back before each reading. A leak grows in every round, by about as much per call in each. What
    stops growing, as a cache that has filled up, passes, mostly after the first round. Read are: what ``malloc`` has
    given out (glibc from 2.33, jemalloc), the blocks of Python's own allocator, and private memory, which alone sees
    mappings and other allocators, and only what is far larger than a page per call.

    The whole process is read: other threads that allocate meanwhile are part of it.

    Args:
        fn: Called with one input; may be ``async`` (each round then runs on an event loop of its own). A lazy result
            is read to its end.
        inputs: What to call it with, over and over; an iterator is read on and never repeated, so a generator can
            give ever new inputs, which is what models like spaCy's grow by.
        calls: Calls of the first round.
        tolerance: Bytes that each call may leave, such as ``"1 kB"``. Default: 32 bytes, or half of one Python block.

    Raises:
        AssertionError: Memory grew in every round.
        InvalidOption: ``fn`` cannot be called, ``inputs`` is empty or too short an iterator, or a number makes no
            sense.
        WouldDeadlock: ``fn`` is async, and an event loop runs here.
    """
    __tracebackhide__ = True
    if not callable(fn):
        raise InvalidOption("fn", fn, why="must be a function", fix="Pass the function itself.")
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise InvalidOption("calls", calls, why="must be a whole number of at least 1", fix="Write calls=100.")
    spare = _units.size(tolerance, "tolerance")
    feed = _feed(inputs)
    run = _runner(fn)
    run(_take(feed, calls))
    meters = _meters(spare)
    rounds: list[int] = []
    suspects = meters
    for factor in _ROUNDS:
        before = _readings(suspects)
        run(_take(feed, calls * factor))  # drawn here, because an input that is kept is growth
        after = _readings(suspects)
        rounds.append(calls * factor)
        for meter, was, now in zip(suspects, before, after, strict=True):
            meter.grown.append(now - was)
        suspects = [meter for meter in suspects if meter.persists(rounds)]
        if not suspects:
            return
    raise AssertionError(_message(fn, suspects, rounds, _what_grew(lambda: run(list(islice(feed, calls))), calls)))


def _meters(spare: int) -> list[_Meter]:
    found = [
        _Meter("private memory", _reading.trimmed, "bytes", noise=2 * _MB, per_call=max(spare, _PAGE / 4)),
    ]
    if runtime.in_use() is not None:
        found.insert(0, _Meter(_MALLOC, lambda: runtime.in_use() or 0, "bytes", _PAGE, spare))
    if sys.getallocatedblocks():  # none with PYTHONMALLOC=malloc, where they are malloc's own
        # A block is 512 bytes at most and some 64 on average, so that is what one is taken for.
        blocks = max(0.5, spare / 64 - 0.5)
        found.insert(0, _Meter("Python's own blocks", sys.getallocatedblocks, "blocks", 32, blocks))
    return found


def _readings(meters: list[_Meter]) -> list[int]:
    gc.collect()
    return [meter.read() for meter in meters]


# The calls


def _feed(inputs: Iterable[Any]) -> Iterator[Any]:
    try:
        reading = iter(inputs)
    except TypeError:
        why = f"must be a collection of inputs, not {_units.kind_of(inputs)}"
        raise InvalidOption("inputs", inputs, why=why, fix="Give a list of inputs, or a generator.") from None
    if reading is inputs:
        return reading
    kept = list(reading)
    if not kept:
        raise InvalidOption("inputs", inputs, why="it is empty", fix="Give at least one input.")
    return cycle(kept)


def _take(feed: Iterator[Any], count: int) -> list[Any]:
    taken = list(islice(feed, count))
    if len(taken) < count:
        total = 1 + sum(_ROUNDS) + 1
        why = "it ended too early to tell growth from a warm-up"
        raise InvalidOption("inputs", feed, why=why, fix=f"Give an endless generator, or {total} times `calls` inputs.")
    return taken


def _runner(fn: Callable[[Any], object]) -> Callable[[list[Any]], None]:
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004

        def run_async(given: list[Any]) -> None:
            from modelguard.lifecycle._deadlocks import raise_on_event_loop

            raise_on_event_loop(
                "assert_no_growth", "assert_no_growth", "await asyncio.to_thread(assert_no_growth, fn, inputs)"
            )

            async def all_of_them() -> None:
                for one in given:
                    await fn(one)  # type: ignore[misc]

            asyncio.run(all_of_them())

        return run_async

    def run(given: list[Any]) -> None:
        for one in given:
            result = fn(one)
            if hasattr(type(result), "__next__"):
                deque(result, maxlen=0)  # type: ignore[call-overload]
            del result

    return run


# The message


def _what_grew(run: Callable[[], None], calls: int) -> list[str]:
    """Two more rounds, watched closely: for types of objects, and for lines that allocate."""
    gc.collect()
    types = _types()
    run()
    gc.collect()
    types = _types() - types
    told = [f"+{count:,} {name}" for name, count in types.most_common(_NAMED) if count >= calls // 2]
    found = [f"objects: {', '.join(told)}"] if told else []
    found += [f"allocated at {place}" for place in _places(run, calls)[:_LINES]]
    return found or ["neither Python's objects nor its allocations: memory of a native library"]


def _places(run: Callable[[], None], calls: int) -> list[str]:
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        gc.collect()
        before = tracemalloc.take_snapshot()
        run()
        gc.collect()
        after = tracemalloc.take_snapshot()
    finally:
        if not tracing:
            tracemalloc.stop()
    own = [tracemalloc.Filter(inclusive=False, filename_pattern=file) for file in (tracemalloc.__file__, __file__)]
    changes = after.filter_traces(own).compare_to(before.filter_traces(own), "lineno")
    return [
        f"{one.traceback[0].filename}:{one.traceback[0].lineno}: +{_units.format_bytes(one.size_diff)}"
        f" in {one.count_diff:,} blocks"
        for one in changes
        if one.count_diff > 0 and one.size_diff >= calls
    ]


def _types() -> Counter[str]:
    objects = gc.get_objects()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}".removeprefix("builtins.") for one in objects)


def _message(fn: Callable[..., object], suspects: list[_Meter], rounds: list[int], grew: list[str]) -> str:
    name = getattr(fn, "__qualname__", None) or repr(fn)
    worst = next((meter for meter in suspects if meter.name == _MALLOC), suspects[0])
    each = worst.grown[-1] / rounds[-1]
    amount = _units.format_bytes(round(each)) if worst.unit == "bytes" else f"{each:.1f} blocks"
    counts = ", ".join(f"{count:,}" for count in rounds)
    return "\n".join(
        [
            f"{name}() grows with its calls, by {amount} each; in rounds of {counts} calls:",
            *(f"  {meter}" for meter in suspects),
            f"what grew in {rounds[0]:,} more calls:",
            *(f"  {line}" for line in grew),
        ]
    )
