"""Answers in time under load, on a simulated clock: of models of many kinds, at 0.5 to 5 times what they can do.

* **The grid**: a batch costs a fixed time and a time for each item (0 - 100 ms and 0.1 - 100 ms); requests have 1.2 to
  20 times as long as one item alone takes; ``max_size`` stays 32. Answers in time, compared with a clairvoyant batcher:
  it knows how long each batch takes, and of many sizes to aim at the best one counts. It drops what it has admitted
  when that makes room for more. Cells below 0.9 are also compared with one that knows the times, and does not.
* **Kinds of models**: items of unequal weight, items in many groups, models that change their speed or stall.
  Compared with the least of what arrives and what the model can compute.
* **Callers**: 400 greedy ones, and 5 that send half of their share, in turns (``fair_by``) and in the order of arrival.
* **Mixed deadlines**: a few requests have 50 ms, all others much longer, with keys and without, and for ten minutes
  after the last short one. Compared with a plain queue, which takes full batches in the order of arrival.
* **Bad items** that make their batch raise, which costs a whole run: unique ones, and the same ones sent again and
  again. Compared with a batcher that knows the bad items beforehand and leaves them out. For unique ones that is out of
  reach for any batcher: see docs/serving.md.

Nothing sleeps, so the figures are the same on every machine. The lowest figure of each row counts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import _common
from _simulation import Arrival, Outcome, Simulation, at_the_door, clairvoyant, in_order, poisson

from modelguard.serving import Limits
from modelguard.serving._requests import Failure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOADS = (0.5, 1.0, 2.0, 5.0)
EACH = (0.0001, 0.001, 0.01, 0.1)
FIXED = (0.0, 0.001, 0.01, 0.1)
DEADLINES = (1.2, 2.0, 5.0, 20.0)
#: Seconds that those have beside whom short deadlines come.
PATIENCE = (0.25, 1.0, 5.0)
SIZE = 32
GOAL = 0.9

#: Answers a second of a batcher that knows the times.
Bound = Callable[..., float]


def limits(**options: Any) -> Limits:
    return Limits(**{"name": "f", "max_size": SIZE, "max_queue": 256, **options})


def linear(fixed: float, each: float) -> Callable[[list[Arrival], float, dict[str, Any]], float]:
    return lambda items, _now, _extras: fixed + each * len(items)


# The grid


def requests(fixed: float, each: float, times: float, load: float, count: int) -> list[Arrival]:
    """What arrives in a cell."""
    timeout = times * (fixed + each)
    rate = load * SIZE / (fixed + each * SIZE)
    seconds = max(count / rate, count / 8 * (fixed + each))  # where only few can be answered, longer
    return poisson(rate, seconds, lambda at, _dice: Arrival(at, None, timeout))


def cell(
    fixed: float, each: float, times: float, load: float, count: int, *, best: Bound = clairvoyant
) -> tuple[float, Outcome]:
    """Goodput over that of a batcher that knows the times, and what became of the requests."""
    arrivals = requests(fixed, each, times, load, count)
    warm_up = arrivals[-1].at / 4
    outcome = Simulation(limits(), linear(fixed, each), arrivals, warm_up=warm_up).run()
    return outcome.goodput / best(arrivals, fixed, each, SIZE, warm_up=warm_up), outcome


def grid(count: int, loads: Sequence[float] = LOADS) -> dict[tuple[float, float, float, float], float]:
    """The ratio of each cell: fixed cost, cost of an item, deadline over the time of one item, load."""
    return {
        (fixed, each, times, load): cell(fixed, each, times, load, count)[0]
        for fixed, each, times, load in itertools.product(FIXED, EACH, DEADLINES, loads)
    }


# Kinds of models


def uniform(load: float, seconds: float) -> float:
    rate = load * SIZE / (0.03 + 0.0005 * SIZE)
    return _ratio(rate, SIZE / (0.03 + 0.0005 * SIZE), seconds, linear(0.03, 0.0005), _plain(0.25))


def weighted(load: float, seconds: float) -> float:
    """Items of 300 of at most 1,000: three fill a batch, and no batch is ever full to the last unit."""
    cost = 0.01 + 3 * 300 * 1e-4

    def make(at: float, _dice: random.Random) -> Arrival:
        return Arrival(at, None, 1.0, weight=300)

    options = {"max_weight": 1000.0, "weighed": True}
    return _ratio(load * 3 / cost, 3 / cost, seconds, _by_weight(0.01, 1e-4), make, **options)


def uneven(load: float, seconds: float) -> float:
    """Weights from 10 to 1,000 in one queue."""
    mean = 200.0
    cost = 0.01 + 4000 * 1e-4
    capacity = 4000 / mean / cost

    def make(at: float, dice: random.Random) -> Arrival:
        return Arrival(at, None, 2.0, weight=min(max(dice.expovariate(1 / mean), 10.0), 1000.0))

    options = {"max_weight": 4000.0, "weighed": True}
    return _ratio(load * capacity, capacity, seconds, _by_weight(0.01, 1e-4), make, **options)


def grouped(load: float, seconds: float) -> float:
    """64 values of a keyword argument. In half a second each gets a batch; the busier, the larger it is."""
    capacity = 1 / (0.01 + 0.001)

    def make(at: float, dice: random.Random) -> Arrival:
        return Arrival(at, None, 0.5, group=(("language", int, dice.randrange(64)),))

    return _ratio(load * capacity, capacity, seconds, linear(0.01, 0.001), make)


def unequal_groups(load: float, seconds: float) -> float:
    """Four groups, the last of which costs eight times as much as the first."""
    costs = (1.0, 2.0, 4.0, 8.0)
    capacity = 4 * SIZE / sum(factor * (0.01 + 0.001 * SIZE) for factor in costs)

    def make(at: float, dice: random.Random) -> Arrival:
        return Arrival(at, None, 2.0, group=(("size", int, dice.randrange(4)),))

    def cost(items: list[Arrival], _now: float, extras: dict[str, Any]) -> float:
        return costs[extras["size"]] * (0.01 + 0.001 * len(items))

    return _ratio(load * capacity, capacity, seconds, cost, make)


def slow_then_fast(load: float, seconds: float) -> float:
    """Ten times as slow in the first third, which does not count."""

    def cost(items: list[Arrival], now: float, _extras: dict[str, Any]) -> float:
        return (10 if now < seconds / 3 else 1) * (0.03 + 0.0005 * len(items))

    capacity = SIZE / (0.03 + 0.0005 * SIZE)
    return _ratio(load * capacity, capacity, seconds, cost, _plain(0.25))


def fast_then_slow(load: float, seconds: float) -> float:
    """Three times as slow from the first third on."""

    def cost(items: list[Arrival], now: float, _extras: dict[str, Any]) -> float:
        return (1 if now < seconds / 3 else 3) * (0.03 + 0.0005 * len(items))

    capacity = SIZE / (0.03 + 0.0005 * SIZE) / 3
    return _ratio(load * capacity, capacity, seconds, cost, _plain(0.5))


def noisy(load: float, seconds: float) -> float:
    """Times that vary by a third either way."""
    dice = random.Random(3)

    def cost(items: list[Arrival], _now: float, _extras: dict[str, Any]) -> float:
        return dice.uniform(2 / 3, 4 / 3) * (0.03 + 0.0005 * len(items))

    capacity = SIZE / (0.03 + 0.0005 * SIZE)
    return _ratio(load * capacity, capacity, seconds, cost, _plain(0.25))


def stalling(load: float, seconds: float) -> float:
    """Every five seconds nothing is computed for half a second, which is longer than any deadline."""

    def cost(items: list[Arrival], now: float, _extras: dict[str, Any]) -> float:
        takes = 0.03 + 0.0005 * len(items)
        return takes + (0.5 if int((now + takes) / 5) > int(now / 5) else 0.0)

    capacity = 0.9 * SIZE / (0.03 + 0.0005 * SIZE)
    return _ratio(load * capacity, capacity, seconds, cost, _plain(0.4))


def padded(load: float, seconds: float, *, alike: bool = True) -> float:
    """Texts of 5 to 500 tokens, evenly over their logarithm, each of which costs as much as the longest of its batch.

    In batches of eight without any padding the model would compute 34 a second. ``alike`` is the option ``padded``.
    """
    fixed, unit, mean = 0.005, 0.00027, 495 / math.log(100)
    capacity = 1 / (fixed / 8 + unit * mean)

    def make(at: float, dice: random.Random) -> Arrival:
        return Arrival(at, None, 3.0, weight=round(5 * 100 ** dice.random()))

    def cost(items: list[Arrival], _now: float, _extras: dict[str, Any]) -> float:
        return fixed + unit * len(items) * max(item.weight for item in items)

    return _ratio(load * capacity, capacity, seconds, cost, make, weighed=True, padded=alike)


def _plain(timeout: float) -> Callable[[float, random.Random], Arrival]:
    return lambda at, _dice: Arrival(at, None, timeout)


def _by_weight(fixed: float, unit: float) -> Callable[[list[Arrival], float, dict[str, Any]], float]:
    return lambda items, _now, _extras: fixed + unit * sum(item.weight for item in items)


def _ratio(rate: float, capacity: float, seconds: float, cost: Any, make: Any, **options: Any) -> float:
    arrivals = poisson(rate, seconds, make)
    warm_up = seconds / 3 + 1
    outcome = Simulation(limits(**options), cost, arrivals, warm_up=warm_up).run()
    return outcome.goodput / min(capacity, outcome.offered / outcome.seconds)


KINDS: dict[str, Callable[[float, float], float]] = {
    "uniform": uniform,
    "weighted, three of 300 in 1,000": weighted,
    "weighted, 10 to 1,000": uneven,
    "64 groups": grouped,
    "4 groups, 1 to 8 times the cost": unequal_groups,
    "slow, then fast": slow_then_fast,
    "fast, then slow": fast_then_slow,
    "noisy": noisy,
    "stalling": stalling,
    "padded, 5 to 500 tokens": padded,
}


# Callers


def fairness(load: float, seconds: float, *, fair: bool) -> float:
    """400 greedy callers and 5 polite ones, which send half of their share: how many of theirs are answered in time."""
    greedy, polite, capacity = 400, 5, SIZE / (0.03 + 0.0005 * SIZE)
    rate = load * capacity
    courtesy = min(0.5 * capacity, rate) / (greedy + polite) * polite / rate

    def make(at: float, dice: random.Random) -> Arrival:
        kind, count = ("polite", polite) if dice.random() < courtesy else ("greedy", greedy)
        return Arrival(at, kind, 1.0, key=(kind, dice.randrange(count)))

    arrivals = poisson(rate, seconds, make)
    simulation = Simulation(limits(fair=fair), linear(0.03, 0.0005), arrivals)
    polites: list[bool] = []

    def note(arrival: Arrival, outcome: Any) -> None:
        if arrival.item == "polite" and arrival.at > seconds / 4:
            polites.append(not isinstance(outcome, Failure))

    simulation.note = note  # type: ignore[method-assign]
    simulation.run()
    return sum(polites) / len(polites)


# Mixed deadlines


def mixed(
    share: float,
    patience: float,
    seconds: float,
    *,
    fair: bool = False,
    short: float = 0.05,
    until: float = math.inf,
    load: float = 1.0,
) -> float:
    """Answers in time over those of a plain queue, where a share of the requests has 50 ms, and the others longer.

    Args:
        share: The share of short ones.
        patience: Seconds that all others have.
        seconds: How long the model, 30 ms + 0.5 ms an item, is asked for as much as it can compute.
        fair: Whether all short ones are one caller's, beside twenty others.
        short: Seconds that the short ones have.
        until: When the last short one comes; only what comes later counts, and that is 0.8 of the capacity.
        load: Requests over what full batches compute, while there are short ones.
    """
    capacity, cost = SIZE / (0.03 + 0.0005 * SIZE), linear(0.03, 0.0005)

    def make(at: float, dice: random.Random) -> Arrival:
        hurried = dice.random() < share
        return Arrival(at, None, short if hurried else patience, key="short" if hurried else dice.randrange(20))

    def later(at: float, dice: random.Random) -> Arrival:
        return Arrival(at + until, None, patience, key=dice.randrange(20))

    arrivals = poisson(load * capacity, min(until, seconds), make)
    warm_up = seconds / 4
    if until < seconds:
        arrivals, warm_up = arrivals + poisson(0.8 * capacity, seconds - until, later, seed=2), until
    answered = Simulation(limits(fair=fair), cost, arrivals, warm_up=warm_up).run().answered
    return answered / in_order(arrivals, cost, SIZE, warm_up=warm_up)


# Bad items


def poisoned(share: float, seconds: float, *, repeated: bool = False, named: bool = False) -> tuple[float, Outcome]:
    """600 requests a second, 30 ms + 0.5 ms an item. Healthy answers over those of one that knows the bad items."""

    def make(at: float, dice: random.Random) -> Arrival:
        bad = dice.random() < share
        return Arrival(at, f"bad {dice.randrange(20)}" if bad and repeated else at, 0.5, bad=bad)

    arrivals = poisson(600.0, seconds, make)
    warm_up = seconds / 4
    outcome = Simulation(limits(), linear(0.03, 0.0005), arrivals, warm_up=warm_up, named=named).run()
    best = clairvoyant(arrivals, 0.03, 0.0005, SIZE, warm_up=warm_up)
    return outcome.goodput / best, outcome


def main() -> None:
    bench = _common.Benchmark("goodput", "Story 3: answers in time, on a simulated clock")
    count, seconds = (640, 10.0) if bench.quick else (3200, 60.0)
    found = grid(count)
    rows = []
    for load in LOADS:
        cells = [ratio for key, ratio in found.items() if key[3] == load]
        rows.append(_common.shortfall(f"grid at {load:g} x, clairvoyant / modelguard", cells, GOAL))
    kinds = {name: [run(load, seconds) for load in LOADS] for name, run in KINDS.items()}
    rows += [_common.shortfall(f"{name}, possible / modelguard", ratios, GOAL) for name, ratios in kinds.items()]
    bad = {}
    for share in (0.01, 0.03, 0.1):
        bad[f"{share:.0%} bad, repeated"] = poisoned(share, seconds, repeated=True)
        bad[f"{share:.0%} bad, unique, in the traceback"] = poisoned(share, seconds, named=True)
        bad[f"{share:.0%} bad, unique"] = poisoned(share, seconds)
    for name, (ratio, _) in bad.items():
        rows.append(_common.Row(f"{name}, clairvoyant / modelguard", [1 / max(ratio, 1e-3)], "x", ours=True))
    short = {}
    for share, fair in itertools.product((0.001, 0.005, 0.02, 0.1, 0.5), (False, True)):
        name = f"{share:.1%} short deadlines, {'in turns' if fair else 'in order of arrival'}"
        short[name] = [mixed(share, patience, seconds, fair=fair) for patience in PATIENCE]
        short[f"{name}, after the last one"] = [
            mixed(share, patience, 10 * seconds, fair=fair, until=10.0) for patience in PATIENCE
        ]
    rows += [_common.shortfall(f"{name}, plain queue / modelguard", ratios) for name, ratios in short.items()]
    notes = ["", f"{len(found)} cells. The lowest at each load:"]
    for load in LOADS:
        key = min((key for key in found if key[3] == load), key=found.__getitem__)
        below = sum(ratio < GOAL for other, ratio in found.items() if other[3] == load)
        notes.append(
            f"{load:g} x: {found[key]:.2f} at {key[0] * 1e3:g} ms + {key[1] * 1e3:g} ms an item, "
            f"deadline {key[2]:g} x; {below} of {len(found) // len(LOADS)} below {GOAL}"
        )
    notes += [
        f"{ratio:.2f} at {key[0] * 1e3:g} ms + {key[1] * 1e3:g} ms an item, deadline {key[2]:g} x, load {key[3]:g} x; "
        f"{cell(*key, count, best=at_the_door)[0]:.2f} of one that knows the times and decides when a request arrives"
        for key, ratio in found.items()
        if ratio < GOAL
    ]
    notes += [
        f"{name}: " + ", ".join(f"{ratio:.2f} at {load:g} x" for ratio, load in zip(ratios, LOADS, strict=True))
        for name, ratios in kinds.items()
    ]
    notes += [
        f"{name}: {ratio:.2f} of clairvoyance, {outcome.goodput:.0f} answers/s, {outcome.harmed} healthy ones harmed"
        for name, (ratio, outcome) in bad.items()
    ]
    notes += [
        f"{name}: "
        + ", ".join(f"{ratio:.3f} among {patience:g} s" for ratio, patience in zip(ratios, PATIENCE, strict=True))
        for name, ratios in short.items()
    ]
    for load in LOADS:
        polite = ", ".join(
            f"{fairness(load, 2 * seconds, fair=fair):.2f} {how}"
            for fair, how in ((True, "in turns"), (False, "in order of arrival"))
        )
        texts = ", ".join(
            f"{padded(load, seconds, alike=alike):.2f} {how}"
            for alike, how in ((True, "by like length"), (False, "in order of arrival"))
        )
        notes.append(f"texts that are padded, {load:g} x: {texts}")
        notes.append(f"5 polite callers beside 400 greedy ones, {load:g} x, answered in time: {polite}")

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _common.bars(
            left, rows[: len(LOADS)], "The worst cell of the grid at each load", axis="ratio; 1 is clairvoyant"
        )
        _common.bars(
            right, rows[len(LOADS) :], "Models of many kinds, worst load", axis="ratio; 1 is all that is possible"
        )

    bench.finish(
        rows, draw, size=(15, 6), notes=notes, kinds=kinds, grid=[[*key, ratio] for key, ratio in found.items()]
    )


if __name__ == "__main__":
    main()
