"""What was measured of a function's growth, and the report of it."""

import math
import operator
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, cast

from modelguard._units import format_bytes
from modelguard.diagnosis._counts import Growing, counted
from modelguard.facts._growth_judge import LEAST, Judgement, Verdict, judge
from modelguard.facts._holders import FROZEN_AT_START, Held

CauseName = Literal[
    "unbounded cache", "retention", "cycles", "tracebacks", "tasks", "queues", "threads", "ssl contexts",
    "metric labels", "autograd", "onednn plans", "spacy strings", "tokenizer caches", "arrow pool", "onnx runtime",
    "tensorflow", "cuda cache", "mappings", "connections", "databases", "worker processes", "python objects",
    "native memory",
]  # fmt: skip

# What remedies have done to growth, CPU time and latency, and which of them to use.


#: A remedy that leaves at most this share of the growth solves the problem; one that leaves more than the second share
#: does not help.
SOLVES, _HELPS = 0.2, 0.8
#: Smaller differences are noise: as shares of the growth without a remedy, and as multiples of CPU time and p99.
_STEPS = 0.05, 0.05, 0.1


class Spread(NamedTuple):
    """A figure over all rounds: the median, the lowest and the highest."""

    median: float
    low: float
    high: float


class Round(NamedTuple):
    """One run in a fresh process: its growth and CPU time per call, and why it cannot be told what it grows by."""

    growth: float
    cpu: float
    p99: float
    held: int
    undecided: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """A remedy that was tried.

    Attributes:
        name: The remedy.
        lines: What to write to have it.
        rounds: In how many fresh processes it was tried.
        growth: Bytes per 1,000 calls by which private memory grows with it.
        cpu: CPU time per call, as a multiple of that without it in the same round.
        p99: The same of the time that 99 of 100 calls do not exceed.
        held: Bytes of private memory at the end of a run.
        cpu_seconds: CPU seconds per call.
        p99_seconds: Seconds that 99 of 100 calls did not exceed.
        stopped: Why no more rounds were run; empty if all were.
        undecided: Why it cannot be told what memory grows by; empty if one of the rounds tells it.
        front: Whether it was not stopped, and no other is better in one of the three figures and as good in the others.
    """

    name: str
    lines: tuple[str, ...]
    rounds: int
    growth: Spread
    cpu: Spread
    p99: Spread
    held: int
    cpu_seconds: float = 0.0
    p99_seconds: float = 0.0
    stopped: str = ""
    undecided: str = ""
    front: bool = False


@dataclass(frozen=True, slots=True)
class Trials:
    """All remedies that were tried.

    Attributes:
        calls: The measured calls of each run.
        nothing: The function as it is: ``cpu`` and ``p99`` are 1; None if nothing could be tried.
        tried: The remedies.
        recommended: The name of the one to use; empty if none helps enough.
        left_out: Remedies that were not tried, each with the reason.
        needed: The time for all trials that is likely to decide what is undecided, such as ``"4m"``; empty if all is.
        contains: Whether the leak has to be mended in the program, and remedies only contain it until then.
    """

    calls: int
    nothing: Trial | None = None
    tried: tuple[Trial, ...] = ()
    recommended: str = ""
    left_out: tuple[str, ...] = ()
    needed: str = ""
    contains: bool = False


def trial(name: str, lines: Sequence[str], rounds: Sequence[tuple[Round, Round]], stopped: str = "") -> Trial:
    decided = [own for own, _ in rounds if not own.undecided]
    every = [own for own, _ in rounds]
    return Trial(
        name,
        tuple(lines),
        len(rounds),
        _spread(1000 * own.growth for own in decided or every),
        _spread(own.cpu / max(nothing.cpu, 1e-9) for own, nothing in rounds),
        _spread(own.p99 / max(nothing.p99, 1e-9) for own, nothing in rounds),
        int(statistics.median(own.held for own in every)),
        statistics.median(own.cpu for own in every),
        statistics.median(own.p99 for own in every),
        stopped,
        "" if decided else every[-1].undecided,
    )


