"""Answers in time on random workloads, against the best of several fixed policies on each: nothing is tuned to them.

A seed decides how requests arrive (at random, in bursts, steps, ramps, from closed clients, with callers who leave),
what they cost (a fixed time, a time an item or a unit of weight, quadratic, bimodal, heavy tails, drifting, stalls,
cheap first calls, runs that vary by chance), how long they may take (for ever, one deadline, two classes,
exponential), how much of it comes (0.3 to 10 times what the model can do), and how many are bad, have keys or
priorities. Everything runs on a simulated clock, so a seed gives the same figures on every machine.

* **Fixed policies**: batches of at most 1, 8 or ``max_size``, in the order of arrival with and without what has
  expired, and by deadline.
* **Policies that know** the cost of each item before it is computed, and drop what would be late; in the order of
  arrival and by deadline.
* **Disturbances**: a burst, a slow model, short deadlines, bad items or a stall, for ten seconds; what counts comes
  more than ten seconds later.
"""

from __future__ import annotations

import concurrent.futures
import heapq
import math
import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import _common
from _simulation import Arrival, Simulation

from modelguard.errors import QueueFull
from modelguard.serving import Limits
from modelguard.serving._requests import Batch, Failure, Request

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Requests of a workload at least; as many as come while so many full batches run, but at most so many times
#: as many; and the share at its start that does not count.
COUNT, BATCHES, MOST, WARM_UP = 3000, 150, 8, 0.1
SIZES = (8, 16, 32, 64)
FIRST = 10_000
#: Where no policy answers more than these, hardly anything can be in time, and the ratio says nothing.
FEW = 20
#: A share of the workloads is to reach this much of the best policy, and all of them that much.
GOAL = 0.95
FIXED_SHARE, FIXED_WORST = 0.97, 0.80
KNOWING_SHARE, KNOWING_WORST = 0.85, 0.65


class Item(Arrival):
    """A request whose item equals no other one."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Model:
    """How long batches take. An item is what it costs by itself, in seconds.

    Attributes:
        fixed: Seconds for any batch.
        square: Seconds for each item times each item.
        drift: Factor at each time.
        stalls: When it stands still, and for how long.
        cheap: The first so many runs take a thousandth.
        noise: Each run takes longer or shorter by chance: the standard deviation of the logarithm of its time.
    """

    def __init__(self, fixed: float) -> None:
        self.fixed = fixed
        self.square = 0.0
        self.drift: Callable[[float], float] = lambda _now: 1.0
        self.stalls: list[tuple[float, float]] = []
        self.cheap = 0
        self.noise = 0.0

    def expects(self, items: Iterable[Any], count: int, now: float) -> float:
        """Seconds for these items on average, but for stalls."""
        return (self.fixed + self.square * count * count + sum(items)) * self.drift(now)

    def cost(self) -> Callable[[list[Arrival], float, dict[str, Any]], float]:
        """The same for a simulation: with stalls, first runs and noise."""
        left, stalls, noise = self.cheap, list(self.stalls), random.Random(1)

        def seconds(items: list[Arrival], now: float, _extras: dict[str, Any]) -> float:
            nonlocal left
            takes = self.expects((one.item for one in items), len(items), now)
            if self.noise:
                takes *= noise.lognormvariate(-self.noise * self.noise / 2, self.noise)
            if left:
                left -= 1
                return takes / 1000
            while stalls and stalls[0][0] < now + takes:
                takes += stalls.pop(0)[1]
            return takes

        return seconds


@dataclass
class Workload:
    """One workload, as its seed has made it."""

    seed: int
    max_size: int = 32
    model: Model = field(default_factory=lambda: Model(0.0))
    arrivals: list[Arrival] = field(default_factory=list)
    named: bool = False
    weighed: bool = False
    fair: bool = False
    words: list[str] = field(default_factory=list)
    then: Callable[[Arrival, float], Arrival | None] = lambda _last, _now: None
    warm_up: float = 0.0

    @property
    def limits(self) -> Limits:
        """The options of the queue."""
        return Limits(name="f", max_size=self.max_size, max_queue=256, weighed=self.weighed, fair=self.fair)

    def run(self, queue: Any = None) -> int:
        """Answers in time by this queue; by default modelguard's."""
        arrivals = [*self.arrivals]
        simulation = Simulation(
            self.limits,
            self.model.cost(),
            arrivals,
            warm_up=self.warm_up,
            named=self.named,
            queue=queue,
            then=self.then,
        )
        if queue is None and any(one.priority for one in arrivals):
            simulation.queue.order()
        return simulation.run().answered


