"""``max_size="auto"`` on a simulated clock: how soon the size of batches fits a latency goal, and whether it holds.

Two ways to choose the size are compared:

* **model**: what modelguard does. The time of a batch is a line over its size, learned from every run; a batch may have
  as many items as take half of the goal.
* **AIMD**: additive increase, multiplicative decrease, as Clipper does (Crankshaw et al., NSDI 2017): one item more
  after each full batch in time, a tenth less after one that took too long.

The best size is known, since the model is simulated. Measured for each model: after how many batches the size is, and
stays, between half and 1.1 of the best one (or one item beside it); how many of the batches after the first hundred
took more than a tenth longer than they may; and the items computed a second after them, compared with the best size.

Nothing sleeps, so the figures are the same on every machine.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import _common
from _simulation import Arrival, Cost, Simulation, poisson

from modelguard.serving import Limits
from modelguard.serving._requests import Batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SLO = 0.1
CEILING = 256
COUNT = 400  # batches
EACH = (0.0001, 0.001, 0.007)
FIXED = (0.0, 0.003, 0.01, 0.03)
_LEAST, _MOST = 0.5, 1.1
#: Times beyond what a batch may take, by this factor, are too long.
_LONGER = 1.1
#: When models change, in seconds, and at which size the times of one of them jump.
CHANGE = 4.0
JUMP = 32
#: What AIMD adds after a full batch in time, and multiplies with after one that took too long.
ADDED, BACK_OFF = 1, 0.9


@dataclass(frozen=True, slots=True)
class Ran:
    """One batch: its items, its seconds, when it ended, and the size that was chosen after it."""

    size: int
    seconds: float
    ended: float
    chosen: int


class Sized(Simulation):
    """A simulation that notes each batch and each answer."""

    def __init__(self, limits: Limits, cost: Cost, arrivals: list[Arrival]) -> None:
        super().__init__(limits, cost, arrivals)
        self.limits = limits
        self.batches: list[Ran] = []
        self.latencies: list[tuple[float, float]] = []  # when a request came, and how long its answer took

    def note(self, arrival: Arrival, outcome: Any) -> None:
        """Count an outcome."""
        super().note(arrival, outcome)
        self.latencies.append((arrival.at, self.now - arrival.at))

    def _compute(self, batch: Batch) -> None:
        started = self.now
        size = len(batch.requests)
        super()._compute(batch)
        self.batches.append(Ran(size, self.now - started, self.now, self.choose(size, self.now - started)))

    def choose(self, size: int, seconds: float) -> int:  # noqa: ARG002 - for AIMD
        """The size of the next batch."""
        return self.queue.status(self.now).max_size


class Aimd(Sized):
    """Additive increase, multiplicative decrease."""

    def __init__(self, limits: Limits, cost: Cost, arrivals: list[Arrival]) -> None:
        self._goal = limits.slo / 2
        self._ceiling = limits.max_size
        super().__init__(replace(limits, slo=math.inf, max_size=1), cost, arrivals)

    def choose(self, size: int, seconds: float) -> int:
        """One more if a full batch was in time, a tenth less if one was not."""
        most = self.limits.max_size
        if seconds > self._goal:
            most = max(1, int(most * BACK_OFF))
        elif size >= most:
            most = min(self._ceiling, most + ADDED)
        self.limits = replace(self.limits, max_size=most)
        self.queue.configure(self.limits, self.now)
        return most


def drive(
    limits: Limits,
    cost: Cost,
    rate: float,
    seconds: float,
    *,
    kind: type[Sized] = Sized,
    make: Callable[[float, random.Random], Arrival] = lambda at, _dice: Arrival(at, None, math.inf),
) -> Sized:
    """Serve random arrivals; by default without deadlines."""
    arrivals = poisson(rate, seconds, make)
    simulation = kind(limits, cost, arrivals)
    simulation.run()
    return simulation


# Models


def linear(fixed: float, each: float) -> Cost:
    return lambda items, _now, _extras: fixed + each * len(items)


def varied(cost: Cost, by: float) -> Cost:
    dice = random.Random(3)
    return lambda items, now, extras: dice.uniform(1 - by, 1 + by) * cost(items, now, extras)


def changed(cost: Cost, at: float, by: float) -> Cost:
    return lambda items, now, extras: (by if now >= at else 1.0) * cost(items, now, extras)


def models() -> dict[str, tuple[Cost, Callable[[int], float]]]:
    """Each model, and the seconds that a batch takes by its size at the end, without chance."""
    found: dict[str, tuple[Cost, Callable[[int], float]]] = {}
    for fixed, each in itertools.product(FIXED, EACH):

        def line(size: int, fixed: float = fixed, each: float = each) -> float:
            return fixed + each * size

        found[f"{fixed * 1e3:g} ms + {each * 1e3:g} ms an item"] = linear(fixed, each), line
    base = linear(0.01, 0.001)
    found["times vary by a tenth"] = varied(base, 0.1), lambda size: 0.01 + 0.001 * size
    found["times vary by 30 %"] = varied(base, 0.3), lambda size: 0.01 + 0.001 * size
    found[f"three times as slow after {CHANGE:g} s"] = (
        changed(base, CHANGE, 3.0),
        lambda size: 3 * (0.01 + 0.001 * size),
    )
    found[f"three times as fast after {CHANGE:g} s"] = (
        changed(linear(0.03, 0.003), CHANGE, 1 / 3),
        lambda size: 0.01 + 0.001 * size,
    )
    found["time grows with the square"] = (
        lambda items, _now, _extras: 0.005 + 0.0005 * len(items) + 0.00002 * len(items) ** 2,
        lambda size: 0.005 + 0.0005 * size + 0.00002 * size**2,
    )
    found[f"0.1 s more beyond {JUMP} items"] = (
        lambda items, _now, _extras: 0.01 + 0.0005 * len(items) + 0.1 * (len(items) > JUMP),
        lambda size: 0.01 + 0.0005 * size + 0.1 * (size > JUMP),
    )
    return found


@dataclass(frozen=True, slots=True)
class Judged:
    """How a way to choose went with a model: batches until it fits, the share that took too long, and the rate."""

    fits_after: int
    late: float
    rate: float


def judge(kind: type[Sized], cost: Cost, seconds: Callable[[int], float], since: float = 0.0) -> Judged:
    """Drive a model at twice what it can do, so that batches are full. What ended before ``since`` is left out."""
    best = max(size for size in range(1, CEILING + 1) if size == 1 or seconds(size) <= SLO / 2)
    rate = best / seconds(best)
    limits = Limits(name="f", max_size=CEILING, max_queue=CEILING, slo=SLO)
    found = drive(limits, cost, 2 * rate, COUNT * seconds(best), kind=kind)
    least, most = min(_LEAST * best, best - 1), max(_MOST * best, best + 1)
    fits = [least <= batch.chosen <= most for batch in found.batches if batch.ended >= since]
    after = next((at for at in range(len(fits)) if all(fits[at:])), len(fits))
    later = [batch for batch in found.batches if batch.ended >= since][100:]
    computed = sum(batch.size for batch in later) / math.fsum(batch.seconds for batch in later)
    return Judged(after, sum(batch.seconds > SLO / 2 * _LONGER for batch in later) / len(later), computed / rate)


def main() -> None:
    bench = _common.Benchmark("auto_size", "Story 3: the size of batches for a latency goal, on a simulated clock")
    ways: dict[str, type[Sized]] = {"model": Sized, "AIMD": Aimd}
    found = {
        model: {way: judge(kind, cost, seconds, CHANGE if " after " in model else 0.0) for way, kind in ways.items()}
        for model, (cost, seconds) in models().items()
    }
    rows = []
    for way in ways:
        ours = way == "model"
        judged = [ways_of[way] for ways_of in found.values()]
        rows += [
            _common.Row(
                f"{way}: batches until the size fits and stays",
                [float(one.fits_after) for one in judged],
                "",
                100 if ours else None,
                ours=ours,
            ),
            _common.Row(f"{way}: batches that took too long", [100 * one.late for one in judged], "%", ours=ours),
            _common.Row(f"{way}: best rate / its rate", [1 / one.rate for one in judged], "x", ours=ours),
        ]
    notes = [
        "",
        f"A goal of {SLO * 1e3:g} ms; {len(found)} models, at twice what they can do. For each, model and AIMD:",
    ]
    notes += [
        f"{model}: fits after {' and '.join(str(one.fits_after) for one in judged.values())} batches, "
        f"{' and '.join(f'{one.late:.1%}' for one in judged.values())} too long, "
        f"rate {' and '.join(f'{one.rate:.2f}' for one in judged.values())} of the best"
        for model, judged in found.items()
    ]
    mean = {way: statistics.fmean(one[way].rate for one in found.values()) for way in ways}
    notes.append("Mean rate: " + ", ".join(f"{way} {value:.2f}" for way, value in mean.items()))

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 1)
        for way, style in zip(ways, ("-", "--"), strict=True):
            for name in ("30 ms + 0.1 ms an item", f"three times as slow after {CHANGE:g} s"):
                cost, seconds = models()[name]
                best = max(size for size in range(1, CEILING + 1) if size == 1 or seconds(size) <= SLO / 2)
                limits = Limits(name="f", max_size=CEILING, max_queue=CEILING, slo=SLO)
                chosen = drive(limits, cost, 2 * best / seconds(best), 10.0, kind=ways[way]).batches
                axes.plot([one.chosen for one in chosen[:200]], style, label=f"{way}: {name}")
        axes.set_xlabel("batches")
        axes.set_ylabel("items that a batch may have")
        axes.legend()

    bench.finish(rows, draw, size=(9, 6), notes=notes)


if __name__ == "__main__":
    main()
