"""What remedies have done to growth, CPU time and latency, and which of them to use."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["SOLVES", "Round", "Spread", "Trial", "Trials", "front", "recommend", "trial"]

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
