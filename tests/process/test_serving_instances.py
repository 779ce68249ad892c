"""Batched methods of many instances under stress, and across forks."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from collections import Counter

import pytest
from tests.process.harness import wait_until

from modelguard import batched
from modelguard.errors import DeadlineExceeded, Overloaded

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::modelguard.errors.ModelGuardWarning")]

CALLERS, CALLS = 8, 400


class Service:
    """Computes, and now and then takes longer than a caller waits."""

    def __init__(self, by: int) -> None:
        self.by = by

    @batched(max_size=4, deadline="30s", threads=2)
    def times(self, items: list[int]) -> list[int]:
        if 13 in items:
            time.sleep(0.002)
        return [item * self.by for item in items]


def ours() -> int:
    """How many threads modelguard has."""
    return sum(thread.name.startswith("modelguard") for thread in threading.enumerate())


def test_instances_come_and_go_under_stress() -> None:
    """Each call gets its own result or a refusal, whatever becomes of its instance; nothing is left."""
    gc.collect()
    before = ours()
    kept = [Service(by) for by in range(1, 5)]
    made: weakref.WeakSet[Service] = weakref.WeakSet()
    seen: Counter[str] = Counter()
    wrong: list[object] = []

    def call(random: random.Random) -> None:
        one = random.choice(kept) if random.random() < 0.5 else Service(random.randint(1, 9))
        made.add(one)
        item, by = random.randint(0, 20), one.by
        timeout = random.choice((None, 5, 0.001))
        try:
            if random.random() < 0.3:
                future = one.times.submit(item, timeout=timeout)
                del one  # the queue is all that is left of it
                if random.random() < 0.3:
                    seen["cancelled"] += future.cancel()
                    return
                result = future.result(60)
            else:
                result = one.times(item, timeout=timeout)
        except (DeadlineExceeded, Overloaded) as error:
            seen[type(error).__name__] += 1
            return
        seen["result"] += 1
        if result != item * by:
            wrong.append((item, by, result))

    def many(seed: int) -> None:
        numbers = random.Random(seed)
        for _ in range(CALLS):
            call(numbers)

    threads = [threading.Thread(target=many, args=(seed,)) for seed in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive(), "a call was lost"
    assert [] == wrong
    assert seen["result"] > CALLERS * CALLS / 3, seen
    kept.clear()
    wait_until(lambda: gc.collect() >= 0 and not made, "no instance is left")
    wait_until(lambda: ours() - before <= 9, "few threads")  # of the timer, and those that wait for short work


def test_a_forked_child_has_threads_of_its_own() -> None:
    """An instance that was used before the fork is served in the child and in the parent, and so are new ones."""
    one = Service(3)
    assert 6 == one.times(2)
    for number in range(10):
        pid = os.fork()
        if pid == 0:
            right = [one.times(number), Service(2).times(number)] == [3 * number, 2 * number]
            os._exit(0 if right else 1)
        assert [3 * number, 2 * number] == [one.times(number), Service(2).times(number)]
        assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