def log_uniform(dice: random.Random, low: float, high: float) -> float:
    return low * (high / low) ** dice.random()


def chance(dice: random.Random, share: float) -> bool:
    return dice.random() < share


def make(seed: int, count: int = COUNT) -> Workload:
    """The workload of a seed."""
    dice = random.Random(seed)
    work = Workload(seed, max_size=dice.choice(SIZES))
    item, mean = _cost(work, dice)
    model = work.model
    best = max(
        size / model.expects([mean] * size, size, 0.0) for size in (1, 2, 4, 8, 16, 32, 64) if size <= work.max_size
    )
    load = log_uniform(dice, 0.3, 10.0)
    rate = load * best
    full = model.expects([mean] * work.max_size, work.max_size, 0.0)
    seconds = max(count, min(BATCHES * full * rate, MOST * count)) / rate
    _faults(work, dice, seconds)
    deadline, leaves = _deadlines(work, dice, mean), _leaving(work, dice)
    bad = dice.uniform(0.0, 0.2) if chance(dice, 0.3) else 0.0
    work.named = chance(dice, 0.5)
    if bad:
        work.words.append(f"{bad:.0%} bad" + (", named" if work.named else ""))
    keys, priorities = 0, False
    if chance(dice, 0.1):
        keys, work.fair = dice.randrange(3, 50), True
        work.words.append(f"{keys} keys")
    elif chance(dice, 0.1):
        priorities = True
        work.words.append("priorities")

    def arrival(at: float, client: Any = None) -> Arrival:
        cost = item(dice)
        return Item(
            at,
            cost,
            deadline(dice),
            weight=cost * 1000 if work.weighed else 1,
            bad=dice.random() < bad,
            key=dice.randrange(keys) if keys else None,
            priority=dice.randrange(3) if priorities else 0,
            leaves=leaves(dice),
            client=client,
        )

    work.words.append(f"{load:.1f} x")
    _arrivals(work, dice, rate, seconds, arrival, best=best)
    work.warm_up = WARM_UP * seconds
    return work


def _cost(work: Workload, dice: random.Random) -> tuple[Callable[[random.Random], float], float]:
    """The model, how an item's cost is drawn, and its mean."""
    kind = dice.choice(["linear", "linear", "weights", "hidden weights", "quadratic", "bimodal", "heavy tail"])
    fixed = 0.0 if chance(dice, 0.1) else log_uniform(dice, 0.0005, 0.3)
    each = 0.0 if chance(dice, 0.1) and fixed else log_uniform(dice, 0.0001, 0.1)
    work.model = model = Model(fixed)
    work.words.append(f"{kind}, {fixed * 1e3:.3g} ms + {each * 1e3:.3g} ms, <= {work.max_size}")
    if kind in {"linear", "quadratic"}:
        if kind == "quadratic":
            model.square = (fixed + each) * log_uniform(dice, 0.001, 0.1)
        return lambda _dice: each, each
    if kind == "bimodal":
        share, slow = log_uniform(dice, 0.005, 0.2), log_uniform(dice, 0.05, 0.5)
        each = min(each, 0.01)
        work.words.append(f"{share:.1%} of {slow * 1e3:.0f} ms")
        return lambda dice: slow if dice.random() < share else each, each + share * (slow - each)
    if kind == "heavy tail":
        shape, least = dice.uniform(1.3, 2.5), max(each, 0.0005) / 4
        most = 400 * least
        draws = [min(least * dice.paretovariate(shape), most) for _ in range(4000)]
        return lambda dice: min(least * dice.paretovariate(shape), most), statistics.fmean(draws)
    spread = dice.uniform(0.3, 1.5)
    work.weighed = kind == "weights"
    each = max(each, 0.0002)
    return (
        lambda dice: each * min(dice.lognormvariate(-spread * spread / 2, spread), 50.0),
        each,
    )


