"""``batched`` under load: threads, tasks and futures together, and everything fails at once that can fail."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from modelguard import AutoSize, batched
from modelguard.errors import DeadlineExceeded, GuardClosed, InvalidOption, Overloaded
from modelguard.serving import _batcher

pytestmark = pytest.mark.timeout(120)

ITEMS = 100_000
THREADS = 4
TASKS = 300


class Bad(Exception):
    """What a bad item raises."""


class Model:
    """Answers an item with itself; raises on bad ones; returns errors for others; is slow from time to time."""

    def __init__(self, most: int = 32) -> None:
        self.most = most
        self.random = random.Random(1)
        self.batches = 0
        self.seen: Counter[int] = Counter()

    def __call__(self, items: list[int], *, lane: int = 0) -> list[Any]:
        self.batches += 1
        assert 0 < len(items) <= self.most
        assert None not in items, "an item that was let go"
        self.seen.update(items)
        if self.random.random() < 0.02:
            time.sleep(0.003)
        if any(item % 997 == 0 for item in items):
            raise Bad(*items)
        return [Bad(item) if item % 499 == 0 else (item, lane) for item in items]


class Results:
    """What the callers got."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def result(self, item: int, lane: int, found: Any) -> None:
        with self.lock:
            self.counts["result"] += 1
            if found != (item, lane) or not item % 997 or not item % 499:
                self.wrong.append(f"{item}: {found}")

    def error(self, item: int, error: BaseException) -> None:
        kind = type(error).__name__
        with self.lock:
            self.counts[kind] += 1
            expected = (Overloaded, DeadlineExceeded, GuardClosed, CancelledError, asyncio.CancelledError)
            pinned = isinstance(error, Bad) and item in error.args and (not item % 997 or not item % 499)
            if not pinned and not isinstance(error, expected):
                self.wrong.append(f"{item}: {error!r}")


def in_threads(f: Any, results: Results, numbers: list[int]) -> None:
    """Blocking calls, some with too little time."""
    dice = random.Random(numbers[0])
    for item in numbers:
        lane = item % 3
        try:
            timeout = dice.choice([None, None, 0.0005, 1.0])
            results.result(item, lane, f(item, timeout=timeout, lane=lane) if lane else (f(item, timeout=timeout)))
        except Exception as error:  # noqa: BLE001 - judged there
            results.error(item, error)


def in_futures(f: Any, results: Results, numbers: list[int]) -> None:
    """Futures, some of which are cancelled; never more under way than a quarter of the queue."""
    dice = random.Random(numbers[0])
    waiting: list[tuple[int, Future[Any]]] = []

    def collect() -> None:
        for item, future in waiting:
            try:
                results.result(item, 0, future.result(60))
            except (Exception, CancelledError) as error:  # noqa: BLE001 - judged there
                results.error(item, error)
        waiting.clear()

    for item in numbers:
        try:
            waiting.append((item, f.submit(item)))
        except Exception as error:  # noqa: BLE001 - judged there
            results.error(item, error)
        if waiting and dice.random() < 0.1:
            dice.choice(waiting)[1].cancel()
        if len(waiting) >= 64:
            collect()
    collect()


async def in_tasks(f: Any, results: Results, numbers: list[int]) -> None:
    """Tasks, some of which are cancelled while they wait or are computed."""
    dice = random.Random(numbers[0])
    left = iter(numbers)

    async def one(item: int) -> None:
        try:
            results.result(item, 0, await f.aio(item, timeout=dice.choice([None, None, 0.001])))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - judged there
            results.error(item, error)

    async def client() -> None:
        for item in left:
            task = asyncio.create_task(one(item))
            await asyncio.sleep(0)
            if dice.random() < 0.1:
                task.cancel()
            await task

    await asyncio.gather(*(client() for _ in range(TASKS)))


