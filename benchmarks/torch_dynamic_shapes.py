"""Story 2: convolutions over inputs of many lengths, on CPU. What each remedy saves in memory and costs in CPU time.

Every length is another shape. For each shape oneDNN makes kernels and keeps them, by default up to 1,024 in each of two
caches. Three stacks of Conv1d get random lengths from 50 to 4,000; a VITS (``transformers.VitsModel`` with its default
configuration and random weights) gets texts of random length; two threads.

Each cell runs in its own process. Growth is private dirty memory at the end compared with that before the first call,
so it includes what the first call takes. The price is CPU time compared with doing nothing, for the same calls in the
same order. Threads that wait for others spin, as is the default. On a machine with other work that is most of the time,
and the prices mean nothing.
The allocators are compared on two stacks that differ in the size of their intermediate results.
``bucketed`` is ``modelguard.adapters.torch.bucketed`` with its defaults. The VITS pads its text and, inside, what its
decoder turns into sound.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import _common

from modelguard import allocator, memory, presets

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Infer = Callable[[int], Any]

MB = 1e6
GROWTH_TARGET, COST_TARGET = 40.0, 0.0
#: Smaller differences are the noise of one run, and do not make one remedy better than another.
NOISE_MB, NOISE_PERCENT = 5.0, 3.0
#: Rounds of the remedies on the workload that has targets; one elsewhere.
ROUNDS = 2
ALLOCATOR_ROUNDS = 3
#: Calls between two readings of memory; the readings do not count as time.
BLOCK = 20
#: Calls of each cell in a quick run.
QUICK = 10
CAPPED = "8 x Conv1d(192), both caches capped"
#: Ticks of the axis that shows growth, in MB.
TICKS = (0, 5, 10, 25, 50, 100, 250)
CAPS = (0, 1, 8, 16, 32, 64, 128, 256, 512, 1024)
ONEDNN = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
NOTHING, BUCKETED, PRESET = "nothing", "bucketed", "torch-cpu-dynamic"


@dataclass(frozen=True)
class Workload:
    """A network, and the lengths that it meets."""

    title: str
    calls: int
    shortest: int
    longest: int
    convolutions: int = 0
    channels: int = 0


WORKLOADS = {
    "small": Workload("4 x Conv1d(96)", 600, 50, 4000, 4, 96),
    "probe": Workload("8 x Conv1d(192)", 400, 50, 4000, 8, 192),
    "narrow": Workload("8 x Conv1d(96), short", 250, 50, 1550, 8, 96),
    "wide": Workload("8 x Conv1d(192), 250 calls", 250, 50, 4000, 8, 192),
    "large": Workload("16 x Conv1d(256)", 120, 50, 4000, 16, 256),
    "vits": Workload("VITS", 40, 10, 120),
    "tokens": Workload("BERT on short texts", 300, 5, 120),
}
#: Where the remedies are compared; the rest is for the choice of buckets.
COMPARED = ("small", "probe", "large", "vits")
#: Where the allocators are compared: intermediate results of at most 0.6 and 3 MB.
ALLOCATORS = ("narrow", "wide")
#: Ways of padding, and their arguments of ``bucketed``.
BUCKETS: dict[str, dict[str, Any]] = {
    BUCKETED: {},
    "growth 1.25": {"growth": 1.25},
    "multiple 128": {"multiple": 128},
    "multiple 256": {"multiple": 256},
}


@dataclass(frozen=True)
class Remedy:
    """A remedy: environment variables, and a way of calling."""

    title: str
    variables: dict[str, str] = field(default_factory=dict)
    way: str = "plain"
    ours: bool = False


def caps(onednn: int | None = None, ideep: int | None = None) -> dict[str, str]:
    values = {ONEDNN: onednn, "LRU_CACHE_CAPACITY": ideep}
    return {name: str(value) for name, value in values.items() if value is not None}


def remedies() -> dict[str, Remedy]:
    """All remedies that this machine can run."""
    preset = presets.get(PRESET).environment({})
    found = {
        NOTHING: Remedy("nothing"),
        "arenas": Remedy("MALLOC_ARENA_MAX=1", {"MALLOC_ARENA_MAX": "1"}),
        "ideep": Remedy("LRU_CACHE_CAPACITY=1 alone", caps(ideep=1)),
        "onednn": Remedy("ONEDNN_PRIMITIVE_CACHE_CAPACITY=0 alone", caps(onednn=0)),
        "story": Remedy("the story's caps, 0 and 1", caps(0, 1)),
        "thresholds": Remedy(
            "MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ = 131072",
            {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"},
        ),
        "trim": Remedy("malloc_trim() every 20 calls", way="trim"),
        PRESET: Remedy(f"preset {PRESET}, caps of {preset[ONEDNN]}", preset, ours=True),
        BUCKETED: Remedy("bucketed", way="bucketed", ours=True),
        "both": Remedy("bucketed, and the preset", preset, way="bucketed", ours=True),
    }
    for library in allocator.find("jemalloc")[:1]:
        preload = {"LD_PRELOAD": str(library.path)}
        found |= {
            "jemalloc": Remedy("jemalloc", preload),
            "run": Remedy("preset with jemalloc", preset | preload, ours=True),
            "all": Remedy("bucketed, preset with jemalloc", preset | preload, way="bucketed", ours=True),
        }
    return found


def allocators(chosen: dict[str, Remedy]) -> dict[str, Remedy]:
    """Each allocator alone, and with the preset where that is advised."""
    alone = {
        kind: Remedy(kind, {"LD_PRELOAD": str(library.path)})
        for kind in ("jemalloc", "mimalloc", "tcmalloc")
        for library in allocator.find(kind)[:1]
    }
    few = {name: chosen[name] for name in (NOTHING, PRESET, "run") if name in chosen}
    return {**few, **alone, "low-memory": Remedy("preset low-memory", presets.get("low-memory").environment({}))}


# In the process of a cell


def stack(workload: Workload, way: str) -> Infer:
    import torch

    kernels = (3, 5, 7, 11)
    layers = [
        torch.nn.Conv1d(workload.channels, workload.channels, kernel, padding=kernel // 2)
        for kernel in kernels * (workload.convolutions // len(kernels))
    ]
    network = torch.nn.Sequential(*layers).eval()

    def infer(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = network(x)
        return result

    if way in BUCKETS:
        from modelguard.adapters.torch import bucketed

        infer = bucketed("x", **BUCKETS[way])(infer)
    return lambda length: infer(torch.randn(1, workload.channels, length))


def vits(_: Workload, way: str) -> Infer:
    import torch
    from transformers import VitsConfig, VitsModel

    config = VitsConfig()
    model = VitsModel(config).eval()

    def infer(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=input_ids, attention_mask=attention_mask).waveform
        return result

    if way in BUCKETS:
        from modelguard.adapters.torch import bucketed

        # The sound's length is not the text's: the durations that the model finds decide it, and they are masked.
        infer = bucketed("input_ids", mask="attention_mask", cut=None)(infer)
        model.decoder.forward = bucketed("spectrogram")(model.decoder.forward)
        model.flow.forward = bucketed("inputs", mask="padding_mask")(model.flow.forward)
    return lambda length: infer(torch.randint(0, config.vocab_size, (1, length)))


def tokens(_: Workload, way: str) -> Infer:
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024)
    model = BertModel(config).eval()

    def infer(input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return result

    if way in BUCKETS:
        from modelguard.adapters.torch import bucketed

        infer = bucketed("input_ids", mask="attention_mask", cut=1, **BUCKETS[way])(infer)
    return lambda length: infer(torch.randint(0, config.vocab_size, (1, length)))


NETWORKS: dict[str, Callable[[Workload, str], Infer]] = {"vits": vits, "tokens": tokens}


def work(name: str, way: str, calls: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(2)
    torch.manual_seed(0)
    workload = WORKLOADS[name]
    infer = NETWORKS.get(name, stack)(workload, way)
    rng = random.Random(0)
    lengths = [rng.randint(workload.shortest, workload.longest) for _ in range(calls)]
    start, cpu, growth = private(), 0.0, [0.0]
    with torch.inference_mode():
        for first in range(0, calls, BLOCK):
            before = time.process_time()
            for length in lengths[first : first + BLOCK]:
                infer(length)
            if way == "trim":
                ctypes.CDLL(None).malloc_trim(0)
            cpu += time.process_time() - before
            growth.append(private() - start)
    return {"cpu": cpu, "growth": growth}


def private() -> float:
    return (memory.usage().private_dirty or 0) / MB


# Of all cells


@dataclass(frozen=True)
class Cell:
    """One remedy on one workload."""

    remedy: Remedy
    growth: list[float]
    cost: list[float]

    @property
    def point(self) -> tuple[float, float]:
        """Its price in CPU time, and its growth."""
        return statistics.median(self.cost), statistics.median(self.growth)

    def beats(self, other: Cell) -> bool:
        """Whether it is better by more than noise in one, and no worse in the other."""
        (cost, growth), (others_cost, others_growth) = self.point, other.point
        cheaper, smaller = others_cost - cost, others_growth - growth
        return min(cheaper, smaller) >= 0 and (cheaper > NOISE_PERCENT or smaller > NOISE_MB)


Cells = dict[str, Cell]


def cells(runs: dict[str, list[dict[str, Any]]], chosen: dict[str, Remedy]) -> Cells:
    def cost(name: str) -> list[float]:
        pairs = zip(runs[name], runs[NOTHING], strict=True)
        return [(run["cpu"] / other["cpu"] - 1) * 100 for run, other in pairs]

    return {name: Cell(chosen[name], [run["growth"][-1] for run in runs[name]], cost(name)) for name in runs}


def on_front(found: Cells) -> list[str]:
    return [name for name, cell in found.items() if not any(other.beats(cell) for other in found.values())]


def matrix(title: str, found: Cells) -> list[str]:
    front = on_front(found)
    header = (title, "MB grown", "CPU time", "")
    lines = [
        (
            cell.remedy.title,
            f"{cell.point[1]:+.0f}",
            f"{cell.point[0]:+.0f} %" if name != NOTHING else "",
            "on the Pareto front" if name in front else "",
        )
        for name, cell in found.items()
    ]
    return ["", *_common.table([header, *lines])]


def rows(found: Cells) -> list[_common.Row]:
    def of(name: str, growth: float | None = None, cost: float | None = None) -> list[_common.Row]:
        cell = found[name]
        title, ours = cell.remedy.title, cell.remedy.ours
        return [
            _common.Row(f"growth: {title}", cell.growth, "MB", growth, ours=ours),
            _common.Row(f"CPU time: {title}", cell.cost, "%", cost, ours=ours),
        ]

    peers = [row for name in (PRESET, NOTHING, "story") for row in of(name)]
    return of(BUCKETED, GROWTH_TARGET, COST_TARGET) + peers


def scatter(axes: Axes, title: str, found: Cells, letters: dict[str, str]) -> None:
    """A point for each remedy; :func:`key` explains the letters."""
    front = on_front(found)
    for name, cell in found.items():
        edge = "black" if name in front else "none"
        axes.scatter(*cell.point, s=40, color=colour_of(cell.remedy), edgecolors=edge, zorder=3)
    axes.set_title(title)
    axes.set_xlabel("difference in CPU time, %")
    axes.set_ylabel("growth, MB (above 10: logarithmic)")
    axes.margins(x=0.25, y=0.1)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_yticks(TICKS, map(str, TICKS))
    axes.set_ylim(0, 1.3 * max(cell.point[1] for cell in found.values()))
    _common.label(axes, [(*cell.point, letters.get(name, name)) for name, cell in found.items()])


def key(axes: Axes, chosen: dict[str, Remedy], letters: dict[str, str]) -> None:
    """What letters and colours mean."""
    lines = [(letters[name], remedy.title, colour_of(remedy)) for name, remedy in chosen.items()]
    notes = ("", "Blue: modelguard. Orange: everything else.", "Black edge: no other remedy is better in both.")
    lines += [("", note, "black") for note in notes]
    for place, (letter, text, colour) in enumerate(lines):
        for column, words in ((0.0, letter), (0.05 if letter else 0.0, text)):
            spot = (column, 1 - place / len(lines))
            axes.annotate(words, spot, xycoords="axes fraction", color=colour, va="top", fontsize=9)


def colour_of(remedy: Remedy) -> str:
    return _common.OURS if remedy.ours else _common.PEER


def paint(figure: Figure, found: dict[str, Cells], chosen: dict[str, Remedy]) -> None:
    panels = iter(figure.subplots(2, 4).flat)
    letters = dict(zip(chosen, string.ascii_uppercase, strict=False))
    for axes, (title, every) in zip(panels, found.items(), strict=False):
        if title == CAPPED:
            curve(axes, every)
        else:
            scatter(axes, title, every, letters if set(every) <= set(chosen) else {})
    for place, axes in enumerate(figure.axes[len(found) : 2 * 4]):
        if place == 0:
            key(axes, chosen, letters)
        axes.axis("off")


def curve(axes: Axes, found: Cells) -> None:
    measured = [str(cap) for cap in CAPS if str(cap) in found]
    points = [found[cap].point for cap in measured]
    places = range(len(measured))
    axes.plot(places, [growth for _, growth in points], color=_common.OURS, marker="o")
    axes.set_xticks(places, measured)
    axes.set_title(CAPPED)
    axes.set_xlabel("entries in each cache")
    axes.set_ylabel("growth, MB", color=_common.OURS)
    costs = axes.twinx()
    costs.plot(places, [cost for cost, _ in points], color=_common.PEER, marker="o")
    costs.set_ylabel("difference in CPU time, %", color=_common.PEER)
    costs.grid(visible=False)


def measure(workload: str, chosen: dict[str, Remedy], *, rounds: int, quick: bool) -> dict[str, list[dict[str, Any]]]:
    """Every remedy in every round, in a changing order, so that none always runs on the warmest machine."""
    calls = QUICK if quick else WORKLOADS[workload].calls
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    order = list(chosen)
    for number in range(rounds):
        for name in order:
            print(f"{workload}, round {number + 1} of {rounds}: {chosen[name].title} ...", flush=True)
            words = (workload, chosen[name].way, str(calls))
            runs[name].append(_common.fresh(__file__, *words, **chosen[name].variables))
        order = [*order[2:], *order[:2]]
    return runs


def main() -> None:
    benchmark = _common.Benchmark("torch_dynamic_shapes", "Story 2: memory and CPU time with inputs of many lengths")
    chosen = remedies()
    few = {name: chosen[name] for name in (NOTHING, BUCKETED)}
    nothing = {NOTHING: chosen[NOTHING]}
    # Without room for one entry ideep crashes torch 2.13 in its first convolution.
    ladder = nothing | {str(cap): Remedy(f"both caps {cap}", caps(cap, max(1, cap))) for cap in CAPS}
    buckets = nothing | {way: Remedy(way, way=way, ours=True) for way in BUCKETS}
    plans = {WORKLOADS[name].title: (name, chosen) for name in COMPARED}
    plans[CAPPED] = ("probe", ladder)
    plans |= {f"{WORKLOADS[name].title}, buckets": (name, buckets) for name in ("probe", "tokens")}
    plans |= {WORKLOADS[name].title: (name, allocators(chosen)) for name in ALLOCATORS}
    if benchmark.quick:  # a process each takes seconds to start
        plans = {WORKLOADS["probe"].title: ("probe", {name: chosen[name] for name in (*few, PRESET, "story")})}
        plans[WORKLOADS["tokens"].title] = ("tokens", few)
        ladder = {name: ladder[name] for name in (NOTHING, str(CAPS[-1]))}
        plans[CAPPED] = ("probe", ladder)
    runs, found = {}, {}
    for title, (name, compared) in plans.items():
        rounds = ALLOCATOR_ROUNDS if name in ALLOCATORS else ROUNDS if (name, compared) == ("probe", chosen) else 1
        rounds = 1 if benchmark.quick else rounds
        runs[title] = measure(name, compared, rounds=rounds, quick=benchmark.quick)
        found[title] = cells(runs[title], compared)

    notes = [line for title, every in found.items() for line in matrix(title, every)]
    lines = rows(found[WORKLOADS["probe"].title])
    shown = {title: every for title, every in found.items() if plans[title][0] not in ALLOCATORS}
    benchmark.finish(lines, lambda figure: paint(figure, shown, chosen), size=(20, 9), notes=notes, runs=runs)


if __name__ == "__main__":
    job = _common.job()
    if job is None:
        main()
    else:
        _common.answer(work(job[0], job[1], int(job[2])))