def _faults(work: Workload, dice: random.Random, seconds: float) -> None:
    model = work.model
    if chance(dice, 0.15):
        by, period = dice.uniform(1.5, 4.0), seconds / dice.uniform(1.0, 5.0)
        model.drift = lambda now: math.exp(math.log(by) * math.sin(2 * math.pi * now / period))
        work.words.append(f"drifts by {by:.1f}")
    if chance(dice, 0.15):
        count = dice.randrange(1, 8)
        model.stalls = sorted((dice.uniform(0, seconds), seconds * dice.uniform(0.005, 0.03)) for _ in range(count))
        work.words.append(f"{count} stalls")
    if chance(dice, 0.1):
        model.cheap = dice.randrange(1, 5)
        work.words.append(f"{model.cheap} cheap runs")
    noise = random.Random(-work.seed)  # of its own: all else of a seed stays what it was
    if chance(noise, 0.25):
        model.noise = noise.uniform(0.1, 0.8)
        work.words.append(f"noise {model.noise:.1f}")


def _deadlines(work: Workload, dice: random.Random, mean: float) -> Callable[[random.Random], float]:
    model, size = work.model, work.max_size
    alone = model.expects([mean], 1, 0.0)
    usual = max(model.expects([mean] * size, size, 0.0) * log_uniform(dice, 0.3, 10.0), 1.2 * alone)
    kind = dice.choice(["none", "one", "one", "two", "two", "exponential"])
    if kind == "none":
        work.words.append("no deadline")
        return lambda _dice: math.inf
    if kind == "one":
        work.words.append(f"{usual * 1e3:.3g} ms")
        return lambda _dice: usual
    if kind == "two":
        share = log_uniform(dice, 0.001, 0.9)
        short, long = (0.05, 5.0) if chance(dice, 0.5) else (usual / 2, usual * log_uniform(dice, 2, 30))
        work.words.append(f"{share:.1%} of {short * 1e3:.3g} ms, else {long * 1e3:.3g} ms")
        return lambda dice: short if dice.random() < share else long
    work.words.append(f"{usual * 1e3:.3g} ms on average")
    return lambda dice: dice.expovariate(1 / usual)


def _leaving(work: Workload, dice: random.Random) -> Callable[[random.Random], float]:
    if not chance(dice, 0.1):
        return lambda _dice: math.inf
    share, after = dice.uniform(0.05, 0.5), work.model.expects([], 1, 0.0) * log_uniform(dice, 0.5, 20.0) + 0.001
    work.words.append(f"{share:.0%} leave after {after * 1e3:.3g} ms")
    return lambda dice: dice.expovariate(1 / after) if dice.random() < share else math.inf


