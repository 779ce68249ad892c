"""What the presets for GPUs change: calls with inputs of many sizes, on a real GPU. It needs one.

An encoder of twelve layers (random weights, half precision) gets batches of random size and length. Each cell runs in a
process of its own, within 4 GB of the GPU: what torch reserves beyond its tensors, and how often the driver is asked
for memory, is what the allocator's settings decide. The first call includes loading GPU code, which
``CUDA_MODULE_LOADING`` moves to the start.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import _common

from modelguard import presets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALLS, QUICK, ROUNDS = 150, 20, 3
MB = 1e6
#: What each process may take of the GPU.
PART = 4e9
WIDTH = 768
ASYNC = "backend:cudaMallocAsync"
NOTHING = "nothing"


def ways() -> dict[str, dict[str, str]]:
    """Each remedy, and its environment variables."""
    named = ("torch-cuda-dynamic", "torch-cuda-latency")
    found = {NOTHING: {}, **{name: presets.get(name).environment({}) for name in named}}
    return {**found, ASYNC: {"PYTORCH_ALLOC_CONF": ASYNC}}


def work(calls: int) -> dict[str, Any]:
    """One cell."""
    import torch

    started = time.perf_counter()
    torch.cuda.set_per_process_memory_fraction(PART / torch.cuda.get_device_properties(0).total_memory)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True, dtype=torch.half, device="cuda")
    net = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
    torch.cuda.synchronize()
    start = time.perf_counter() - started
    free = torch.cuda.mem_get_info()[0]
    dice, seconds = random.Random(0), []
    with torch.inference_mode():
        for _ in range(calls):
            rows, length = dice.randint(1, 32), dice.randint(8, 512)
            before = time.perf_counter()
            net(torch.randn(rows, length, WIDTH, dtype=torch.half, device="cuda")).sum().item()
            seconds.append(time.perf_counter() - before)
    figures = torch.cuda.memory_stats()
    return {
        "start": start,
        "first": seconds[0],
        "total": sum(seconds[1:]),
        "p99": statistics.quantiles(seconds[1:], n=100)[98],
        "reserved": torch.cuda.max_memory_reserved() / MB,
        "allocated": torch.cuda.max_memory_allocated() / MB,
        "taken": (free - torch.cuda.mem_get_info()[0]) / MB,
        "retries": figures.get("num_alloc_retries", 0),
    }


def main() -> None:
    """Measure all, and say what each one changes."""
    benchmark = _common.Benchmark("gpu_presets", "Presets for GPUs: memory and time with inputs of many sizes")
    calls, rounds = (QUICK, 1) if benchmark.quick else (CALLS, ROUNDS)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways()}
    for _ in range(rounds):
        for name, variables in ways().items():
            runs[name].append(_common.fresh(__file__, str(calls), **variables))
            print(name, {key: round(value, 3) for key, value in runs[name][-1].items()}, flush=True)

    def ratio(name: str, key: str) -> list[float]:
        return [run[key] / other[key] for run, other in zip(runs[name], runs[NOTHING], strict=True)]

    rows = [
        _common.Row(f"{title}: {name}", values, unit, ours=name.startswith("torch-"))
        for name in runs
        for title, unit, values in (
            ("reserved at most", "MB", [run["reserved"] for run in runs[name]]),
            ("time of all calls, over nothing", "x", ratio(name, "total")),
            ("p99, over nothing", "x", ratio(name, "p99")),
            ("start", "s", [run["start"] for run in runs[name]]),
            ("first call", "s", [run["first"] for run in runs[name]]),
        )
    ]

    def draw(figure: Figure) -> None:
        memory, times = figure.subplots(1, 2)
        _common.bars(memory, [row for row in rows if row.unit == "MB"], "Reserved at most", axis="MB")
        _common.bars(times, [row for row in rows if row.unit == "x"], "Time, over doing nothing", axis="x")

    benchmark.finish(rows, draw, size=(16, 5), runs=runs)


if __name__ == "__main__":
    job = _common.job()
    if job is None:
        main()
    else:
        _common.answer(work(int(job[0])))
