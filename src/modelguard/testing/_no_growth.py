"""``assert_no_growth``: memory must not grow with the number of calls."""

import asyncio
import functools
import gc
import inspect
import math
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from modelguard import _units
from modelguard.environment import _allocator
from modelguard.errors import InvalidOption, ModelGuardWarning, NotSupported
from modelguard.facts import _memory
from modelguard.facts._growth_judge import Judgement, judge
from modelguard.lifecycle import _release, system

# Caches with an upper limit, which grow until they are full and then stop: ``functools.lru_cache`` and cachetools.


_LRU = type(functools.lru_cache(lambda: None))


class Fill(NamedTuple):
    """How full a cache is."""

    name: str
    used: float
    limit: float

    def __str__(self) -> str:
        return f"{self.name} (filled to {self.used:,} of {self.limit:,})"


def bounded_caches(among: Iterable[Any]) -> dict[int, Fill]:
    found = {}
    cachetools = sys.modules.get("cachetools")
    for candidate in among:
        if type(candidate) is _LRU:
            info = candidate.cache_info()
            if info.maxsize is not None:
                name = getattr(candidate, "__qualname__", "a function")
                found[id(candidate)] = Fill(f"the lru_cache of {name}()", info.currsize, info.maxsize)
        elif cachetools is not None and issubclass(type(candidate), cachetools.Cache):  # torch's `__class__` may warn
            found[id(candidate)] = Fill(f"a {type(candidate).__qualname__}", candidate.currsize, candidate.maxsize)
    return found


def growing(before: dict[int, Fill], after: dict[int, Fill]) -> list[Fill]:
    return [fill for key, fill in after.items() if key in before and fill.used > before[key].used]


# Private memory, as the marker and ``assert_no_growth`` measure it.


def trimmed() -> int:
    with suppress(NotSupported):  # free memory then counts as growth, but only once and not in each round
        _allocator.trim(private=int)  # what it returned is not asked for: a reading takes 8 ms with torch imported
    return _memory.private(fresh=True)


#: Of this many times ``calls``, with a reading after each, consists what is judged. The judge needs 9 readings.
_ROUNDS = 15
#: What is undecided is driven anew for this many times as long, twice.
_LONGER = 2
#: So many rounds in all. They fill a cache of 25,000 entries with the default.
_MOST_ROUNDS = 270
_PAGE = 4096
_MALLOC = "allocated by malloc"

_Run = Callable[[list[Any]], None]


@dataclass(frozen=True)
class _Meter:
    """One way to read memory. Growth up to its noise is ignored, and what does not come from every call."""

    name: str
    read: Callable[[], int]
    unit: str
    noise: int
    per_call: float

    def told(self, grown: float) -> str:
        return _units.format_bytes(round(grown)) if self.unit == "bytes" else f"{grown:,.1f} blocks"


def assert_no_growth(
    fn: Callable[[Any], object], inputs: Iterable[Any], *, calls: int = 100, tolerance: int | str = 32
) -> None:
    """Fail if memory grows with the calls of ``fn``, and report what grew.

    After ``calls`` calls to warm up, it is called 15 times as often, and memory is read 16 times. Before each reading,
    garbage is collected and free memory is returned to the system. These readings are judged as ``modelguard
    diagnose`` judges its own: what rises in one step or two, or ends, is not growth. If that is undecided, it goes on
    for twice as long, and once more; what is undecided then passes, with a warning. What grows is measured once more,
    and as long as an ``lru_cache`` or a cache of ``cachetools`` is filling, for 270 times ``calls`` in all: these stop
    growing when they are full.

    The readings are: what ``malloc`` has allocated (glibc since 2.33, jemalloc), the blocks of Python's own allocator,
    and private memory. Only private memory includes mappings and other allocators, but it only shows growth of much
    more than a page per call.

    The readings are of the whole process, so they include what other threads allocate in the meantime.

    Args:
        fn: Called with one input; may be ``async`` (each round then runs on its own event loop). A lazy result is
            consumed.
        inputs: The inputs, which are repeated; an iterator is never repeated, so a generator can provide new inputs for
            every call, which make models like spaCy's grow.
        calls: Calls between two readings.
        tolerance: Bytes that each call may leave, such as ``"1 kB"``. Default: 32 bytes, or half of one Python block.

    Raises:
        AssertionError: Memory grows with the calls.
        InvalidOption: ``fn`` is not callable, or returns a coroutine or an asynchronous generator without being
            ``async``; ``inputs`` is empty or an iterator that ends too early, or a number is invalid.
        WouldDeadlock: ``fn`` is async, and an event loop is running here.
    """
    __tracebackhide__ = True
    _units.function(fn, "fn", "one input", fix="Pass the function itself.")
    _units.whole_number(calls, "calls", fix="Write calls=100.")
    spare = _units.size(tolerance, "tolerance")
    feed = _feed(inputs)
    run = _runner(fn)
    meters = _meters(spare)
    try:
        run(_take(feed, calls))
        with _only_new_objects() as older:
            drive = functools.partial(_drive, run, feed, calls, meters, older)
            stretch = drive(rounds=_ROUNDS)
            with suppress(_InputsEnd):
                stretch = _decided(stretch, older, drive)
            if stretch.growing:
                grew = [f"{cache} grows; this may be all" for cache in stretch.filling]
                grew += _what_grew(lambda: run(list(islice(feed, calls))), calls)
                raise AssertionError(_message(fn, stretch, grew))
    except _InputsEnd:
        why = "has too few inputs to distinguish growth from a warm-up"
        fix = f"Give an endless generator, or {1 + _ROUNDS} times `calls` inputs."
        raise InvalidOption("inputs", inputs, why=why, fix=fix) from None
    for meter, found in stretch.judged:
        if found.verdict == "undecided":
            more = f"give about {math.ceil(found.more)} times as many `calls`"
            warnings.warn(f"{meter.name}: {found.reason}; to decide it, {more}", ModelGuardWarning, stacklevel=2)