def test_no_call_is_lost_or_gets_the_answer_of_another() -> None:
    """100,000 items in all ways, with cancellations, deadlines and failing items, and then a close."""
    model, results = Model(), Results()
    f = batched(max_size=32, max_queue=512, threads=2)(model)
    numbers = list(range(1, ITEMS + 1))
    half = ITEMS // 2
    shares = [numbers[half + n : ITEMS : THREADS] for n in range(THREADS)]
    threads = [threading.Thread(target=in_threads, args=(f, results, share)) for share in shares[:2]]
    threads += [threading.Thread(target=in_futures, args=(f, results, share)) for share in shares[2:]]
    for thread in threads:
        thread.start()
    asyncio.run(in_tasks(f, results, numbers[:half]))
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a call was lost"
    assert [] == results.wrong
    assert ITEMS == sum(results.counts.values())
    f.close()  # what was called off while it was computed may be computed still
    status = f.status()
    assert (0, 0) == (status.waiting, status.running)
    told = status.answered + status.failed + status.expired + status.cancelled
    assert ITEMS == told + status.refused_full + status.refused_late
    assert results.counts["result"] > ITEMS / 2
    assert all(results.counts[kind] for kind in ("Bad", "DeadlineExceeded", "CancelledError")), results.counts
    with pytest.raises(GuardClosed):
        f(1)


def test_options_that_change_under_load_lose_no_call() -> None:
    """Sizes, waits, queue and deadline change a thousand times while items come in all ways: each is answered once."""
    model, results = Model(most=512), Results()
    f = batched(max_size=32, max_queue=512, threads=2)(model)
    numbers = list(range(1, 24_001))
    threads = [threading.Thread(target=in_threads, args=(f, results, numbers[n:12_000:2])) for n in range(2)]
    threads.append(threading.Thread(target=in_futures, args=(f, results, numbers[12_000:16_000])))
    done = threading.Event()
    changes = 0

    def change() -> None:
        nonlocal changes
        dice = random.Random(7)
        while not done.is_set() or changes < 1000:
            size: dict[str, Any] = dice.choice([{"max_size": dice.randint(1, 32)}, {"max_size": AutoSize(slo=1.0)}])
            f.configure(
                **size,
                max_queue=dice.choice([32, 512]),
                max_wait=dice.choice([0, 0, 0.001]),
                deadline=dice.choice([None, None, 30.0]),
            )
            changes += 1
            if dice.random() < 0.05:
                with pytest.raises(InvalidOption):
                    f.configure(max_size=8, max_wait=-1)

    def of_a_loop(share: list[int]) -> None:
        asyncio.run(in_tasks(f, results, share))

    threads += [threading.Thread(target=of_a_loop, args=(numbers[n:24_000:2],)) for n in (16_000, 16_001)]
    changing = threading.Thread(target=change)
    for thread in (changing, *threads):
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a call was lost"
    done.set()
    changing.join(100)
    assert [] == results.wrong
    assert len(numbers) == sum(results.counts.values())
    f.close()
    status = f.status()
    assert (0, 0) == (status.waiting, status.running)
    assert len(numbers) == sum(
        (status.answered, status.failed, status.expired, status.cancelled, status.refused_full, status.refused_late)
    )
    assert results.counts["result"] > len(numbers) / 4


def test_plain_calls_of_an_event_loop_are_all_answered_while_threads_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are queued without a lock, also when a thread that computes is about to wait or to end."""
    monkeypatch.setattr(_batcher, "LINGER", 0.0005)
    f = batched(max_size=4, threads=2)(lambda items: items)

    async def client(numbers: range) -> None:
        for number in numbers:
            assert number == await f.aio(number)
            if not number % 7:
                await asyncio.sleep(0.0005)

    async def clients(start: int) -> None:
        await asyncio.gather(*(client(range(start + n, start + 9_000, 3)) for n in range(3)))

    threads = [threading.Thread(target=asyncio.run, args=(clients(start),)) for start in (0, 10_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a call was lost"
    assert 18_000 == f.status().answered
    f.close()


class Echo:
    """Its queue gives its thread away as soon as it has no work."""

    @batched(max_size=4)
    def echo(self, items: list[int]) -> list[int]:
        return items


def test_plain_calls_of_a_method_are_all_answered_while_its_thread_comes_and_goes() -> None:
    """A call that is queued while the thread ends is seen by it."""
    echo = Echo().echo

    async def client(numbers: range) -> None:
        for number in numbers:
            assert number == await echo.aio(number)

    async def clients(start: int) -> None:
        await asyncio.gather(*(client(range(start + n, start + 3_000, 3)) for n in range(3)))

    threads = [threading.Thread(target=asyncio.run, args=(clients(start),)) for start in (0, 10_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a call was lost"
    assert 6_000 == echo.status().answered


def test_a_close_in_the_middle_of_traffic_answers_every_call() -> None:
    """Each gets a result or ``GuardClosed``."""
    for _ in range(20):
        results = Results()
        f = batched(max_size=8, threads=2)(Model())
        threads = [
            threading.Thread(target=in_threads, args=(f, results, list(range(n * 997 + 1, n * 997 + 400))))
            for n in range(3)
        ]
        for thread in threads:
            thread.start()
        f.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert [] == results.wrong
        assert 3 * 399 == sum(results.counts.values())


def in_child(work: Callable[[], None]) -> int:
    """Fork, work, and give the child's exit status."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            work()
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_forked_child_begins_with_an_empty_queue() -> None:
    """What waits in the parent is answered there; the child has threads, a queue and counts of its own."""
    gate = threading.Event()

    def run(items: list[int]) -> list[int]:
        if os.getpid() == parent:
            gate.wait(30)
        return [os.getpid() for _ in items]

    parent = os.getpid()
    f = batched(max_size=4, deadline="1m")(run)
    futures = [f.submit(n) for n in range(10)]

    def child() -> None:
        assert 0 == f.status().waiting + f.status().running + f.status().batches
        assert os.getpid() == f(1)
        assert os.getpid() == asyncio.run(f.aio(1))
        f.close()

    for _ in range(5):
        assert 0 == in_child(child)
    gate.set()
    assert {parent} == {future.result(30) for future in futures}