def _arrivals(
    work: Workload,
    dice: random.Random,
    rate: float,
    seconds: float,
    arrival: Callable[..., Arrival],
    *,
    best: float,
) -> None:
    kind = dice.choice(["poisson", "poisson", "bursts", "steps", "ramp", "clients"])
    work.words.append(kind)
    if kind == "clients":
        clients = min(dice.randrange(4, 400), 4 * work.max_size + 200)
        think = max(clients / rate - 1 / best, clients / rate / 10)
        work.arrivals = [arrival(dice.expovariate(1 / think), client=number) for number in range(clients)]

        def then(last: Arrival, now: float) -> Arrival | None:
            at = now + dice.expovariate(1 / think)
            return arrival(at, client=last.client) if at < seconds else None

        work.then = then
        return
    share, number = dice.uniform(0.1, 0.5), dice.randrange(3, 30)
    levels = [log_uniform(dice, 0.2, 5.0) for _ in range(dice.randrange(2, 6))]
    total = statistics.fmean(levels)
    shapes: dict[str, Callable[[float], float]] = {
        "poisson": lambda _part: 1.0,
        "bursts": lambda part: 1 / share if part * number % 1 < share else 0.0,
        "steps": lambda part: levels[min(int(part * len(levels)), len(levels) - 1)] / total,
        "ramp": lambda part: 2 * part,
    }
    shape = shapes[kind]
    at, most = 0.0, max(shape(part / 1000) for part in range(1000))
    while (at := at + dice.expovariate(rate * most)) < seconds:
        if dice.random() * most < shape(at / seconds):
            work.arrivals.append(arrival(at))


# The policies to compare with


class _Fixed:
    """A queue with a fixed policy: it learns nothing, and refuses what finds it full.

    Args:
        size: Most items in a batch.
        max_queue: Most items that wait.
        drops: Whether what has expired is not computed.
        by_deadline: Whether the nearest deadline goes first, and not the first to come.
        knows: Seconds of so many items of these costs at a time, for a policy that knows them: it drops what would be
            late.
    """

    def __init__(
        self,
        size: int,
        max_queue: int,
        *,
        drops: bool = True,
        by_deadline: bool = False,
        knows: Callable[[list[float], int, float], float] | None = None,
    ) -> None:
        self.size, self.max_queue, self.drops, self.by_deadline, self.knows = size, max_queue, drops, by_deadline, knows
        self.waiting: list[tuple[float, int, Any]] = []
        self.undelivered: list[tuple[Any, Failure]] = []
        self._number = 0
        self._live = 0
        self._nearest = math.inf  # no deadline of what waits is before this

    def admit(self, request: Any, now: float) -> None:
        if self._live >= self.max_queue and self.drops and self._nearest <= now:
            self._clear(now)
        if self._live >= self.max_queue:
            raise QueueFull("f", queued=self.max_queue, retry_after=1.0)
        self._nearest = min(self._nearest, request.deadline)
        self._number += 1
        request.state = "waiting"
        self._live += 1
        heapq.heappush(self.waiting, (request.deadline if self.by_deadline else 0.0, self._number, request))

    def _clear(self, now: float) -> None:
        kept = []
        for entry in self.waiting:
            if entry[2].state == "waiting":
                if entry[2].deadline <= now:
                    self._expire(entry[2])
                else:
                    kept.append(entry)
        self.waiting = kept
        heapq.heapify(kept)
        self._live = len(kept)
        self._nearest = min((entry[2].deadline for entry in kept), default=math.inf)

    def _expire(self, request: Any) -> None:
        request.state = "done"
        self.undelivered.append((request, Failure(TimeoutError())))

    def next_batch(self, now: float) -> Any:
        if self.knows is not None:
            return self._batch(self._knowing(now), now)
        chosen: list[Request] = []
        while self.waiting and len(chosen) < self.size:
            request = heapq.heappop(self.waiting)[2]
            if request.state != "waiting":
                continue
            self._live -= 1
            if self.drops and request.deadline <= now:
                self._expire(request)
            else:
                chosen.append(request)
        return self._batch(chosen, now)

    def _knowing(self, now: float) -> list[Any]:
        chosen: list[Any] = []
        costs: list[float] = []
        until, kept = math.inf, []
        while self.waiting and len(chosen) < self.size:
            entry = heapq.heappop(self.waiting)
            request = entry[2]
            if request.state != "waiting":
                continue
            if now + self.knows([request.arrival.item], 1, now) > request.deadline:
                self._live -= 1
                self._expire(request)
                continue
            ends = now + self.knows([*costs, request.arrival.item], len(costs) + 1, now)
            if ends > min(until, request.deadline):
                kept.append(entry)
                if len(kept) > self.size:
                    break
                continue
            self._live -= 1
            chosen.append(request)
            costs.append(request.arrival.item)
            until = min(until, request.deadline)
        for entry in kept:
            heapq.heappush(self.waiting, entry)
        return chosen

    def _batch(self, chosen: list[Any], now: float) -> Any:
        for request in chosen:
            request.state = "running"
        return Batch(chosen, now) if chosen else None

    def finish(self, batch: Batch, outcomes: list[Any], _failed: int) -> tuple[list[Any], list[Any]]:
        return self.answer(batch.requests, outcomes)

    def answer(self, requests: list[Any], outcomes: list[Any]) -> tuple[list[Any], list[Any]]:
        live = [pair for pair in zip(requests, outcomes, strict=True) if pair[0].state != "done"]
        for request, _ in live:
            request.state = "done"
        return [pair[0] for pair in live], [pair[1] for pair in live]

    def cancel(self, request: Any) -> bool:
        if request.state == "done":
            return False
        self._live -= request.state == "waiting"
        request.state = "done"
        return True

    def next_check(self) -> float:
        return math.inf

    def expire(self, now: float) -> None: ...
    def learn(self, *_: Any) -> None: ...
    def record_verdict(self, *_: Any) -> None: ...


