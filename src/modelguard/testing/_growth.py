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
from modelguard.testing import _bounded_caches, _reading

__all__ = ["assert_no_growth"]

#: Calls of the rounds, in multiples of the first. A leak grows by as much per call in the last round as in the first.
_ROUNDS = (1, 2, 4, 8)
#: If memory grew in all of them: one more round, which a cache that filled up in the last one passes, and more as long
#: as a cache is known to be filling. 32 rounds of 8 times `calls` fill a cache of 25,000 entries with the default.
_CONFIRMING = 8
_MOST_CONFIRMING = 32
#: If a round grows by less than this share of the one before, per call, it is not a leak: the growth is ending.
_PERSISTS = 0.5
#: How many types of objects, and lines of code, a failure lists.
_NAMED = 5
_LINES = 3
_PAGE = 4096
_MB = 10**6
_MALLOC = "allocated by malloc"


@dataclass
class _Meter:
    """One way to read memory.

    Attributes:
        name: Its name in the message.
        read: Takes a reading.
        unit: "bytes" or "blocks".
        noise: Growth of a round up to this much is ignored.
        per_call: Growth per call up to this much is ignored too: it does not come from every call.
        grown: Growth of each round.
    """

    name: str
    read: Callable[[], int]
    unit: str
    noise: int
    per_call: float
    grown: list[int] = field(default_factory=list)

    def persists(self, calls: list[int]) -> bool:
        """Whether the latest round grew by as much per call as the rounds before."""
        latest = self.grown[-1]
        if not calls[-1] or latest <= max(self.noise, self.per_call * calls[-1]):
            return False
        if len(self.grown) == 1:
            return True
        return latest / calls[-1] >= _PERSISTS * self.grown[-2] / calls[-2]

    def __str__(self) -> str:
        amounts = (_units.format_bytes(grown) if self.unit == "bytes" else f"{grown:,} blocks" for grown in self.grown)
        return f"{self.name}: +{', +'.join(amounts)}"


def assert_no_growth(
    fn: Callable[[Any], object], inputs: Iterable[Any], *, calls: int = 100, tolerance: int | str = 32
) -> None:
    """Fail if memory grows with the calls of ``fn``, and report what grew.

    After ``calls`` calls to warm up, it is called ``calls`` times, then 2, 4 and 8 times as often. Before each reading,
    garbage is collected and free memory is returned to the system. A leak grows in every round, by about the same
    amount per call. Growth that stops is accepted, usually after the first round. If it does not stop, there is one
    more round, and up to 31 others while an ``lru_cache`` or a cache of ``cachetools`` is filling: these stop growing
    when they are full.

    The readings are: what ``malloc`` has allocated (glibc since 2.33, jemalloc), the blocks of Python's own allocator,
    and private memory. Only private memory includes mappings and other allocators, but it only shows growth of much
    more than a page per call.

    The readings are of the whole process, so they include what other threads allocate in the meantime.

    Args:
        fn: Called with one input; may be ``async`` (each round then runs on its own event loop). A lazy result is
            consumed.
        inputs: The inputs, which are repeated; an iterator is never repeated, so a generator can provide new inputs for
            every call, which make models like spaCy's grow.
        calls: Calls of the first round.
        tolerance: Bytes that each call may leave, such as ``"1 kB"``. Default: 32 bytes, or half of one Python block.

    Raises:
        AssertionError: Memory grew in every round.
        InvalidOption: ``fn`` is not callable, ``inputs`` is empty or an iterator that ends too early, or a number is
            invalid.
        WouldDeadlock: ``fn`` is async, and an event loop is running here.
    """
    __tracebackhide__ = True
    if not callable(fn):
        raise InvalidOption("fn", fn, why="must be a function", fix="Pass the function itself.")
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise InvalidOption("calls", calls, why="must be a whole number of at least 1", fix="Write calls=100.")
    spare = _units.size(tolerance, "tolerance")
    feed = _feed(inputs)
    run = _runner(fn)
    run(list(_take(feed, calls)))
    meters = _meters(spare)
    rounds: list[int] = []
    suspects = meters
    for factor in _ROUNDS:
        suspects = _one_round(run, _take(feed, calls * factor), suspects, rounds)
        if not suspects:
            return
    suspects, filling = _confirmed(run, feed, suspects, rounds)
    if suspects:
        grew = [f"{cache} grows; this may be all" for cache in filling]
        grew += _what_grew(lambda: run(list(islice(feed, calls))), calls)
        raise AssertionError(_message(fn, suspects, rounds, grew))


