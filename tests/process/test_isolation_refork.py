"""A worker takes the place of its mold: what calls have filled is shared, and every promise of molds holds for it."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process import isolated_functions as functions
from tests.process.harness import alive, wait_until

from modelguard import telemetry
from modelguard.errors import DeadlineExceeded, LoadFailed, Overloaded, WorkerCrashed

pytestmark = pytest.mark.timeout(180)

NAMED = (WorkerCrashed, DeadlineExceeded, Overloaded, LoadFailed)


def family() -> list[psutil.Process]:
    """The processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


@pytest.fixture
def caching() -> Iterator[Any]:
    """A function whose model has a cache; it has been loaded, and nothing of it is left afterwards."""
    with functions.caching as function:
        yield function
    wait_until(lambda: not family(), "the end of all processes")


def rest(function: Any) -> bool:
    """Whether all workers are children of the new mold."""
    status = function.status()
    idle = [one for one in status.workers if one.state == "idle" and not one.worn]
    return status.reforked and 3 == len(idle) == len(status.workers)


def known_key(function: Any) -> int:
    """A key that the new mold knows, after a worker has taken the mold's place."""
    computed_by = call_until_reforked(function)
    mold = function.status().mold
    return next(key for key, worker in computed_by.items() if worker == mold)


def refork(function: Any) -> int:
    """Call until a worker has taken the place of the mold; returns the old mold's process id."""
    old: int = function.status().mold
    call_until_reforked(function)
    return old


def call_until_reforked(function: Any) -> dict[int, int]:
    """Call with one key after the other; returns the process id of the worker that computed each."""
    computed_by: dict[int, int] = {}

    def reforked() -> bool:
        for key in range(len(computed_by), len(computed_by) + 10):
            computed_by[key] = function(key)[3]
        return bool(function.status().reforked)

    wait_until(reforked, "a worker in the mold's place")
    wait_until(lambda: rest(function), "the new mold's workers")
    return computed_by