def front(nothing: Trial, trials: Sequence[Trial]) -> set[str]:
    """The names of those on the Pareto front of growth, CPU time and latency; smaller differences do not count.

    What was stopped or is undecided is not on it, and keeps nothing off it.
    """
    figures = {one.name: _figures(nothing, one) for one in trials if not (one.stopped or one.undecided)}

    def is_dominated(own: tuple[int, ...]) -> bool:
        return any(other != own and all(map(operator.le, other, own)) for other in figures.values())

    return {name for name, own in figures.items() if not is_dominated(own)}


def recommend(nothing: Trial, trials: Sequence[Trial]) -> str:
    """The name of the remedy to use: on the front, the one that solves the problem at the least CPU time.

    If none solves it, the one with the least growth. If none helps, an empty name. Of two that are equal, the first.
    """
    names = front(nothing, trials)
    on_front = [one for one in trials if one.name in names]
    base = nothing.growth.median
    solving = [one for one in on_front if one.growth.median <= SOLVES * base]
    if solving:
        return min(solving, key=lambda one: _figures(nothing, one)[1]).name
    helping = [one for one in on_front if one.growth.median <= _HELPS * base]
    return min(helping, key=lambda one: one.growth.median).name if helping else ""


def _figures(nothing: Trial, one: Trial) -> tuple[int, ...]:
    figures = one.growth.median / max(1.0, nothing.growth.median), one.cpu.median, one.p99.median
    return tuple(round(figure / step) for figure, step in zip(figures, _STEPS, strict=True))


def _spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


Unit = Literal["calls", "milliseconds"]