class _InputsEnd(Exception):
    pass


class _Older(NamedTuple):
    """What was there before the calls that are judged: caches with a limit that the collector passes over."""

    caches: list[object]
    thaw: Callable[[], None]


@contextmanager
def _only_new_objects() -> Iterator[_Older]:
    """Have the collector look at objects that are made from now on alone, until growth is found, or a model is dropped.

    With torch and spaCy imported it would take 150 ms at each of up to 270 readings. Who has frozen objects keeps them.
    """
    gc.collect()
    if gc.get_freeze_count():
        yield _Older([], lambda: None)
        return
    objects = gc.get_objects()
    found = bounded_caches(objects)
    older = _Older([one for one in objects if id(one) in found], gc.unfreeze)
    del objects
    gc.freeze()
    _release.thaw = older.thaw
    try:
        yield older
    finally:
        _release.thaw = None
        older.thaw()


class _Stretch(NamedTuple):
    """Calls that are judged together."""

    calls: int
    judged: list[tuple[_Meter, Judgement]]
    filling: list[Fill]

    @property
    def growing(self) -> list[tuple[_Meter, Judgement]]:
        return [(meter, found) for meter, found in self.judged if found.verdict == "grows"]

    @property
    def is_decided(self) -> bool:
        return not self.filling if self.growing else all(found.verdict == "steady" for _, found in self.judged)


def _drive(run: _Run, feed: Iterator[Any], calls: int, meters: list[_Meter], older: _Older, *, rounds: int) -> _Stretch:
    caches = bounded_caches([*older.caches, *gc.get_objects()])
    made = range(0, (rounds + 1) * calls, calls)
    readings = [array("q", bytes(8 * len(made))) for _ in meters]  # made at once: what is kept would be growth
    for number, _ in enumerate(made):
        if number:
            run(_take(feed, calls))
        gc.collect()
        for meter, sizes in zip(meters, readings, strict=True):
            sizes[number] = meter.read()
    filling = growing(caches, bounded_caches([*older.caches, *gc.get_objects()]))
    judged = [
        (meter, judge(made, sizes, least=meter.noise + meter.per_call * made[-1]))
        for meter, sizes in zip(meters, readings, strict=True)
    ]
    return _Stretch(made[-1], judged, filling)


def _decided(stretch: _Stretch, older: _Older, drive: Callable[..., _Stretch]) -> _Stretch:
    """The stretch that tells growth from noise, and a leak from what fills up; the last one if none does.

    Growth has to be there in two of them: the first may be the rise of a sawtooth.
    """
    left, length, longest, grew = _MOST_ROUNDS - _ROUNDS, _ROUNDS, _LONGER * _LONGER * _ROUNDS, False
    while not stretch.is_decided or (stretch.growing and not grew):
        grew = bool(stretch.growing)
        if not grew:
            length *= _LONGER
        left -= length
        if left < 0 or length > longest:
            break
        if grew and not stretch.filling:
            older.thaw()  # it may be what new objects have replaced
        stretch = drive(rounds=length)
    return stretch


def _meters(spare: int) -> list[_Meter]:
    found = [_Meter("private memory", trimmed, "bytes", noise=2_000_000, per_call=max(spare, _PAGE / 4))]
    if system.in_use() is not None:
        found.insert(0, _Meter(_MALLOC, lambda: system.in_use() or 0, "bytes", _PAGE, spare))
    if sys.getallocatedblocks():  # none with PYTHONMALLOC=malloc, where malloc serves all objects
        # A block has at most 512 bytes, and about 64 on average, which is used here.
        blocks = max(0.5, spare / 64 - 0.5)
        found.insert(0, _Meter("Python's own blocks", sys.getallocatedblocks, "blocks", 32, blocks))
    return found