class TestRefork:
    def test_workers_share_what_calls_have_filled(self, caching: Any) -> None:
        """Fresh workers know what only the promoted one has seen, on the model that was loaded once."""
        old = caching.status().mold
        computed_by = call_until_reforked(caching)
        mold = caching.status().mold
        assert old != mold
        seen = [key for key, worker in computed_by.items() if worker == mold]  # on a busy machine, not all of them
        assert len(seen) >= 20
        for key in seen:
            known, loaded, parent, _ = caching(key)
            assert (True, old, mold) == (known, loaded, parent)
        assert not caching(-1)[0]

    def test_no_call_notices_it(self, caching: Any) -> None:
        """Four callers without gaps, and each call has its answer."""
        failures: list[BaseException] = []

        def calls() -> None:
            try:
                for key in range(100):
                    caching(key)
            except BaseException as error:  # noqa: BLE001 - the test reports it
                failures.append(error)

        callers = [threading.Thread(target=calls) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert [] == failures
        wait_until(lambda: rest(caching), "the new mold's workers")

    def test_it_happens_once_for_each_load(self, caching: Any) -> None:
        """So a leak cannot pile up from mold to mold. A reload begins anew."""
        refork(caching)
        mold = caching.status().mold
        for key in range(150):
            caching(key)
        assert mold == caching.status().mold
        caching.reload()
        assert not caching.status().reforked
        assert not caching(0)[0]
        refork(caching)

    def test_the_old_mold_gives_its_memory_back(self, caching: Any) -> None:
        """What is left of it is a small program that has nothing of the model."""
        old = psutil.Process(refork(caching))
        wait_until(lambda: "modelguard.isolation._mold" not in " ".join(old.cmdline()), "the small program")
        assert old.memory_info().rss < psutil.Process(caching.status().mold).memory_info().rss / 1.5
        assert caching(1)

    def test_policies_count_from_the_fork(self, caching: Any) -> None:
        """Uses(200) replaces each worker of the new mold after 200 calls of its own."""
        refork(caching)
        first = caching(0)[3]
        recycled = caching.status().recycled
        for key in range(150):
            assert first == caching(key)[3]
        wait_until(lambda: caching(0)[3] != first, "a fresh worker")
        assert recycled < caching.status().recycled

    def test_events_name_it(self) -> None:
        """Workers that ended for it are counted apart from those that a policy has ended."""
        seen: list[telemetry.Event] = []
        remove = telemetry.add_hook(seen.append)
        with functions.caching as caching:
            refork(caching)
            assert 0 == caching.status().recycled
        remove()
        ends = [event.cause for event in seen if isinstance(event, telemetry.WorkerEnded)]
        assert 2 == ends.count("reforked")

    def test_the_model_is_unloaded_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By the process that holds it last."""
        path = tmp_path / "unloaded"
        monkeypatch.setenv("ISOLATION_UNLOADED", str(path))
        with functions.caching as caching:
            refork(caching)
            mold = caching.status().mold
        assert [str(mold)] == path.read_text().split()


class TestRefusal:
    def test_a_worker_with_a_thread_stays_a_worker(self, caching: Any, caplog: pytest.LogCaptureFixture) -> None:
        """The fork gate refuses it: the log names the thread, and the old mold and all workers serve on."""
        mold, worker = caching.status().mold, caching(0, "thread")[3]
        with caplog.at_level(logging.WARNING):
            for key in range(60):
                caching(key, "thread")  # on a busy machine, each worker takes some of the calls
            wait_until(lambda: "cannot take the place of its mold" in caplog.text, "the reason")
        assert "thread" in caplog.text
        wait_until(lambda: 3 == sum(one.state == "idle" for one in caching.status().workers), "all workers")
        assert (mold, False) == (caching.status().mold, caching.status().reforked)
        assert worker in {one.pid for one in caching.status().workers}


class TestDeaths:
    def test_a_crash_costs_one_call(self, caching: Any) -> None:
        """The new mold forks the next worker."""
        key = known_key(caching)
        with pytest.raises(DeadlineExceeded):
            caching(-1, "hang")
        assert caching(key)[0]
        wait_until(lambda: rest(caching), "the replacement")

    @pytest.mark.parametrize("who", ["mold", "guardian"])
    def test_a_mold_that_is_killed_is_replaced(self, caching: Any, who: str) -> None:
        """Whichever of the two processes it is: everything of it ends, and the next calls have a fresh mold."""
        old = refork(caching)
        processes = family()
        os.kill(caching.status().mold if who == "mold" else old, signal.SIGKILL)
        wait_until(lambda: not [one for one in processes if alive(one.pid)], "the end of all of them")
        wait_until(lambda: answers(caching), "an answer of the next mold")
        assert caching.status().mold not in {one.pid for one in processes}

    def test_sigterm_to_all_of_them_ends_nothing(self, caching: Any) -> None:
        """Service managers send it to the whole group; the owner decides when its workers end."""
        key = known_key(caching)
        processes = family()
        for one in processes:
            one.send_signal(signal.SIGTERM)
        assert caching(key)[0]
        assert [] == [one for one in processes if not alive(one.pid)]

    def test_it_ends_amid_a_promotion(self) -> None:
        """close() in any moment of it leaves no process behind."""
        for calls in range(18, 26):
            with functions.caching as caching:
                for key in range(calls):
                    caching(key)
            wait_until(lambda: not family(), "the end of all processes")

    def test_kills_at_any_moment(self) -> None:
        """Molds and workers are killed while they take each other's places: calls are answered or named."""
        before = psutil.Process().num_fds()
        for kill_after in range(15, 40, 3):
            with functions.caching as caching:
                for key in range(40):
                    if key == kill_after:
                        status = caching.status()
                        pids = [pid for pid in (status.mold, *(one.pid for one in status.workers)) if pid]
                        if pids:
                            os.kill(pids[kill_after % len(pids)], signal.SIGKILL)
                    try:
                        caching(key)
                    except NAMED:
                        continue
                wait_until(lambda: answers(caching), "an answer")
            wait_until(lambda: not family(), "the end of all processes")
        wait_until(lambda: psutil.Process().num_fds() <= before + 3, "no descriptor is left", 5.0)


OWNER = """
import json, os, psutil, sys, threading, time
sys.path.insert(0, {folder!r})
import app
for number in range(40):
    app.predict(number)
def renewed():  # a worker of the old mold would end, and its program would be nobody's child
    status = app.predict.status()
    if not (app.predict(0) and status.reforked):
        return False
    children = [child.pid for child in psutil.Process(status.mold).children()]
    return len(status.workers) == 3 and all(worker.pid in children for worker in status.workers)
while not renewed():
    time.sleep(0.01)
app.predict(-1)
threading.Thread(target=app.predict, args=(-2,), daemon=True).start()
while not any(worker.state == "busy" for worker in app.predict.status().workers):
    time.sleep(0.01)
children = []
while len(children) < 6:  # the guardian, the new mold, its three workers, the program
    children = psutil.Process().children(recursive=True)
print(json.dumps([child.pid for child in children]), flush=True)
{end}
"""
MODEL = """
import subprocess, time
from modelguard import guard, isolate

@isolate(workers=2, refork_after=20)
@guard(dict, reload_on=None)
def predict(model, number):
    if number == -1:
        subprocess.Popen(["sleep", "600"])
    if number == -2:
        time.sleep(600)
    return str(number)
"""


@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit(0)", "os._exit(1)"])
def test_nothing_outlives_the_owner(tmp_path: Path, end: str) -> None:
    """Neither the new mold, nor its workers, what is left of the old one, or a program that the model has started."""
    (tmp_path / "app.py").write_text(MODEL)
    program = OWNER.format(folder=str(tmp_path), end=end)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        process.kill() if end == "time.sleep(600)" else process.wait(30)
        wait_until(lambda: not [pid for pid in pids if alive(pid)], f"the end of {pids}", 20.0)


def answers(function: Any) -> bool:
    """Whether it answers."""
    try:
        return bool(function(0))
    except NAMED:
        return False
