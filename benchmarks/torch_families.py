"""Story 2 over families of models: what the preset's caps and ``bucketed`` save in memory and cost in CPU time, on CPU.

Five small networks with random weights: convolutions in 1-D and in 2-D, transposed convolutions, a BERT, and a VITS
with all its layers and narrow channels. Each meets one shape, twelve shapes that recur, or a new random length in each
call, in one thread.

Each cell runs in a process of its own, forked from one that has imported the libraries and not used them. A cell's CPU
time is that of its calls, the first included, which compiles. Growth is private dirty memory at the end compared with
that before the first call. "Held" is the same after the allocator has returned what is free: what the caches hold. The
remedies take turns in each round, and each is compared with doing nothing in the same round.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import _common

from modelguard import allocator, memory, presets

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    Infer = Callable[[torch.Tensor], Any]

MB = 1e6
ROUNDS = 3
QUICK_CALLS = 10
#: The target for the preset's CPU time over doing nothing, in %: the noise of a busy machine.
NOISE = 10.0
FEW = 12
TRAFFIC = ("one", "few", "many")
#: Entries in each of the two caches, to choose the default from.
LADDER = (64, 128, 256, 512)
CAPS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@dataclass(frozen=True)
class Family:
    """A network and its traffic.

    Attributes:
        title: What it is.
        calls: How many.
        shortest: The shortest length.
        longest: The longest length.
        make: Makes the network and its input of a length; the argument says whether it is called with buckets.
    """

    title: str
    calls: int
    shortest: int
    longest: int
    make: Callable[[bool], tuple[Infer, Callable[[int], torch.Tensor]]]


def with_buckets(infer: Infer, *, buckets: bool, cut: int | None = None) -> Infer:
    if not buckets:
        return infer
    from modelguard.adapters.torch import bucketed

    def call(x: torch.Tensor) -> Any:
        return infer(x)

    return bucketed("x", cut=cut)(call)


def conv1d(buckets: bool) -> tuple[Infer, Callable[[int], torch.Tensor]]:  # noqa: FBT001 - a cell's coordinate
    import torch

    layers = [torch.nn.Conv1d(64, 64, kernel, padding=kernel // 2) for kernel in (3, 5, 7, 11) * 2]
    infer = with_buckets(torch.nn.Sequential(*layers).eval(), buckets=buckets, cut=-1)
    return infer, lambda length: torch.randn(1, 64, length)


def conv2d(buckets: bool) -> tuple[Infer, Callable[[int], torch.Tensor]]:  # noqa: FBT001
    import torch

    layers = [torch.nn.Conv2d(16, 16, kernel, padding=kernel // 2) for kernel in (3, 5) * 3]
    infer = with_buckets(torch.nn.Sequential(*layers).eval(), buckets=buckets, cut=-1)
    return infer, lambda length: torch.randn(1, 16, 48, length)


def transposed(buckets: bool) -> tuple[Infer, Callable[[int], torch.Tensor]]:  # noqa: FBT001
    import torch

    shapes = ((16, 4), (8, 2), (4, 2), (3, 1), (5, 1), (7, 1))
    layers = [
        torch.nn.ConvTranspose1d(48, 48, kernel, stride=stride, padding=(kernel - stride) // 2)
        for kernel, stride in shapes
    ]
    infer = with_buckets(torch.nn.Sequential(*layers).eval(), buckets=buckets, cut=-1)
    return infer, lambda length: torch.randn(1, 48, length)


def attention(buckets: bool) -> tuple[Infer, Callable[[int], torch.Tensor]]:  # noqa: FBT001
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512)
    config.max_position_embeddings = 1024  # the longest bucket is longer than the longest text
    model = BertModel(config).eval()

    def infer(x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        return model(input_ids=x, attention_mask=mask).last_hidden_state

    if buckets:
        from modelguard.adapters.torch import bucketed

        infer = bucketed("x", mask="mask", cut=1)(infer)
    return infer, lambda length: torch.randint(0, 1000, (1, length))


def vits(buckets: bool) -> tuple[Infer, Callable[[int], torch.Tensor]]:  # noqa: FBT001
    import torch
    from transformers import VitsConfig, VitsModel

    config = VitsConfig(hidden_size=64, ffn_dim=128, flow_size=64, spectrogram_bins=129, upsample_initial_channel=32)
    model = VitsModel(config).eval()

    def infer(x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        torch.manual_seed(0)  # the durations, and so the shapes inside, are drawn
        return model(input_ids=x, attention_mask=mask).waveform

    if buckets:
        from modelguard.adapters.torch import bucketed

        infer = bucketed("x", mask="mask", cut=None)(infer)
    return infer, lambda length: torch.randint(
        0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length)
    )


FAMILIES = {
    "conv1d": Family("8 x Conv1d", 200, 200, 2000, conv1d),
    "conv2d": Family("6 x Conv2d", 150, 40, 400, conv2d),
    "transposed": Family("6 x ConvTranspose1d", 200, 20, 400, transposed),
    "attention": Family("BERT, 4 layers", 200, 5, 500, attention),
    "vits": Family("VITS, narrow", 40, 10, 60, vits),
}


@dataclass(frozen=True)
class Remedy:
    """Entries of both caches, None for torch's own; and whether inputs are padded to buckets."""

    title: str
    entries: int | None = None
    buckets: bool = False
    ours: bool = False


