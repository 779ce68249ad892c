"""Fair shares under load: greedy and polite callers in threads and tasks, with everything that can go wrong."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from modelguard import Weight, batched
from modelguard.errors import DeadlineExceeded, Overloaded
from modelguard.serving import caller

pytestmark = pytest.mark.timeout(120)

GREEDY, POLITE = 3, 4
#: Calls of each polite caller; the greedy ones go on until these have ended.
CALLS = 150


def compute(items: list[tuple[str, int]]) -> list[Any]:
    time.sleep(0.0005)
    return [ValueError(item) if item[1] % 97 == 0 else item for item in items]


class Results:
    """What the callers got, and whether anything was wrong."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def note(self, item: tuple[str, int], found: Any) -> None:
        with self.lock:
            if isinstance(found, BaseException):
                expected = isinstance(found, Overloaded | DeadlineExceeded | CancelledError | asyncio.CancelledError)
                own = isinstance(found, ValueError) and found.args == (item,)
                self.counts[type(found).__name__] += 1
                if not (expected or own):
                    self.wrong.append(f"{item}: {found!r}")
            else:
                self.counts["result"] += 1
                if found != item:
                    self.wrong.append(f"{item}: {found!r}")


def greedy(f: Any, name: str, results: Results, over: threading.Event) -> int:
    """Keep the queue full with futures, some cancelled, some with too little time. Returns how many were made."""
    dice, number = random.Random(name), 0
    waiting: list[tuple[tuple[str, int], Future[Any]]] = []

    def settle(most: int) -> None:
        while len(waiting) > most:
            item, future = waiting.pop(0)
            try:
                results.note(item, future.result(60))
            except (Exception, CancelledError) as error:  # noqa: BLE001 - judged there
                results.note(item, error)

    while not over.is_set():
        number += 1
        item = name, number
        try:
            with caller(name, priority=dice.choice([0, 0, 2])):
                waiting.append((item, f.submit(item, timeout=dice.choice([None, 0.002, 1.0]), lane=number % 2)))
        except Exception as error:  # noqa: BLE001 - judged there
            results.note(item, error)
            settle(len(waiting) // 2)
        if waiting and dice.random() < 0.1:
            dice.choice(waiting)[1].cancel()
        settle(200)
    settle(0)
    return number


async def polite(f: Any, name: str, results: Results) -> None:
    """One call after another, now and then a cancelled one."""
    dice = random.Random(name)
    with caller(name):
        for number in range(1, CALLS + 1):
            task = asyncio.create_task(f.aio((name, number), lane=number % 2))
            if dice.random() < 0.1:
                await asyncio.sleep(0)
                task.cancel()
            try:
                results.note((name, number), await task)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - judged there
                results.note((name, number), error)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_polite_callers_are_always_served(padded: bool) -> None:  # noqa: FBT001 - pytest passes it
    """Beside greedy ones that keep the queue full, no polite call is refused; every call gets one outcome, its own."""

    def run(items: list[tuple[str, int]], *, lane: int = 0) -> list[Any]:
        del lane
        return compute(items)

    weight = Weight(of=lambda item: 1 + item[1] % 50, padded=True) if padded else None
    f = batched(max_size=8, max_queue=64, threads=2, weight=weight)(run)
    over, crowd, courtesy = threading.Event(), Results(), Results()
    made: list[int] = []
    threads = [
        threading.Thread(target=lambda name=f"greedy-{n}": made.append(greedy(f, name, crowd, over)))
        for n in range(GREEDY)
    ]
    for thread in threads:
        thread.start()

    async def main() -> None:
        await asyncio.gather(*(polite(f, f"polite-{n}", courtesy) for n in range(POLITE)))

    try:
        asyncio.run(main())
    finally:
        over.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a call was lost"
    assert [] == crowd.wrong + courtesy.wrong
    assert {*courtesy.counts} <= {"result", "ValueError", "CancelledError"}, courtesy.counts
    assert POLITE * CALLS == courtesy.counts.total()
    assert sum(made) == crowd.counts.total()
    refused = crowd.counts["QueueFull"] + crowd.counts["DeadlineUnreachable"]  # which, the machine's speed decides
    assert refused, crowd.counts
    f.close()
    status = f.status()
    assert (0, 0) == (status.waiting, status.running)
    told = status.answered + status.failed + status.expired + status.cancelled
    assert sum(made) + POLITE * CALLS == told + status.refused_full + status.refused_late
