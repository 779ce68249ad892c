"""What the presets for GPUs change: calls with inputs of many sizes, on a real GPU. It needs one.

An encoder of twelve layers (random weights, half precision) gets batches of random size and length, for which its
tensors take 410 MB at most. Each cell runs in a process of its own, within ``--megabytes`` of the GPU. With 4,000 there
is room for everything that torch keeps; with 500, holes between blocks make calls fail.
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
WIDTH = 768
ASYNC = "backend:cudaMallocAsync"
RECLAIMING = "garbage_collection_threshold:0.8"
EAGER = "CUDA_MODULE_LOADING=EAGER"
NOTHING = "nothing"


def ways() -> dict[str, dict[str, str]]:
    """Each remedy, and its environment variables."""
    return {
        NOTHING: {},
        "torch-cuda-dynamic": presets.get("torch-cuda-dynamic").environment({}),
        RECLAIMING: {"PYTORCH_ALLOC_CONF": RECLAIMING},
        ASYNC: {"PYTORCH_ALLOC_CONF": ASYNC},
        EAGER: {"CUDA_MODULE_LOADING": "EAGER"},
    }


def work(calls: int, part: float) -> dict[str, Any]:
    """One cell, within ``part`` bytes of the GPU."""
    import torch

    started = time.perf_counter()
    torch.cuda.set_per_process_memory_fraction(part / torch.cuda.get_device_properties(0).total_memory)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, batch_first=True, dtype=torch.half, device="cuda")
    net = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
    torch.cuda.synchronize()
    start = time.perf_counter() - started
    free = torch.cuda.mem_get_info()[0]
    dice, seconds, failed = random.Random(0), [], 0
    with torch.inference_mode():
        for _ in range(calls):
            rows, length = dice.randint(1, 32), dice.randint(8, 512)
            before = time.perf_counter()
            try:
                net(torch.randn(rows, length, WIDTH, dtype=torch.half, device="cuda")).sum().item()
            except torch.OutOfMemoryError:
                failed += 1
            seconds.append(time.perf_counter() - before)
    return {
        "start": start,
        "first": seconds[0],
        "total": sum(seconds[1:]),
        "p99": statistics.quantiles(seconds[1:], n=100)[98],
        "reserved": torch.cuda.max_memory_reserved() / MB,
        "allocated": torch.cuda.max_memory_allocated() / MB,
        "taken": (free - torch.cuda.mem_get_info()[0]) / MB,
        "failed": failed,
    }


def main() -> None:
    """Measure all, and say what each one changes."""
    title = "Presets for GPUs: memory and time with inputs of many sizes"
    benchmark = _common.Benchmark("gpu_presets", title, megabytes=4000)
    calls, rounds = (QUICK, 1) if benchmark.quick else (CALLS, ROUNDS)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways()}
    for _ in range(rounds):
        for name, variables in ways().items():
            runs[name].append(_common.fresh(__file__, str(calls), str(benchmark.counts["megabytes"]), **variables))
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
            ("failed", "calls", [run["failed"] for run in runs[name]]),
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
        _common.answer(work(int(job[0]), int(job[1]) * MB))