@pytest.mark.timeout(60)
def test_a_child_that_is_forked_in_a_callback_can_call_the_function() -> None:
    """The callback runs in a thread of the parent's batcher; that of the child has one of its own."""
    gate = threading.Event()

    def run(items: list[int]) -> list[int]:
        gate.wait(30)
        return items

    def child() -> None:
        signal.alarm(20)
        assert 2 == f(2)

    f, ended = batched(max_size=4)(run), Future[int]()
    future = f.submit(1)
    future.add_done_callback(lambda _: ended.set_result(in_child(child)))
    gate.set()
    assert 0 == ended.result(40)


class Doubling:
    @batched(max_size=4)
    def double(self, items: list[int]) -> list[int]:
        return [2 * item for item in items]


def test_a_forked_child_can_use_batched_methods() -> None:
    """Even if another thread of the parent was making the queue of an instance during the fork."""

    def child() -> None:
        signal.alarm(20)
        assert 6 == Doubling().double(3)

    held, fork_done = threading.Event(), threading.Event()

    def hold() -> None:
        with importlib.import_module("modelguard.serving.batched")._lock:
            held.set()
            fork_done.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(30)
    try:
        assert 0 == in_child(child)
    finally:
        fork_done.set()
        thread.join(30)
    assert 6 == Doubling().double(3)


def echo(items: list[int]) -> list[int]:
    return items


shared = batched(max_size=4)(echo)
shared.__qualname__ = "shared"


def test_it_works_in_a_pool_of_forked_processes() -> None:
    """As multiprocessing makes them, while the parent uses it as well."""
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            shared(1)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        with multiprocessing.get_context("fork").Pool(3) as pool:
            assert list(range(30)) == pool.map_async(shared, range(30)).get(60)
    finally:
        stop.set()
        thread.join(30)


def python(code: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_an_idle_batcher_costs_no_cpu() -> None:
    """No thread wakes up again and again while nothing waits."""
    done = python("""
        import time
        from contextlib import suppress
        from modelguard import AutoSize, batched
        from modelguard.errors import ModelGuardError
        f = batched(max_size=4, max_wait="1ms", deadline="50ms", threads=2)(lambda items: items)
        for n in range(100):
            with suppress(ModelGuardError):  # on a busy machine some are late
                f(n)
        time.sleep(0.2)
        before = time.process_time()
        time.sleep(3)
        print(time.process_time() - before)
    """)
    assert "" == done.stderr
    assert float(done.stdout) < 0.015


def test_the_interpreter_ends_although_items_are_under_way() -> None:
    """Without a traceback and without waiting for the model."""
    done = python(
        """
        import time
        from modelguard import AutoSize, batched
        f = batched(max_size=1, deadline="1h")(lambda items: time.sleep(60) or items)
        futures = [f.submit(n) for n in range(10)]
        time.sleep(0.2)
        print("end")
        """,
        timeout=20,
    )
    assert (0, "end\n", "") == (done.returncode, done.stdout, done.stderr)