@dataclass(frozen=True)
class Result:
    """What one workload has given."""

    seed: int
    words: str
    answered: int
    fixed: dict[str, int]
    knowing: dict[str, int]

    @property
    def of_fixed(self) -> float:
        """Of the best fixed policy."""
        return _ratio(self.answered, max(self.fixed.values()))

    @property
    def of_knowing(self) -> float:
        """Of the best policy that knows."""
        return _ratio(self.answered, max(self.knowing.values()))


def _ratio(mine: int, best: int) -> float:
    return mine / best if best >= FEW else 1.0


def judge(seed: int, count: int = COUNT) -> Result:
    """Run one workload by all policies."""
    queue = 256
    made = make(seed, count)
    sizes = sorted({1, 8, made.max_size})
    fixed, knowing = {}, {}
    for size, drops in product(sizes, (True, False)):
        name = f"{size} in order{'' if drops else ', expired too'}"
        fixed[name] = make(seed, count).run(_Fixed(size, queue, drops=drops))
    for size in sizes:
        fixed[f"{size} by deadline"] = make(seed, count).run(_Fixed(size, queue, by_deadline=True))
        for by_deadline in (False, True):
            work = make(seed, count)
            name = f"{size} {'by deadline' if by_deadline else 'in order'}"
            knowing[name] = work.run(_Fixed(size, queue, by_deadline=by_deadline, knows=work.model.expects))
    return Result(seed, "; ".join(made.words), made.run(), fixed, knowing)


#: Seconds before, of, and after a disturbance, and how long after it the count begins.
CALM, DISTURBED, RECOVERY = 20.0, 10.0, 10.0
DISTURBANCES = ("a burst", "a slow model", "short deadlines", "bad items", "a stall")