def _one_round(
    run: Callable[[list[Any]], None], inputs: Iterable[Any], suspects: list[_Meter], rounds: list[int]
) -> list[_Meter]:
    """Call the function once per input, and return the meters that have grown in this round too."""
    before = _readings(suspects)
    given = list(inputs)  # read after the first reading, because an input that the function keeps is growth
    run(given)
    rounds.append(len(given))
    del given
    for meter, was, now in zip(suspects, before, _readings(suspects), strict=True):
        meter.grown.append(now - was)
    return [meter for meter in suspects if meter.persists(rounds)]


def _confirmed(
    run: Callable[[list[Any]], None], feed: Iterator[Any], suspects: list[_Meter], rounds: list[int]
) -> tuple[list[_Meter], list[_bounded_caches.Fill]]:
    """Tell a leak from a cache that fills up; returns what still grows, and the caches that do."""
    calls = rounds[0] * _CONFIRMING
    filling: list[_bounded_caches.Fill] = []
    for _ in range(_MOST_CONFIRMING):
        before = _bounded_caches.bounded_caches()
        still = _one_round(run, islice(feed, calls), suspects, rounds)
        if rounds[-1] < calls:  # an iterator has ended: too few calls to judge by
            rounds.pop()
            for meter in suspects:
                meter.grown.pop()
            break
        suspects = still
        filling = _bounded_caches.growing(before, _bounded_caches.bounded_caches())
        if not suspects or not filling:
            break
    return suspects, filling


def _meters(spare: int) -> list[_Meter]:
    found = [
        _Meter("private memory", _reading.trimmed, "bytes", noise=2 * _MB, per_call=max(spare, _PAGE / 4)),
    ]
    if runtime.in_use() is not None:
        found.insert(0, _Meter(_MALLOC, lambda: runtime.in_use() or 0, "bytes", _PAGE, spare))
    if sys.getallocatedblocks():  # none with PYTHONMALLOC=malloc, where malloc serves all objects
        # A block has at most 512 bytes, and about 64 on average, which is used here.
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
        raise InvalidOption("inputs", inputs, why="must not be empty", fix="Give at least one input.")
    return cycle(kept)


def _take(feed: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield so many inputs."""
    taken = 0
    for taken, given in enumerate(islice(feed, count), start=1):  # noqa: B007 - the last number is needed
        yield given
    if taken < count:
        total = 1 + sum(_ROUNDS) + 1
        why = "has too few inputs to distinguish growth from a warm-up"
        raise InvalidOption("inputs", feed, why=why, fix=f"Give an endless generator, or {total} times `calls` inputs.")


def _runner(fn: Callable[[Any], object]) -> Callable[[list[Any]], None]:
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004

        def run_async(given: list[Any]) -> None:
            from modelguard.lifecycle._deadlocks import raise_on_event_loop

            raise_on_event_loop(
                "assert_no_growth", "assert_no_growth", "await asyncio.to_thread(assert_no_growth, fn, inputs)"
            )

            async def all_of_them() -> None:
                for item in given:
                    await fn(item)  # type: ignore[misc]

            asyncio.run(all_of_them())

        return run_async

    def run(given: list[Any]) -> None:
        for item in given:
            result = fn(item)
            if hasattr(type(result), "__next__"):
                deque(result, maxlen=0)  # type: ignore[call-overload]
            del result

    return run


# The message


def _what_grew(run: Callable[[], None], calls: int) -> list[str]:
    """Run two more rounds, to find the types of objects that grow, and the lines that allocate."""
    gc.collect()
    types = _types()
    run()
    gc.collect()
    types = _types() - types
    grown = [f"+{count:,} {name}" for name, count in types.most_common(_NAMED) if count >= calls // 2]
    found = [f"objects: {', '.join(grown)}"] if grown else []
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
        f"{change.traceback[0].filename}:{change.traceback[0].lineno}: +{_units.format_bytes(change.size_diff)}"
        f" in {change.count_diff:,} blocks"
        for change in changes
        if change.count_diff > 0 and change.size_diff >= calls
    ]


def _types() -> Counter[str]:
    kinds = map(type, gc.get_objects())
    return Counter(f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.") for kind in kinds)


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
