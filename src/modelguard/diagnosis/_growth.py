"""What was measured of a function's growth, and the report of it."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from modelguard import _units
from modelguard.diagnosis._counts import Growing
from modelguard.diagnosis._holders import Held
from modelguard.facts._growth import LEAST, Judgement, Verdict, judge

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
    """One run in a fresh process.

    Attributes:
        growth: Bytes per call by which private memory has grown.
        cpu: CPU seconds per call, of all its processes.
        p99: Seconds that 99 of 100 calls did not exceed.
        held: Bytes of private memory at the end, of all its processes.
        undecided: Why it cannot be told what memory grows by, in a sentence without a full stop; empty if it can.
    """

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
    """Sum up the rounds of a remedy.

    Args:
        name: Its name.
        lines: What to write to have it.
        rounds: Each run with the remedy, with the run without it of the same round. At least one.
        stopped: Why no more rounds were run.
    """
    decided = [own for own, _ in rounds if not own.undecided]
    return Trial(
        name,
        tuple(lines),
        len(rounds),
        _spread(1000 * own.growth for own in decided or [own for own, _ in rounds]),
        _spread(own.cpu / max(nothing.cpu, 1e-9) for own, nothing in rounds),
        _spread(own.p99 / max(nothing.p99, 1e-9) for own, nothing in rounds),
        int(statistics.median(own.held for own, _ in rounds)),
        statistics.median(own.cpu for own, _ in rounds),
        statistics.median(own.p99 for own, _ in rounds),
        stopped,
        "" if decided else rounds[-1][0].undecided,
    )


def front(nothing: Trial, trials: Sequence[Trial]) -> set[str]:
    """The names of those on the Pareto front of growth, CPU time and latency; smaller differences do not count.

    What was stopped or is undecided is not on it, and keeps nothing off it.
    """
    figures = {one.name: _figures(nothing, one) for one in trials if not (one.stopped or one.undecided)}
    return {name for name, own in figures.items() if not any(_dominates(other, own) for other in figures.values())}


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
    """Growth, CPU time and p99, in steps."""
    figures = one.growth.median / max(1.0, nothing.growth.median), one.cpu.median, one.p99.median
    return tuple(round(figure / step) for figure, step in zip(figures, _STEPS, strict=True))


def _dominates(better: tuple[int, ...], worse: tuple[int, ...]) -> bool:
    return better != worse and all(one <= other for one, other in zip(better, worse, strict=True))


def _spread(values: Iterable[float]) -> Spread:
    found = list(values)
    return Spread(statistics.median(found), min(found), max(found))


Unit = Literal["calls", "milliseconds"]

#: Bytes in a run by which memory has risen for certain, so that it is said though it does not count.
_SLIGHT = LEAST / 3

CauseName = Literal[
    "unbounded cache", "retention", "cycles", "tracebacks", "tasks", "queues", "threads", "ssl contexts",
    "metric labels", "autograd", "onednn plans", "spacy strings", "tokenizer caches", "arrow pool", "onnx runtime",
    "tensorflow", "cuda cache", "mappings", "connections", "worker processes", "python objects", "native memory",
]  # fmt: skip


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
        traced: Bytes per call that Python's allocators have not freed, by line, from a second run.
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
            return round(judged.growth * (self.calls[-1] - self.calls[0]) / span)
        return self.private[-1] - self.private[0] if self.private else 0

    @property
    def per_call(self) -> float:
        """Bytes by which it has grown with each call."""
        count = self.calls[-1] - self.calls[0] if self.calls else 0
        return self.growth / count if count else 0.0

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
        from dataclasses import asdict

        return asdict(self)


def notes_on(judged: Judgement, per: Unit = "calls") -> list[str]:
    """The steps in which memory rose, and a rise that is too small to count, each in a sentence."""
    notes = [
        f"memory rose by {_units.format_bytes(round(step.size))} in one step, after "
        + (f"{step.calls:,.0f} calls" if per == "calls" else f"{step.calls / 1000:.0f} seconds")
        for step in judged.steps
    ]
    if judged.verdict == "steady" and judged.low > _SLIGHT:
        rose, run = _units.format_bytes(round(judged.growth)), "as many calls" if per == "calls" else "as long"
        notes.append(f"memory rose evenly, by {rose}, which is too little to count; three times {run} would tell")
    return notes