#: Bytes in a run by which memory has risen for certain, so that it is said though it does not count.
_SLIGHT = LEAST / 3


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured in the driven process. Sizes are bytes, each list is by reading.

    Attributes:
        calls: How many calls had been made at each reading, warm-up excluded.
        private: Private memory at each reading, that of the workers of isolated functions included.
        judged_from: The first reading that is judged: those before it left it undecided.
        in_workers: How much of its growth is in these workers.
        failures: How many calls raised.
        errors: The names of their exceptions, each with the line that it came from.
        failed: The number of the first input that failed, counted from 1.
        trimmed: What a trim of the allocator gave back at the end.
        collected: What a full garbage collection gave back after that.
        garbage: How many objects it freed.
        freed: How many of them were of each type.
        cleared: What emptying each known cache gave back, by the cache.
        small: By how much Python's small objects have grown after that, as pymalloc rounds them up; None if that is not
            known.
        given_out: By how much what malloc has given out has grown after that; None if that is not known.
        traced: Bytes per call that Python's allocators have not freed, by line, from a second run; 0 for a line that
            made longer what was there before, by an unknown number of bytes.
        native: The same of native memory, if memray is installed.
        large: Bytes per call of Python objects for which malloc was asked, from the same run.
        traced_calls: Calls of that run.
        traced_by: ``"tracemalloc"`` or ``"memray"``.
        before: The census before the first reading: numbers of objects, tasks, threads and so on.
        after: The census after the last reading.
        repeats: Growth per call when one input is repeated; None if it was not tried.
        same_shape: Growth per call with inputs of one shape and different contents; None if there were none.
        uncached: Growth per call with new inputs and the caches of tokenizers switched off; None if there are none.
        failing: Growth per call with failing inputs alone; None if none failed.
        succeeding: Growth per call with the others alone; None if none failed.
        compiled: Growth of written machine code that was compiled at run time.
        libraries: Which of the libraries with causes of their own are loaded.
        held: The containers that have grown, and what holds them; the heaviest first.
        owners: What the memory of libraries belongs to, such as a pipeline: the ways to it, by the cause.
        growing: Open files, threads and child processes of which there are more with the calls.
        seconds: How long the calls of the readings took.
        imported: Seconds that the import of the function took.
        guarded: Whether a guard lends the function its model.
        zones: Whether a spaCy pipeline with memory zones is loaded.
        importable: Whether another process can import the function by its name.
        live: Whether a service was watched that runs: nothing was tried out in it but a trim.
        types: By how much the number of objects has grown, by type, in a service.
        inputs: How many inputs were given in turn; 0 if they were generated, or if there were none.
        per: What ``calls`` counts: time where a service's calls are not known.
    """

    calls: tuple[int, ...] = ()
    private: tuple[int, ...] = ()
    judged_from: int = 0
    in_workers: int = 0
    failures: int = 0
    errors: tuple[str, ...] = ()
    failed: int = 0
    trimmed: int = 0
    collected: int = 0
    garbage: int = 0
    freed: dict[str, int] = field(default_factory=dict)
    cleared: dict[str, int] = field(default_factory=dict)
    small: int | None = None
    given_out: int | None = None
    traced: dict[str, float] = field(default_factory=dict)
    native: dict[str, float] = field(default_factory=dict)
    large: float = 0.0
    traced_calls: int = 0
    traced_by: str = ""
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    repeats: float | None = None
    same_shape: float | None = None
    uncached: float | None = None
    failing: float | None = None
    succeeding: float | None = None
    compiled: int = 0
    libraries: tuple[str, ...] = ()
    held: tuple[Held, ...] = ()
    owners: dict[str, list[str]] = field(default_factory=dict)
    growing: tuple[Growing, ...] = ()
    seconds: float = 0.0
    imported: float = 0.0
    guarded: bool = False
    zones: bool = False
    importable: bool = False
    live: bool = False
    types: dict[str, int] = field(default_factory=dict)
    inputs: int = 0
    per: Unit = "calls"

    @property
    def growth(self) -> int:
        """Bytes by which private memory has grown; with its calls alone, if that is the verdict."""
        judged = self.judged
        if judged.verdict == "grows":
            span = self.calls[-1] - self.calls[self.judged_from]
            return round(judged.growth * self.count / span)
        return self.private[-1] - self.private[0] if self.private else 0

    @property
    def count(self) -> int:
        """The calls between the first reading and the last."""
        return self.calls[-1] - self.calls[0] if self.calls else 0

    @property
    def per_call(self) -> float:
        """Bytes by which it has grown with each call."""
        return self.growth / self.count if self.count else 0.0

    @property
    def judged(self) -> Judgement:
        """What the readings say."""
        return judge(self.calls[self.judged_from :], self.private[self.judged_from :])

    def more(self, name: str) -> int:
        """By how much a number of the census has grown."""
        return self.after.get(name, 0) - self.before.get(name, 0)


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of growth.

    Attributes:
        name: The cause.
        share: Its share of the growth, from 0 to 1.
        seen: The evidence, in a sentence.
        fix: What to do.
    """

    name: CauseName
    share: float
    seen: str
    fix: str


@dataclass(frozen=True, slots=True)
class GrowthReport:
    """The result of a diagnosis.

    Attributes:
        subject: What was driven.
        verdict: Whether its memory grows with its calls, or what ``measured.growing`` names.
        causes: The causes, the largest share first.
        unexplained: The share that no cause explains.
        measured: The measurements.
        unknown: What could not be determined, in sentences.
        trials: The remedies that were tried; None if none were.
        about: When, with what and of how many inputs it was made, as the command shows it.
        seen: Of a running process: what was looked at and what was not, and what that showed, in sentences.
    """

    subject: str
    verdict: Verdict
    causes: tuple[Cause, ...] = ()
    unexplained: float = 0.0
    measured: Measured = Measured()
    unknown: tuple[str, ...] = ()
    trials: Trials | None = None
    about: dict[str, str] = field(default_factory=dict)
    seen: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return asdict(self)


def notes_on(judged: Judgement, per: Unit = "calls") -> list[str]:
    steps = ((format_bytes(round(step.size)), counted(step.calls, per)) for step in judged.steps)
    notes = [f"memory rose by {size} in one step, after {calls}" for size, calls in steps]
    if judged.verdict == "steady" and judged.low > _SLIGHT and judged.growth < LEAST:
        rose, run = format_bytes(round(judged.growth)), "as many calls" if per == "calls" else "as long"
        notes.append(f"memory rose evenly, by {rose}, which is too little to count; three times {run} would tell")
    return notes


