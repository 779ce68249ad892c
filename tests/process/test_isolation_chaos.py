"""Chaos of bounded length: every call gets exactly one answer or one named error, and everything comes back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.process import isolated_functions as functions
from tests.process.harness import wait_until
from tests.process.isolation_chaos import CALLERS, LONGEST, storm

from modelguard.errors import DeadlineExceeded, LoadFailed, Overloaded, WorkerCrashed

pytestmark = pytest.mark.timeout(300)

SECONDS = float(os.environ.get("CHAOS_SECONDS", "12"))
#: Bytes that the owner may have grown by: allocators keep free what the longest queues took.
GROWTH = 20e6


#: What a call may end with, besides its answer.
NAMED = (WorkerCrashed, DeadlineExceeded, Overloaded, LoadFailed)


def test_every_call_is_answered_or_named() -> None:
    """Workers crash, hang, grow and are stopped; workers, molds and owners are killed, with eight callers."""
    tally = storm(SECONDS, owners=True)
    print(tally)  # noqa: T201 - with -s
    assert [] == tally.wrong
    assert tally.calls["answered"] > CALLERS
    assert tally.longest < LONGEST
    assert tally.blows["kill owner"]
    assert [] == tally.left
    assert tally.descriptors[1] <= tally.descriptors[0], tally.opened
    assert tally.memory[1] - tally.memory[0] < GROWTH


def test_no_call_runs_twice(tmp_path: Path) -> None:
    """Workers are killed at any moment: each call runs once and is answered, or fails, and never runs a second time."""
    path, chance = tmp_path / "ran", random.Random(3)
    answered: list[int] = []
    stop = threading.Event()

    def call(first: int) -> None:
        number = first
        while not stop.is_set():
            with suppress(*NAMED):
                answered.append(functions.notes(str(path), number))
            number += CALLERS

    with functions.notes as notes:
        callers = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
        for caller in callers:
            caller.start()
        kills, until = 0, time.monotonic() + 60
        while (kills < 100 or len(answered) < 100) and time.monotonic() < until:
            time.sleep(chance.uniform(0.0, 0.03))
            pids = [one.pid for one in notes.status().workers if one.pid]
            with suppress(ProcessLookupError, IndexError):
                os.kill(chance.choice(pids), signal.SIGKILL)
                kills += 1
        stop.set()
        for caller in callers:
            caller.join()
    ran = Counter(map(int, path.read_text().split()))
    assert [] == [number for number, times in ran.items() if times > 1]
    assert [] == [number for number, times in Counter(answered).items() if times > 1]
    assert set(answered) <= set(ran)
    assert len(answered) >= CALLERS
    wait_until(lambda: not psutil.Process().children(recursive=True), "the end of all processes")
