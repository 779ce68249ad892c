"""Story 1: a spaCy tokenizer and texts full of new words. Its growth, and what each remedy costs in throughput.

6,000 texts of 300 words each, no word twice, through ``spacy.blank("en")``, which keeps every word that it has seen.
The texts are made beforehand. Each way runs in its own process, in every round, in an order that changes from round to
round:

* nothing: one pipeline for the whole run;
* TTLCache: what the story's author did, a pipeline from a cachetools TTLCache; the author's hour is two seconds here;
* memory_zone: spaCy's own zone around each text (safe with one thread only);
* uses, growth: a guard that reloads on ``Uses`` or on ``MemoryGrowth``; the texts leave no pause to wait for, so both
  have ``defer=0``;
* zoned: ``modelguard.adapters.spacy.zoned`` with a reload on ``IndexGrowth``, both with their defaults.

Growth is private dirty memory compared with that after the first text. Throughput is judged by CPU time, background
threads included, because other work on the machine lengthens the wall time at random.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import _common

from modelguard import MemoryGrowth, Policy, Swap, Uses, guard, memory, telemetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS, LETTERS = 300, 9
#: Texts between two readings of memory; the readings do not count as time.
BLOCK = 25
MB = 1e6
GROWTH_TARGET, CREEP_TARGET, COST_TARGET = 40.0, 5.0, 2.0

WAYS = {
    "nothing": ("doing nothing", _common.GREY),
    "ttlcache": ("cachetools TTLCache", _common.PEER),
    "zone": ("spaCy's memory_zone per text", _common.FOURTH),
    "uses": ("guard, Uses(500)", _common.FIFTH),
    "growth": ("guard, MemoryGrowth('20 MB')", _common.THIRD),
    "zoned": ("zoned(guard), IndexGrowth", _common.OURS),
}
OURS = ("uses", "growth", "zoned")

Tokenize = Callable[[str], list[str]]


def words(nlp: Any, text: str) -> list[str]:
    return [token.text for token in nlp(text)]


def load() -> Any:
    import spacy

    return spacy.blank("en")


def nothing() -> Tokenize:
    nlp = load()
    return lambda text: words(nlp, text)


def ttlcache() -> Tokenize:
    from cachetools import TTLCache, cached

    cached_load = cached(TTLCache(maxsize=1, ttl=2))(load)
    return lambda text: words(cached_load(), text)


def zone() -> Tokenize:
    nlp = load()

    def tokenize(text: str) -> list[str]:
        with nlp.memory_zone():
            return words(nlp, text)

    return tokenize


def guarded(policy: Policy) -> Tokenize:
    decorated: Tokenize = guard(load, reload_on=policy, swap=Swap(defer=0))(words)
    return decorated


def in_zones() -> Tokenize:
    from modelguard.adapters.spacy import IndexGrowth, zoned

    decorated: Tokenize = zoned(guard(load, reload_on=IndexGrowth()))(words)
    return decorated


MAKE: dict[str, Callable[[], Tokenize]] = {
    "nothing": nothing,
    "ttlcache": ttlcache,
    "zone": zone,
    "uses": lambda: guarded(Uses(500)),
    "growth": lambda: guarded(MemoryGrowth("20 MB")),
    "zoned": in_zones,
}


def work(way: str, count: int) -> dict[str, Any]:
    loads: list[telemetry.Event] = []
    telemetry.set_hooks([lambda event: loads.append(event) if isinstance(event, telemetry.LoadFinished) else None])
    rng = random.Random(0)
    texts = [
        " ".join("".join(rng.choices(string.ascii_lowercase, k=LETTERS)) for _ in range(WORDS))
        for _ in range(count + 1)
    ]
    tokenize = MAKE[way]()
    assert len(tokenize(texts.pop())) == WORDS
    start, wall, cpu, growth = private(), 0.0, 0.0, [0.0]
    for first in range(0, count, BLOCK):
        wall_before, cpu_before = time.perf_counter(), time.process_time()
        for text in texts[first : first + BLOCK]:
            tokenize(text)
        wall += time.perf_counter() - wall_before
        cpu += time.process_time() - cpu_before
        growth.append(private() - start)
    return {"wall": wall, "cpu": cpu, "growth": growth, "reloads": max(0, len(loads) - 1), "start": start}


def private() -> float:
    return (memory.usage().private_dirty or 0) / MB


def creep(growth: list[float]) -> float:
    """The lowest point of the second half: what no reload and no zone returned. It is small if the curve is flat."""
    return min(growth[len(growth) // 2 :])


def rows(found: dict[str, list[dict[str, Any]]], count: int) -> list[_common.Row]:
    def row(title: str, way: str, values: list[float], unit: str, target: float | None = None) -> _common.Row:
        judged = target if way == "zoned" else None
        return _common.Row(f"{title}: {WAYS[way][0]}", values, unit, judged, ours=way in OURS)

    def over_nothing(way: str, clock: str) -> list[float]:
        pairs = zip(found[way], found["nothing"], strict=True)
        return [(run[clock] / other[clock] - 1) * 100 for run, other in pairs]

    remedies = [way for way in WAYS if way != "nothing"]
    return [
        *(row("largest growth", way, [max(run["growth"]) for run in found[way]], "MB", GROWTH_TARGET) for way in WAYS),
        *(
            row("lowest in second half", way, [creep(run["growth"]) for run in found[way]], "MB", CREEP_TARGET)
            for way in WAYS
        ),
        *(row("CPU time", way, over_nothing(way, "cpu"), "%", COST_TARGET) for way in remedies),
        *(row("wall time", way, over_nothing(way, "wall"), "%") for way in remedies),
        *(row("  throughput", way, [count / run["cpu"] for run in found[way]], "texts/CPU s") for way in WAYS),
        *(row("  reloads", way, [run["reloads"] for run in found[way]], "") for way in OURS),
    ]


def paint(figure: Figure, found: dict[str, list[dict[str, Any]]], lines: list[_common.Row]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    for way, (name, colour) in WAYS.items():
        growth = found[way][-1]["growth"]
        left.plot([BLOCK * place for place in range(len(growth))], growth, color=colour, label=name, linewidth=1.5)
    left.axhline(GROWTH_TARGET, color="black", linestyle="--", linewidth=1.2, label=f"target: {GROWTH_TARGET:.0f} MB")
    left.set_yscale("symlog", linthresh=100)
    left.set_yticks([0, 25, 50, 75, 100, 250, 500, 1000], ["0", "25", "50", "75", "100", "250", "500", "1,000"])
    left.set_ylim(bottom=-5)
    left.set_title(f"Growth of private memory; every text has {WORDS} new words")
    left.set_xlabel("texts")
    left.set_ylabel("MB (above 100: logarithmic)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=4, frameon=False)
    costs = [row for row in lines if row.name.startswith("CPU time")]
    title = "CPU time compared with doing nothing"
    _common.bars(right, costs, title, axis="difference in CPU time, %", prefix="CPU time: ")


def main() -> None:
    benchmark = _common.Benchmark("spacy_growth", "Story 1: growth and throughput with texts full of new words")
    count, rounds = (100, 1) if benchmark.quick else (6_000, 3)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    order = list(WAYS)
    for number in range(rounds):
        for way in order:
            print(f"round {number + 1} of {rounds}: {way} ...", flush=True)
            found[way].append(_common.fresh(__file__, way, str(count)))
        order = [*order[2:], *order[:2]]
    lines = rows(found, count)
    notes = [
        "",
        f"{count:,} texts of {WORDS} new words. Times are relative to doing nothing in the same round.",
        "Lowest in second half: what was never returned. If it is small, memory is flat.",
    ]
    benchmark.finish(lines, lambda figure: paint(figure, found, lines), size=(14, 5.5), notes=notes, runs=found)


if __name__ == "__main__":
    job = _common.job()
    if job is None:
        main()
    else:
        _common.answer(work(job[0], int(job[1])))