# From measurements to causes, each with its share of the growth. The rest is said to be unexplained.

#: A cause with a smaller share is not named.
_LEAST_SHARE = 0.1
#: A number of the census counts as growing with the calls if it grows by this many for each call.
_WITH_CALLS = 0.002
#: The same of tasks, threads and queued items in a service that runs, where 50 calls at a time have as many.
_AT_WORK = 0.1
_FEWEST_MORE = 4
#: A rate below this share of the whole is no growth.
_NONE = 0.3
#: Bytes of machine code that a service has compiled while it was watched, as the doctor's MG203 counts them.
_COMPILED = 2_000_000
#: Of oneDNN's plans, code is taken to be at least a tenth: of the convolutions that were measured it was 36 %.
_PLAN = 10
#: Of what is held outside of Python's memory: a smaller share is what malloc and libraries need beside it.
_BESIDE = 0.5
_LINES = 3

_FIXES: dict[CauseName, str] = {
    "unbounded cache": "Give the cache a size: functools.lru_cache(maxsize=1024).",
    "retention": "The allocator keeps free memory: modelguard run --allocator auto, or memory.trim_every('30s').",
    "cycles": "Break the reference cycle, or let the collector run: do not disable it.",
    "tracebacks": "Do not keep exceptions, or drop their frames: error.with_traceback(None).",
    "tasks": "Let no task wait for ever: asyncio.timeout(), or cancel it. Remove those that are done.",
    "queues": "Read what is put into the queue, or bound it: Queue(maxsize=100).",
    "threads": "End threads, or use one ThreadPoolExecutor for all calls.",
    "ssl contexts": "Make one client, or one SSLContext, for all requests, and close it at the end.",
    "metric labels": "Take ids, paths and messages out of the labels of metrics.",
    "autograd": "Use torch.inference_mode(), or keep loss.item() and not the tensor.",
    "onednn plans": "modelguard run --preset torch-cpu-dynamic -- COMMAND, or pad inputs to few lengths (bucketed).",
    "spacy strings": "Use modelguard.adapters.spacy.zoned, or guard(..., reload_on=MemoryGrowth('500 MB')).",
    # Emptying it later gives nothing back (tokenizers 0.23).
    "tokenizer caches": "Make the model with a smaller cache (cache_capacity), or reload it by a guard's policy.",
    "arrow pool": "Call pyarrow.default_memory_pool().release_unused() after large batches.",
    # Without the arena alone it grows twice as much, and kSameAsRequested changes nothing (onnxruntime 1.32).
    "onnx runtime": "Set SessionOptions.enable_mem_pattern = False, and leave enable_cpu_mem_arena as it is.",
    "tensorflow": "Give tf.function an input_signature, so that it is traced once.",
    "cuda cache": "Set PYTORCH_ALLOC_CONF=expandable_segments:True.",
    "mappings": "Close what is mapped: mmap.close().",
    "connections": "Close each connection when its call ends (contextlib.closing), or use one for all calls.",
    "databases": "Delete rows that are done with from databases in memory, or keep them in a file.",
    "worker processes": "Replace workers in time: isolate(recycle_on=Uses(1000)), or the guard's reload_on. "
    "Diagnose the function below @isolate to learn what it keeps.",
    "python objects": "Look at the lines: they allocate what is never freed.",
    "native memory": "A native library keeps it. With memray (pip install memray) a diagnosis names the lines that "
    "call it. Until it is mended, a fresh process frees it: isolate(recycle_on=Uses(1000)).",
}
_LINES_OF_NATIVE = (
    "Close or free what these lines make. Until then a fresh process frees it: isolate(recycle_on=Uses(1000))."
)