# The calls


def _feed(inputs: Iterable[Any]) -> Iterator[Any]:
    try:
        reading = iter(inputs)
    except TypeError:
        why = f"must be a collection of inputs, not {_units.kind_of(inputs)}"
        raise InvalidOption("inputs", inputs, why=why, fix="Give a list of inputs, or a generator.") from None
    if reading is inputs:
        return reading
    again = tuple(reading) if isinstance(inputs, Sized) else inputs  # what has no length may be endless
    if not any(True for _ in again):
        raise InvalidOption("inputs", inputs, why="must not be empty", fix="Give at least one input.")
    return chain.from_iterable(repeat(again))


def _take(feed: Iterator[Any], count: int) -> list[Any]:
    taken = list(islice(feed, count))
    if len(taken) < count:
        raise _InputsEnd
    return taken


def _runner(fn: Callable[[Any], object]) -> _Run:
    if _units.function_kind(fn) == "coroutine":

        def run_async(given: list[Any]) -> None:
            from modelguard.runtime.waiting import raise_on_event_loop

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
            if inspect.iscoroutine(result) or inspect.isasyncgen(result):
                if inspect.iscoroutine(result):
                    result.close()
                why = f"returned {_units.kind_of(result)}, which would not be run"
                fix = "Write async def run(item): ... around it, and pass that."
                raise InvalidOption("fn", fn, why=why, fix=fix)
            if hasattr(type(result), "__next__"):
                deque(result, maxlen=0)  # type: ignore[call-overload]
            del result

    return run


# The message


def _what_grew(run: Callable[[], None], calls: int) -> list[str]:
    """The types of what more calls leave behind, and the lines that allocate it, as a diagnosis names them."""
    from modelguard.diagnosis import _census, _growth_causes  # takes 0.2 s, and only a failure needs it
    from modelguard.diagnosis._counts import kept_by_line

    gc.collect()
    before = _census.look()[1]
    run()
    gc.collect()
    more = {kind: number - before.get(kind, 0) for kind, number in _census.look()[1].items()}
    types = {kind: number for kind, number in more.items() if number >= calls // 2}

    def run_again() -> int:
        run()
        return calls

    kept = kept_by_line(run_again)
    every = (kept["traced"] | kept["native"]).items()
    lines = {line: size for line, size in every if not (0 < size < 1 or line.startswith(__file__))}
    found = [f"objects: {_growth_causes.kinds(types)}"] if types else []
    found += [f"allocated at {_growth_causes.places(lines)}"] if lines else []
    return found or ["neither Python's objects nor its allocations: memory of a native library"]


def _message(fn: Callable[..., object], stretch: _Stretch, grew: list[str]) -> str:
    name = getattr(fn, "__qualname__", None) or repr(fn)
    calls = stretch.calls
    worst, found = next((one for one in stretch.growing if one[0].name == _MALLOC), stretch.growing[0])
    lines = [f"{name}() grows with its calls, by {worst.told(found.growth / calls)} each; in {calls:,} calls:"]
    for meter, found in stretch.growing:
        growth, low, high = map(meter.told, (found.growth, found.low, found.high))
        lines.append(f"  {meter.name}: +{growth} ({low} to {high})")
    lines.append(f"what grew in {calls // _ROUNDS:,} more calls:")
    return "\n".join([*lines, *(f"  {line}" for line in grew)])


# The marker ``modelguard_memory``: the check of its argument, and its memory reading.

#: Bytes that any test may leave behind, such as an allocator's arena or a code cache.
_SMALLEST = 1_000_000

_WRITE = "Write @pytest.mark.modelguard_memory('50 MB')."


def fault(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    if options or len(arguments) != 1:
        given = ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())])
        return f"modelguard_memory({given}): takes exactly one argument, a size. {_WRITE}"
    try:
        limit = _units.size(arguments[0], "modelguard_memory")
    except InvalidOption as error:
        return f"{error} {_WRITE}"
    if limit < _SMALLEST:
        why = "is too small: allocators request memory in pieces of up to a megabyte, which any test may leave behind"
        return f"modelguard_memory({arguments[0]!r}): {why}. Give '1 MB' or more, or use assert_no_growth()."
    return None


#: A dropped guard with a traceback took three; a program that makes garbage all the time would never end.
_COLLECTIONS = 5


def settled_memory() -> int:
    """Private memory in bytes, without garbage and without free memory that the allocator keeps."""
    # pytest does this only later: the frames of a failed test would be freed during the next test.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    for _ in range(_COLLECTIONS):  # what finalizers let go of, only the next one finds
        if not gc.collect():
            break
    return trimmed()