def disturbed(seed: int) -> Workload:
    """A calm workload at 0.5 to 0.9 of what the model can do, with a disturbance; only what comes later counts."""
    dice = random.Random(seed)
    work = Workload(seed, max_size=dice.choice(SIZES))
    fixed, each = log_uniform(dice, 0.005, 0.1), log_uniform(dice, 0.0002, 0.005)
    model = work.model = Model(fixed)
    full = fixed + each * work.max_size
    rate, usual = dice.uniform(0.5, 0.9) * work.max_size / full, full * dice.uniform(2.5, 8.0)
    kind, end = dice.choice(DISTURBANCES), CALM + DISTURBED
    if kind == "a slow model":
        model.drift = lambda now: 10.0 if CALM < now < end else 1.0
    if kind == "a stall":
        model.stalls = [(CALM, DISTURBED)]
    at = 0.0
    while (at := at + dice.expovariate(rate * (10 if kind == "a burst" and CALM < at < end else 1))) < 3 * end:
        during = CALM < at < end
        short = kind == "short deadlines" and during and chance(dice, 0.5)
        bad = kind == "bad items" and during and chance(dice, 0.2)
        work.arrivals.append(Item(at, each, 1.05 * (fixed + each) if short else usual, bad=bad))
    work.warm_up = end + RECOVERY
    work.words = [kind, f"{fixed * 1e3:.3g} ms + {each * 1e3:.3g} ms, <= {work.max_size}", f"{usual * 1e3:.3g} ms"]
    return work


def recovered(seed: int) -> Result:
    """Run one disturbed workload by all fixed policies."""
    made = disturbed(seed)
    fixed = {f"{size} in order": disturbed(seed).run(_Fixed(size, 256)) for size in sorted({1, 8, made.max_size})}
    return Result(seed, "; ".join(made.words), made.run(), fixed, fixed)


def all_results(run: Callable[[int], Result], first: int, number: int) -> list[Result]:
    """Run many workloads, in several processes."""
    with concurrent.futures.ProcessPoolExecutor() as pool:
        return list(pool.map(run, range(first, first + number), chunksize=2))


def main() -> None:
    bench = _common.Benchmark("random_workloads", "Story 3: random workloads, against the best fixed policy of each")
    number = 40 if bench.quick else 1000
    results, later = all_results(judge, FIRST, number), all_results(recovered, FIRST, number // 10)
    rows, notes = [], []
    for name, ratios, share, worst in (
        ("fixed policy", [one.of_fixed for one in results], FIXED_SHARE, FIXED_WORST),
        ("policy that knows each cost", [one.of_knowing for one in results], KNOWING_SHARE, KNOWING_WORST),
        ("fixed policy after a disturbance", [one.of_fixed for one in later], 1.0, GOAL),
    ):
        below = sum(ratio < GOAL for ratio in ratios) / len(ratios)
        rows += [
            _common.Row(f"share below {GOAL} of the best {name}", [100 * below], "%", 100 * (1 - share), ours=True),
            _common.shortfall(f"best {name} / modelguard", ratios, worst),
        ]
    for label, key in (("fixed", "of_fixed"), ("knowing", "of_knowing")):
        notes += ["", f"The worst ten against the {label} ones:"]
        for one in sorted(results, key=lambda each: getattr(each, key))[:10]:
            others = one.fixed if label == "fixed" else one.knowing
            best = max(others, key=others.__getitem__)
            notes.append(
                f"{getattr(one, key):.2f} seed {one.seed}: {one.words}: {one.answered}, {best}: {others[best]}"
            )

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 1)
        for ratios, label, colour in (
            ([one.of_fixed for one in results], "of the best fixed policy", _common.OURS),
            ([one.of_knowing for one in results], "of the best that knows each cost", _common.PEER),
        ):
            ordered = sorted(min(ratio, 1.5) for ratio in ratios)
            axes.plot([100 * at / len(ordered) for at in range(len(ordered))], ordered, color=colour, label=label)
        axes.axhline(GOAL, color=_common.GREY, linewidth=0.8)
        axes.set_xlabel("% of the workloads")
        axes.set_title("Answers in time, over those of the best policy of each workload (cut at 1.5)")
        axes.legend(frameon=False)

    figures = [[one.seed, one.words, one.answered, one.fixed, one.knowing] for one in (*results, *later)]
    bench.finish(rows, draw, size=(9, 5), notes=notes, results=figures)


if __name__ == "__main__":
    main()