def attribute(measured: Measured) -> tuple[tuple[Cause, ...], float]:
    growth, rest = max(1, measured.growth), 1.0
    found: dict[CauseName, list[tuple[float, str]]] = {}
    for name, size, seen in (*_given_back(measured), *_kept(measured)):
        share = round(min(rest, size / growth), 2)
        if share >= _LEAST_SHARE:
            found.setdefault(name, []).append((share, seen))
            rest = round(rest - share, 2)
    causes = []
    for name, same in sorted(found.items(), key=lambda named: -max(share for share, _ in named[1])):
        same.sort(key=lambda each: -each[0])
        share = round(sum(each for each, _ in same), 2)
        causes.append(Cause(name, share, "; ".join(seen for _, seen in same), _fix(name, measured)))
    return tuple(causes), rest


def _fix(name: CauseName, measured: Measured) -> str:
    if name == "native memory" and measured.native:
        return _LINES_OF_NATIVE
    if name == "python objects" and not measured.traced and not measured.held:
        return "modelguard diagnose MODULE:FUNCTION finds the lines that allocate them."
    first = measured.held[:1] if name in {"python objects", "native memory"} else ()
    about = [held for held in measured.held if held.about == name]
    return next((held.fix for held in (*first, *about) if held.fix), _FIXES[name])


def _owned(name: CauseName, measured: Measured) -> str:
    ways = measured.owners.get(name, ())
    return f", of {', '.join(ways)}" if ways else ""


_Found = Iterator[tuple[CauseName, float, str]]

#: What is emptied at the end of a run: the cause that what it gives back has, and what that says.
_EMPTIED: dict[str, tuple[CauseName, str]] = {
    "lru_cache": ("unbounded cache", "emptying the lru_cache {name} gave {size} back"),
    "metric": ("metric labels", "{series:,} new series; emptying {name} gave {size} back"),
    "pyarrow": ("arrow pool", "Arrow's pool gave {size} back"),
    "cuda": ("cuda cache", "torch.cuda.empty_cache() gave {size} of host memory back"),
    "onnxruntime": ("onnx runtime", "its arena gave {size} back when it was made to shrink"),
}


def _given_back(measured: Measured) -> _Found:
    """What is elsewhere, or was freed by an act that belongs to one cause: its size is measured."""
    if (more := measured.in_workers) > 0:
        yield "worker processes", more, f"the workers of the isolated function hold {format_bytes(more)} more"
    if measured.trimmed > LEAST:  # less stays behind any list that has grown
        risen = measured.private[-1] - measured.private[0] if measured.private else 0
        # Steps are no growth, as when a table doubles; what they left free is not blamed for more than its part.
        part = min(1.0, measured.growth / max(1, risen))
        seen = f"a trim of the allocator gave {format_bytes(measured.trimmed)} back"
        yield "retention", part * measured.trimmed, seen
    if measured.garbage >= max(_FEWEST_MORE, _WITH_CALLS * _calls(measured)):
        most = f" ({kinds(measured.freed)})" if measured.freed else ""
        garbage = f"{measured.garbage:,} objects{most}, which gave {format_bytes(measured.collected)} back"
        yield "cycles", measured.collected, f"a garbage collection freed {garbage}"
    for cache, size in measured.cleared.items():
        kind, _, name = cache.partition(":")
        cause, text = _EMPTIED[kind]
        yield cause, size, text.format(name=name, size=format_bytes(size), series=measured.more("metric series"))


class _Counted(NamedTuple):
    """What the census counts, and the cause that it proves."""

    counted: str  # the name in the census
    cause: CauseName  # the cause
    most: float = math.inf  # bytes that one of them can hold at most
    marks: tuple[str, ...] = ()  # what is in the name of a container of them, or of its entries
    #: By how many it has to grow with each call of a service: of what is at work, there is some at any time.
    calls: float = _WITH_CALLS


#: The most that each of them has been seen to hold, several times over: what is beyond that has another cause.
_COUNTED: tuple[_Counted, ...] = (
    _Counted("threads", "threads", 1e6, ("threading.", "_thread.", "Thread"), _AT_WORK),
    _Counted("ssl contexts", "ssl contexts", 5e6),
    _Counted("tasks", "tasks", marks=("Task", "asyncio."), calls=_AT_WORK),
    _Counted("tensors with a graph", "autograd", marks=("Tensor",)),
    _Counted("queued items", "queues", marks=("(deque",), calls=_AT_WORK),  # a set of queues is a container like others
    _Counted("spacy strings", "spacy strings", 2000, ("StringStore",)),
    _Counted("mappings", "mappings", marks=("mmap",)),
    _Counted("connections", "connections", 3e6, ("Connection",)),  # SQLite caches 2 MB of pages for each
    _Counted("tensorflow traces", "tensorflow"),
)

