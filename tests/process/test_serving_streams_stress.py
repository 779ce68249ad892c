"""Streams under chaos: threads and event loops, consumers that leave, are slow or late, functions that fail."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.process.harness import wait_until

from modelguard import Buffer, batched, guard
from modelguard.errors import BatchFailed, ConsumerTooSlow, DeadlineExceeded, Overloaded
from modelguard.serving import BatchedStream

pytestmark = pytest.mark.timeout(180)

#: Consumers of each kind, and streams of each consumer.
THREADS, LOOPS, TASKS, STREAMS = 6, 2, 12, 60
#: What may happen to a stream: its consumer takes it whole, leaves, or is slow; its item fails; its time runs out.
FATES = ("whole", "whole", "whole", "leaves", "slow", "bad", "late")


class BadItemError(Exception):
    """What the function yields for a bad item."""


def a_step(items: list[dict[str, Any]], number: int, chance: random.Random) -> list[Any]:
    """The parts of one step: each item has its own count of them."""
    if chance.random() < 0.003:
        raise OSError("the device is gone")
    return [
        StopIteration
        if number >= item["parts"]
        else BadItemError()
        if item["fate"] == "bad" and number == item["parts"] - 1
        else (item["number"], number)
        for item in items
    ]


def plain(model: random.Random, items: list[dict[str, Any]]) -> Iterator[list[Any]]:
    for number in range(1000):
        yield a_step(items, number, model)


async def later(model: random.Random, items: list[dict[str, Any]]) -> AsyncIterator[list[Any]]:
    for number in range(1000):
        await asyncio.sleep(0)
        yield a_step(items, number, model)


class Consumers:
    """All consumers, and what became of their streams."""

    def __init__(self, f: BatchedStream[Any, Any], seed: int) -> None:
        self.f = f
        self.chance = random.Random(seed)
        self.lock = threading.Lock()
        self.number = 0
        self.ends: Counter[str] = Counter()
        self.wrong: list[Any] = []

    def item(self) -> dict[str, Any]:
        with self.lock:
            self.number += 1
            return {
                "number": self.number,
                "parts": self.chance.randrange(1, 40),
                "fate": self.chance.choice(FATES),
                "timeout": self.chance.uniform(0.0005, 0.01),
                "leaves": self.chance.randrange(1, 20),
            }

    def check(self, item: dict[str, Any], parts: list[Any], end: str) -> None:
        whole = [(item["number"], at) for at in range(item["parts"])]
        if item["fate"] == "bad":
            whole.pop()
        complete = end in ("end", "BadItemError")
        with self.lock:
            self.ends[end] += 1
            if parts != whole[: len(parts)] or (complete and parts != whole):
                self.wrong.append((item, parts, end))

    def thread(self) -> None:
        for _ in range(STREAMS):
            item, parts, end = self.item(), [], "end"
            try:
                stream = self.f.stream(item, timeout=item["timeout"] if item["fate"] == "late" else None)
                for part in stream:
                    parts.append(part)
                    if item["fate"] == "slow":
                        time.sleep(0.002)
                    if item["fate"] == "leaves" and len(parts) == item["leaves"]:
                        end = "left"
                        break
                del stream
            except (BadItemError, BatchFailed, ConsumerTooSlow, DeadlineExceeded, Overloaded, OSError) as error:
                end = type(error).__name__
            self.check(item, parts, end)

    async def task(self) -> None:
        for _ in range(STREAMS):
            item, parts = self.item(), list[Any]()
            limit = item["timeout"] if item["fate"] == "leaves" else None
            try:
                async with asyncio.timeout(limit):
                    end = await self.consume(item, parts)
            except TimeoutError:
                end = "cancelled"
            self.check(item, parts, end)

    async def consume(self, item: dict[str, Any], parts: list[Any]) -> str:
        try:
            async for part in self.f.stream(item, timeout=item["timeout"] if item["fate"] == "late" else None):
                parts.append(part)
                if item["fate"] == "slow":
                    await asyncio.sleep(0.002)
        except (BadItemError, BatchFailed, ConsumerTooSlow, DeadlineExceeded, Overloaded, OSError) as error:
            return type(error).__name__
        return "end"

    def loop(self) -> None:
        async def all_tasks() -> None:
            await asyncio.gather(*(self.task() for _ in range(TASKS)))

        asyncio.run(all_tasks())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("function", [plain, later])
def test_every_consumer_gets_its_own_parts(function: Any, threads: int) -> None:
    """In order, each once, whole if its stream ended; afterwards nothing runs, waits, or holds the model."""
    model = guard(lambda: random.Random(1), reload_on=None, name="chaos")
    patience = Buffer(parts=4, slow_after="5ms")
    f: Any = batched(max_size=8, max_queue=1000, threads=threads, buffer=patience)(model(function))
    consumers = Consumers(f, seed=threads)
    workers = [threading.Thread(target=consumers.thread) for _ in range(THREADS)]
    workers += [threading.Thread(target=consumers.loop) for _ in range(LOOPS)]
    for worker in workers:
        worker.start()
    reloads = 0
    while any(worker.is_alive() for worker in workers):
        model.reload()
        reloads += 1
        time.sleep(0.05)
    assert [] == consumers.wrong
    assert (THREADS + LOOPS * TASKS) * STREAMS == consumers.ends.total()
    assert consumers.ends["end"] > 0 < consumers.ends["BadItemError"], consumers.ends
    assert reloads > 0
    gc.collect()
    wait_until(lambda: (f.status().running, f.status().waiting, model.status().in_flight) == (0, 0, 0), "all is freed")
    status = f.status()
    refused = status.refused_full + status.refused_late + status.refused_open
    counted = status.answered + status.failed + status.expired + status.cancelled
    assert consumers.ends.total() == counted + refused, (status, consumers.ends)
    f.close()
