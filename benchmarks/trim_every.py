"""What ``trim_every`` returns to the system, and what it costs: story 2's convolutions of many lengths, under glibc.

200 random lengths (50 to 4,000) through eight one-dimensional convolutions, behind a guard. oneDNN keeps its primitives
(the preset caps those); this measures the rest, which glibc holds after it was freed. Ways:

* nothing: a guard without ``trim_every``;
* 5 s, 1 s, 100 MB: with it;
* capped: no ``trim_every``, both of oneDNN's caches limited to 64 entries;
* capped, 1 s: both.

Each way runs in its own process, in every round, in an order that changes from round to round. Growth is private
memory compared with that after the first length. CPU time includes the background threads.
"""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING, Any

import _common

from modelguard import guard, memory, telemetry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MB = 1e6
THREADS = 2
CAPS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
WAYS: dict[str, tuple[str, str | None, bool]] = {
    "nothing": ("doing nothing", None, False),
    "5s": ("trim_every='5s'", "5s", False),
    "1s": ("trim_every='1s'", "1s", False),
    "100MB": ("trim_every='100 MB'", "100 MB", False),
    "capped": ("caches capped", None, True),
    "capped-1s": ("caches capped, trim_every='1s'", "1s", True),
}


def load() -> Any:
    import torch

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    sizes = (3, 5, 7, 11) * 2
    return torch.nn.ModuleList([torch.nn.Conv1d(192, 192, size, padding=size // 2) for size in sizes]).eval()


def work(way: str, count: int) -> dict[str, Any]:
    _, every, capped = WAYS[way]
    if capped:
        os.environ.update(CAPS)  # before the first convolution, which reads them
    trims: list[Any] = []
    telemetry.set_hooks([lambda event: trims.append(event) if isinstance(event, telemetry.MemoryTrimmed) else None])
    import torch

    model = guard(load, reload_on=None, trim_every=every)

    @model
    def run(layers: Any, length: int) -> None:
        with torch.inference_mode():
            out = torch.randn(1, 192, length)
            for layer in layers:
                out = layer(out)

    draw = random.Random(0)
    run(1000)
    start, growth, longest = memory.private(fresh=True), [], 0.0
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(count):
        began = time.perf_counter()
        run(draw.randint(50, 4000))
        longest = max(longest, time.perf_counter() - began)
        growth.append((memory.private() - start) / MB)
    return {
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
        "growth": growth,
        "longest": longest,
        "trims": len(trims),
        "freed": sum(event.freed for event in trims) / MB,
        "trim_seconds": [event.seconds for event in trims],
    }


def rows(found: dict[str, list[dict[str, Any]]]) -> list[_common.Row]:
    def over_nothing(way: str, clock: str) -> list[float]:
        return [(run[clock] / other[clock] - 1) * 100 for run, other in zip(found[way], found["nothing"], strict=True)]

    remedies = [way for way in WAYS if way != "nothing"]
    trimmed = [way for way in WAYS if WAYS[way][1]]
    title = {way: WAYS[way][0] for way in WAYS}
    return [
        *(
            _common.Row(f"growth at the end: {title[way]}", [run["growth"][-1] for run in found[way]], "MB", ours=True)
            for way in WAYS
        ),
        *(_common.Row(f"CPU time: {title[way]}", over_nothing(way, "cpu"), "%", ours=True) for way in remedies),
        *(
            _common.Row(
                f"longest trim: {title[way]}", [max(run["trim_seconds"], default=0) * 1e3 for run in runs], "ms"
            )
            for way in trimmed
            if (runs := found[way])
        ),
        *(_common.Row(f"trims: {title[way]}", [run["trims"] for run in found[way]], "") for way in trimmed),
    ]


def paint(figure: Figure, found: dict[str, list[dict[str, Any]]], lines: list[_common.Row]) -> None:
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    colours = (_common.GREY, _common.FIFTH, _common.OURS, _common.THIRD, _common.FOURTH, _common.PEER)
    for (way, (name, _, _)), colour in zip(WAYS.items(), colours, strict=True):
        left.plot(found[way][-1]["growth"], color=colour, label=name, linewidth=1.5)
    left.set_title("Growth of private memory; nearly every call has a new length")
    left.set_xlabel("calls")
    left.set_ylabel("MB")
    left.legend(frameon=False)
    costs = [row for row in lines if row.name.startswith("CPU time")]
    title = "CPU time compared with doing nothing"
    _common.bars(right, costs, title, axis="difference in CPU time, %", prefix="CPU time: ")


def main() -> None:
    benchmark = _common.Benchmark("trim_every", "Story 2: returning freed memory to the system while calls run")
    count, rounds = (10, 1) if benchmark.quick else (200, 3)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    order = list(WAYS)
    for number in range(rounds):
        for way in order:
            print(f"round {number + 1} of {rounds}: {way} ...", flush=True)
            found[way].append(_common.fresh(__file__, way, str(count)))
        order = [*order[2:], *order[:2]]
    lines = rows(found)
    notes = ["", f"{count} lengths; times are relative to doing nothing in the same round."]
    benchmark.finish(lines, lambda figure: paint(figure, found, lines), size=(14, 5.5), notes=notes, runs=found)


if __name__ == "__main__":
    job = _common.job()
    if job is None:
        main()
    else:
        _common.answer(work(job[0], int(job[1])))