#: The same in a service that runs, where no cache is emptied.
_COUNTED_LIVE: tuple[_Counted, ...] = (
    *_COUNTED,
    _Counted("cached results", "unbounded cache"),
    _Counted("metric series", "metric labels", 50_000),
    _Counted("caught errors", "tracebacks"),
)
#: Memory blocks of Python's allocators by which each call has to grow so that Python objects are what grows.
_BLOCKS = 0.5
#: Bytes that each of them has at most on average, where calls are not counted: of long texts it was 1.4 kB.
_BLOCK = 4096


def _kept(measured: Measured) -> _Found:
    """What is still held: what is counted, then Python's objects with what they hold, then native memory."""
    calls, held = _calls(measured), measured.held
    failing, succeeding = measured.failing or 0.0, measured.succeeding or 0.0
    errors = measured.more("caught errors")
    if failing > 0 and succeeding < _NONE * failing and errors > 0:
        errors_held = sum(each.size for each in held if each.about == "tracebacks")
        kept = max(errors_held, failing * measured.failures)
        counted = f"{measured.more('tracebacks'):,} more tracebacks, {errors:,} more exceptions are held"
        seen = f"only calls that fail ({', '.join(measured.errors[:_LINES])}) let it grow; {counted}"
        yield "tracebacks", kept, "; ".join([seen, *_holders(held)])
        return
    for each in _COUNTED_LIVE if measured.live else _COUNTED:
        more = measured.more(each.counted)
        rate = each.calls if measured.live and measured.per == "calls" else _WITH_CALLS
        if more >= max(_FEWEST_MORE, rate * calls) and more * each.most >= _LEAST_SHARE * measured.growth:
            yield from _of_counted(each, more, measured)
            return
    databases = _databases(measured)
    yield "databases", databases, f"SQLite has {format_bytes(databases)} more{_owned('databases', measured)}"
    if measured.live:
        yield from _live(measured, calls)
        return
    python = max(_allocated(measured, calls), sum(each.size for each in held))
    if python > 0:
        lines = [f"allocated at {where}"] if (where := places(measured.traced)) else []
        yield _holding(held), python, "; ".join([*_holders(held), *lines])
    yield from _native(measured, calls, python)


def _of_counted(each: _Counted, more: int, measured: Measured) -> _Found:
    """What is proved by its number, with what holds it; or has as many more entries, as a dict of clients has."""
    others = [
        held for held in measured.held if held.about != each.cause and not any(mark in str(held) for mark in each.marks)
    ]
    if each.marks:
        yield from _held(others)
    size = measured.growth - sum(held.size for held in others)
    about = [held for held in measured.held if held.about == each.cause]
    alike = [held for held in measured.held if more / 2 <= held.more <= 2 * more]
    seen = f"{more:,} more {each.counted} after {_calls(measured):,} {measured.per}{_owned(each.cause, measured)}"
    yield each.cause, min(size, more * each.most), "; ".join([seen, *_holders(about or alike)])


def _databases(measured: Measured) -> int:
    return max(0, measured.more("sqlite bytes"))


def _calls(measured: Measured) -> int:
    return max(1, measured.count)


def _allocated(measured: Measured, calls: int) -> float:
    if measured.small is None:
        return sum(measured.traced.values()) * calls
    tables = sum(each.table for each in measured.held)  # they grow too seldom to be traced
    return measured.small + measured.large * calls + tables


