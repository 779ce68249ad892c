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
from typing import Any, Self

import psutil
import pytest
from tests.process import isolated_functions as functions
from tests.process.harness import wait_until

from modelguard.errors import DeadlineExceeded, LoadFailed, Overloaded, WorkerCrashed

pytestmark = pytest.mark.timeout(300)

CALLERS = 8
SECONDS = float(os.environ.get("CHAOS_SECONDS", "12"))
#: What a call may end with, besides its answer.
NAMED = (WorkerCrashed, DeadlineExceeded, Overloaded, LoadFailed)
ORDERS = ["x"] * 30 + ["exit", "segfault", "SIGKILL", "SIGABRT", "hang", "SIGSTOP"]


def descendants() -> list[psutil.Process]:
    """The molds of this process, and their workers."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "mold" in child.cmdline():
                found.append(child)
    return found


class Callers:
    """Threads that call one after the other, and note what came of each call."""

    def __init__(self, function: Any) -> None:
        self.tally: Counter[str] = Counter()
        self.wrong: list[object] = []
        self.longest = 0.0
        self._function = function
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(CALLERS)]

    def _run(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stop.is_set():
            order, started = chance.choice(ORDERS), time.monotonic()
            try:
                answer = self._function(order)
            except NAMED as error:
                self.tally[type(error).__name__] += 1
            except BaseException as error:  # noqa: BLE001 - the test reports it
                self.wrong.append(error)
            else:
                self.tally["answered"] += 1
                if answer != order:
                    self.wrong.append((order, answer))
            self.longest = max(self.longest, time.monotonic() - started)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_every_call_is_answered_or_named() -> None:
    """Workers crash, hang and are stopped, workers and molds are killed, molds are replaced, with eight callers."""
    chance = random.Random(7)
    with functions.ends as ends:
        with suppress(*NAMED):
            ends("x")
        descriptors = psutil.Process().num_fds()
        with Callers(ends) as callers:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                time.sleep(chance.uniform(0.2, 1.0))
                blow = chance.choice(["worker", "worker", "stop", "mold", "reload"])
                if blow == "reload":
                    ends.reload(wait=False)
                    continue
                status = ends.status()
                pids = [one.pid for one in status.workers if one.pid] if blow != "mold" else [status.mold]
                with suppress(ProcessLookupError, IndexError, TypeError):
                    os.kill(chance.choice(pids), signal.SIGSTOP if blow == "stop" else signal.SIGKILL)  # type: ignore[arg-type]
        print(dict(callers.tally), f"longest {callers.longest:.1f} s")  # noqa: T201 - with -s, the tally
        assert [] == callers.wrong
        assert callers.tally["answered"] > CALLERS
        assert callers.longest < 40  # the wait for a mold is at most wait_timeout, 30 seconds
        wait_until(lambda: answers(ends), "an answer after the storm")
    wait_until(lambda: not descendants(), "the end of all processes")
    time.sleep(1.5)
    assert psutil.Process().num_fds() <= descriptors


def answers(function: Any) -> bool:
    """Whether it answers."""
    with suppress(*NAMED):
        return "x" == function("x")
    return False


def test_no_call_runs_twice(tmp_path: Path) -> None:
    """Workers are killed at any moment: each call runs once and is answered, or fails, and never runs a second time."""
    path, chance, failed = tmp_path / "ran", random.Random(3), []
    with functions.notes as notes:
        stop = threading.Event()

        def call(first: int) -> None:
            number = first
            while not stop.is_set():
                try:
                    assert number == notes(str(path), number)
                except NAMED:
                    failed.append(number)
                number += CALLERS

        callers = [threading.Thread(target=call, args=(number,)) for number in range(CALLERS)]
        for caller in callers:
            caller.start()
        until = time.monotonic() + SECONDS / 2
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.0, 0.05))
            pids = [one.pid for one in notes.status().workers if one.pid]
            with suppress(ProcessLookupError, IndexError):
                os.kill(chance.choice(pids), signal.SIGKILL)
        stop.set()
        for caller in callers:
            caller.join()
    ran = Counter(map(int, path.read_text().split()))
    assert [] == [number for number, times in ran.items() if times > 1]
    assert len(ran) > len(failed)
    wait_until(lambda: not descendants(), "the end of all processes")