def remedies() -> dict[str, Remedy]:
    """What is compared."""
    entries = int(presets.get("torch-cpu-dynamic", cpus=1).environment({})[CAPS[0]])
    return {
        "nothing": Remedy("nothing"),
        "preset": Remedy(f"preset torch-cpu-dynamic ({entries})", entries, ours=True),
        "buckets": Remedy("bucketed", buckets=True, ours=True),
        "both": Remedy("both", entries, buckets=True, ours=True),
        **{f"caps {cap}": Remedy(f"both caps {cap}", cap) for cap in LADDER if cap != entries},
    }


Result = dict[str, float]


def work(family: Family, traffic: str, remedy: Remedy, calls: int) -> Result:
    """One cell: the calls of a traffic."""
    import torch

    for name in CAPS if remedy.entries is not None else ():
        os.environ[name] = str(remedy.entries)  # read at the first convolution
    torch.set_num_threads(1)
    torch.manual_seed(0)
    infer, inputs = family.make(remedy.buckets)
    rng = random.Random(0)
    few = [rng.randint(family.shortest, family.longest) for _ in range(FEW)]
    lengths = {
        "one": [(family.shortest + family.longest) // 2] * calls,
        "few": [few[call % FEW] for call in range(calls)],
        "many": [rng.randint(family.shortest, family.longest) for _ in range(calls)],
    }[traffic]
    held, started = private(), time.process_time()
    with torch.inference_mode():
        for length in lengths:
            infer(inputs(length))
    cpu, growth = time.process_time() - started, private() - held
    allocator.trim()
    return {"cpu": cpu, "growth": growth, "held": private() - held}


def private() -> float:
    return (memory.usage().private_dirty or 0) / MB


def forked(family: Family, traffic: str, remedy: Remedy, calls: int) -> Result:
    """The result of a cell, from a child process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(writing, json.dumps(work(family, traffic, remedy, calls)).encode())
            status = 0
        except Exception:  # noqa: BLE001 - the child must not go on with its parent's work
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as stream:
        answer = stream.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"{family.title}, {traffic}, {remedy.title}: the process has failed")
    result: Result = json.loads(answer)
    return result


Runs = dict[str, list[Result]]


def cost(runs: Runs, name: str) -> list[float]:
    """CPU time over doing nothing in the same round, in %."""
    return [(one["cpu"] / nothing["cpu"] - 1) * 100 for one, nothing in zip(runs[name], runs["nothing"], strict=True)]


def median(runs: Runs, name: str, what: str) -> float:
    return statistics.median(result[what] for result in runs[name])


def table(found: dict[tuple[str, str], Runs], chosen: dict[str, Remedy]) -> list[str]:
    """Growth and CPU time of each cell."""
    lines = [("network", "shapes", *(remedy.title for remedy in chosen.values()))]
    for (family, traffic), runs in found.items():
        cells = [
            f"{median(runs, name, 'growth'):.0f} MB ({median(runs, name, 'held'):.0f})"
            + ("" if name == "nothing" else f", {statistics.median(cost(runs, name)):+.0f} %")
            for name in chosen
        ]
        lines.append((FAMILIES[family].title, traffic, *cells))
    return ["", "Growth in MB (held after a trim), and CPU time over doing nothing:", "", *_common.table(lines)]


def draw(figure: Figure, found: dict[tuple[str, str], Runs], chosen: dict[str, Remedy]) -> None:
    ours = [name for name, remedy in chosen.items() if remedy.ours]
    places = range(len(found))
    labels = [f"{FAMILIES[family].title}, {traffic}" for family, traffic in found]
    colours = (_common.OURS, _common.THIRD, _common.FIFTH)
    left, right = figure.subplots(1, 2, sharey=True)
    for number, name in enumerate(["nothing", *ours]):
        colour = _common.PEER if name == "nothing" else colours[number - 1]
        heights = [place + 0.2 * number for place in places]
        left.barh(heights, [median(runs, name, "growth") for runs in found.values()], 0.18, color=colour)
        shares = [statistics.median(cost(runs, name)) for runs in found.values()]
        right.barh(heights, shares, 0.18, color=colour, label=chosen[name].title)
    left.set_yticks([place + 0.3 for place in places], labels)
    left.invert_yaxis()
    left.set_title("growth, MB")
    right.set_title("CPU time over doing nothing, %")
    right.legend()


def main() -> None:
    benchmark = _common.Benchmark("torch_families", "Story 2 over families of models: memory and CPU time")
    import transformers.models.bert.modeling_bert
    import transformers.models.vits.modeling_vits  # noqa: F401 - imported once, for all cells

    chosen = remedies()
    rounds = 1 if benchmark.quick else ROUNDS
    found: dict[tuple[str, str], Runs] = {}
    for name, family in FAMILIES.items():
        calls = QUICK_CALLS if benchmark.quick else family.calls
        for traffic in TRAFFIC:
            print(f"{family.title}, {traffic} ...", flush=True)
            runs = found[name, traffic] = {each: [] for each in chosen}
            for _ in range(rounds):
                for each, remedy in chosen.items():
                    runs[each].append(forked(family, traffic, remedy, calls))
    rows = [
        _common.Row(
            f"CPU time, preset, one shape: {family.title}", cost(found[name, "one"], "preset"), "%", NOISE, ours=True
        )
        for name, family in FAMILIES.items()
    ]
    data = {f"{family}, {traffic}": runs for (family, traffic), runs in found.items()}
    notes = table(found, chosen)
    benchmark.finish(rows, lambda figure: draw(figure, found, chosen), size=(14, 10), notes=notes, runs=data)


if __name__ == "__main__":
    main()