def _live(measured: Measured, calls: int) -> _Found:
    """Of a service that runs: Python's blocks tell which of the two it is."""
    more, held = measured.more("blocks"), measured.held
    blocks = f"{more:,} more blocks of Python's memory"
    if measured.compiled > _COMPILED and "torch" in measured.libraries:
        seen = f"{format_bytes(measured.compiled)} more machine code was compiled"
        yield "onednn plans", _PLAN * measured.compiled, seen
    elif sum(each.size for each in held) >= _LEAST_SHARE * measured.growth:
        yield from _held(held)
    elif more >= (_BLOCKS * calls if measured.per == "calls" else measured.growth / _BLOCK):
        most = kinds({kind: number for kind, number in measured.types.items() if number >= _LEAST_SHARE * more})
        most = most or "of no counted type a tenth (text, numbers, classes and functions are not counted)"
        frozen = measured.after.get("frozen", 0)
        hidden = [f"gc.freeze() hides {frozen:,} objects, which may hold them"] if frozen > FROZEN_AT_START else []
        yield "python objects", measured.growth, "; ".join([blocks, most, *hidden, *_holders(held)])
    else:
        seen = f"{blocks} after {calls:,} {measured.per}"
        yield "native memory", measured.growth - _databases(measured), "; ".join([seen, *_holders(held)])


def _held(held: Sequence[Held]) -> _Found:
    if held:
        yield _holding(held), sum(each.size for each in held), "; ".join(_holders(held))


def _holding(held: Sequence[Held]) -> CauseName:
    return cast("CauseName", (held and held[0].about) or "python objects")


def kinds(types: Mapping[str, int]) -> str:
    most = Counter(types).most_common(_LINES)
    return ", ".join(f"{number:,} {kind.removeprefix('builtins.')}" for kind, number in most)


def _holders(held: Sequence[Held]) -> Iterator[str]:
    for each in held[:_LINES]:
        if each.size >= _LEAST_SHARE * held[0].size:
            yield f"held by {each}, {format_bytes(each.size)}"


def places(lines: Mapping[str, float]) -> str:
    """The lines that allocate most; and those that resize what is older than the trace, whose bytes are 0."""
    most = sorted(lines.items(), key=lambda line: -line[1])[:_LINES]
    least = max(1, _LEAST_SHARE * most[0][1]) if most else 0
    shown = [f"{place} ({format_bytes(int(size))} per call)" for place, size in most if size >= least]
    resized = [place for place, size in lines.items() if size == 0]
    return ", ".join([*shown, *resized][:_LINES])


def _native(measured: Measured, calls: int, python: float) -> _Found:
    rate, named = measured.per_call, 0.0
    by_shape = measured.repeats is not None and max(measured.repeats, measured.same_shape or 0.0) < _NONE * rate
    if "torch" in measured.libraries and measured.compiled > 0 and by_shape:
        named = min(measured.growth - python, _PLAN * measured.compiled)
        code = f"{format_bytes(measured.compiled)} more machine code was compiled{_owned('onednn plans', measured)}"
        yield "onednn plans", named, f"it grows with new shapes and not with repeated ones; {code}"
    elif measured.uncached is not None and measured.uncached < _NONE * rate:
        named = (rate - max(0.0, measured.uncached)) * calls - python
        seen = f"with the caches of tokenizers switched off, new inputs grow by {measured.uncached:,.0f} bytes per call"
        owned = _owned("tokenizer caches", measured)
        yield "tokenizer caches", named, f"{seen}, and not by {rate:,.0f}{owned}"
    named += _databases(measured)
    if measured.given_out is not None:
        size = (measured.small or 0) + measured.given_out - python - named
        if size < _BESIDE * (python - _allocated(measured, calls)):
            return  # of tensors, malloc has more than their numbers
        seen = f"malloc has given out {format_bytes(max(0, measured.given_out))} more, of which Python's objects and "
        seen += f"what they hold are {format_bytes(round(max(0.0, python - (measured.small or 0))))}"
    else:
        size, seen = sum(measured.native.values()) * calls - named, "memray has traced it"
    if measured.repeats is not None:
        seen += f"; a repeated input grows by {measured.repeats:,.0f} bytes per call"
    if measured.native:
        seen += f"; allocated below {places(measured.native)}"
    yield "native memory", size, "; ".join([seen, *_holders(measured.held)])
