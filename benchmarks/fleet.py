"""A fleet of up to 10,000 replicas on simulated clocks: who is away at once, and what the registry has to bear.

All replicas begin to serve at the same moment and get equal shares of the traffic, which is the worst case. A load
takes 30 seconds. In each scenario 10,000 replicas are driven (see ``_fleet.py``), each by the library's own evaluator,
policies, jitter, backoff, queue and circuit breaker. Every slice of them is a fleet too: a thousand fleets of ten, a
hundred of a hundred, ten of a thousand. What is judged is the worst of them.

* **Away**: the largest share of a fleet that cannot answer at one time. The target is 5 %, or one replica.
* **Herd**: the most requests a second to the registry, as a mean of the 30 seconds that a load takes, over the mean of
  the scenario. The mean counts as at least a third of a request a second, so that one a second is never a herd.
* **Recovery**: from the end of the outage until the last replica that was refused has a new model, in units of the
  longest wait of the backoff, by default a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import _common
import _fleet
from _fleet import MB, WEIGHTS, Conditions, History

from modelguard import TTL, Backoff, Errors, MemoryLimit, Modified, Uses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOUR = 3600.0
LOAD = 30.0
AWAY, HERD, RECOVERY = 0.05, 3.0, 2.0
SIZES = (10, 100, 1_000, 10_000)


@dataclass(frozen=True)
class Scenario:
    """What is simulated, and how its requests are judged.

    Attributes:
        conditions: What happens.
        over: Seconds over which the mean of the requests is taken.
        part: Which panel of the picture it is drawn in.
    """

    conditions: Conditions
    over: float
    part: str


#: In the middle of the hour in which every replica's first model ends.
OUTAGE = (0.75 * HOUR - 300, 0.75 * HOUR + 300)

SCENARIOS = {
    "TTL('1h')": Scenario(
        Conditions(policy=TTL("1h"), until=2 * HOUR, room=False, calls=0.05),
        2 * HOUR,
        "New weights by age",
    ),
    "Modified": Scenario(
        Conditions(policy=Modified(WEIGHTS), until=300, weights=60, room=False, calls=0.05),
        1200,
        "New weights appear",
    ),
    "Modified(spread='20m')": Scenario(
        Conditions(policy=Modified(WEIGHTS, spread="20m"), until=1500, weights=60, room=False, calls=0.05, ticks=5),
        1200,
        "New weights appear",
    ),
    "outage, room for two copies": Scenario(
        Conditions(policy=TTL("1h"), until=2 * HOUR, outage=OUTAGE, calls=0.05),
        2 * HOUR,
        "Outage of ten minutes",
    ),
    "outage, room for one copy": Scenario(
        Conditions(policy=TTL("1h"), until=2 * HOUR, outage=OUTAGE, room=False, calls=0.05),
        2 * HOUR,
        "Outage of ten minutes",
    ),
    "outage, Backoff('1s', '10m')": Scenario(
        Conditions(policy=TTL("1h"), until=2 * HOUR, outage=OUTAGE, calls=0.05, backoff=Backoff("1s", "10m")),
        2 * HOUR,
        "Outage of ten minutes",
    ),
    "outage as new weights appear": Scenario(
        Conditions(policy=Modified(WEIGHTS), until=800, outage=(60, 660), weights=60, calls=0.05, ticks=2),
        600,
        "Outage of ten minutes",
    ),
    "one poison input in 32": Scenario(
        Conditions(policy=Errors(), until=60, bad=(10, 50), calls=0.25, burst=32),
        40,
        "Poison input",
    ),
    "nothing but poison": Scenario(
        Conditions(policy=Errors(), until=720, bad=(60, 660), calls=0.5),
        600,
        "Poison input",
    ),
    "MemoryLimit('80%')": Scenario(
        Conditions(policy=MemoryLimit("80%"), until=2 * HOUR, room=False, leak=int(5.5 * MB), ticks=30),
        2 * HOUR,
        "Leak in step",
    ),
    "Uses(360)": Scenario(
        Conditions(policy=Uses(360), until=2 * HOUR, room=False),
        2 * HOUR,
        "Leak in step",
    ),
}


def fleets(histories: Sequence[History], size: int) -> list[Sequence[History]]:
    """All fleets of this size that the replicas make up."""
    return [histories[start : start + size] for start in range(0, len(histories) - size + 1, size)]


def judge(name: str, scenario: Scenario, histories: Sequence[History]) -> list[_common.Row]:
    """What became of fleets of each size."""
    rows = []
    for size in SIZES:
        if not (found := fleets(histories, size)):
            continue
        title = f"{name}, {size:,}"
        away = [100 * _fleet.most_away(one) for one in found]
        herd = [_fleet.herd(one, LOAD, scenario.over) for one in found]
        rows.append(_common.Row(f"{title}: away", away, "%", 100 * max(AWAY, 1 / size), worst=True, ours=True))
        rows.append(_common.Row(f"{title}: herd", herd, "x", HERD, worst=True, ours=True))
        if (end := scenario.conditions.outage[1]) < scenario.conditions.until:
            waits = [_fleet.recovery(one, end) / scenario.conditions.backoff.longest for one in found]
            rows.append(_common.Row(f"{title}: recovery", waits, "backoffs", RECOVERY, worst=True, ours=True))
    return rows


def note(name: str, histories: Sequence[History]) -> str:
    """What the rows do not show."""
    count = len(histories)
    loads = sum(len(one.requests) for one in histories) / count
    failed = sum(one.failed for one in histories) / count
    peak = max(_fleet.rates(histories, 1.0).values(), default=0)
    return f"{name}: {loads:.2f} loads and {failed:.1f} healthy calls failed per replica; {peak:,} loads in one second"


def paint(figure: Figure, found: dict[str, Sequence[History]]) -> None:
    """For each part the share that is away above, and the requests over their mean below."""
    parts = list(dict.fromkeys(scenario.part for scenario in SCENARIOS.values()))
    colours = (_common.OURS, _common.PEER, _common.THIRD, _common.FOURTH)
    every = figure.subplots(2, len(parts))
    for column, part in enumerate(parts):
        above, below = every[0][column], every[1][column]
        inside = [name for name, scenario in SCENARIOS.items() if scenario.part == part]
        for name, colour in zip(inside, colours, strict=False):
            scenario, histories = SCENARIOS[name], found[name]
            until = scenario.conditions.until
            step = until / 400
            away = _fleet.curve_away(histories, step, until)
            above.plot(
                [at * step / 60 for at in range(len(away))], [100 * one for one in away], color=colour, label=name
            )
            slots = _fleet.rates(histories, LOAD)
            mean = max(sum(slots.values()) / scenario.over, 1 / 3)
            times = range(int(until / LOAD) + 1)
            below.step(
                [at * LOAD / 60 for at in times],
                [slots[at] / LOAD / mean for at in times],
                where="post",
                color=colour,
            )
        above.axhline(100 * AWAY, color="black", linestyle="--", linewidth=1)
        below.axhline(HERD, color="black", linestyle="--", linewidth=1)
        above.set_title(part)
        above.set_ylim(-3, 103)
        below.set_yscale("symlog", linthresh=3)
        below.set_ylim(0, 100)
        below.set_yticks([0, 1, 2, 3, 10, 30, 100], ["0", "1", "2", "3", "10", "30", "100"])
        below.set_xlabel("minutes")
        above.legend(loc="upper right", fontsize=8)
    every[0][0].set_ylabel("% of replicas that cannot answer; dashed: target")
    every[1][0].set_ylabel("requests to the registry over their mean; dashed: target")


def main() -> None:
    bench = _common.Benchmark("fleet", "Up to 10,000 replicas, on simulated clocks")
    logging.getLogger("modelguard").setLevel(logging.CRITICAL)  # a line for each of a million failed loads
    count = 200 if bench.quick else SIZES[-1]
    rows, notes, found = [], [""], {}
    for name, scenario in SCENARIOS.items():
        histories = found[name] = _fleet.fleet(scenario.conditions, count)
        rows += judge(name, scenario, histories)
        notes.append(note(name, histories))
    bench.finish(rows, lambda figure: paint(figure, found), size=(21, 8), notes=notes)


if __name__ == "__main__":
    main()
