"""``pause()`` and ``unload()`` of isolated functions with real processes: what waits, and what goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process import isolated_functions as functions
from tests.process.harness import alive, wait_until
from tests.process.host_callers import APP, Caller, end_all, family, molds, write

from modelguard import Isolated, telemetry
from modelguard.errors import DeadlineExceeded, WorkerCrashed

pytestmark = pytest.mark.timeout(240)


@contextmanager
def using(function: Isolated[..., Any]) -> Iterator[Any]:
    """Load on entry; resume and close on exit. The function belongs to a module, and outlives the test."""
    try:
        with function:
            wait_until(lambda: "starting" not in states(function), "all workers")
            yield function
    finally:
        function.resume()


def states(function: Isolated[..., Any]) -> list[str]:
    """What its workers do."""
    return [one.state for one in function.status().workers]


def pids(function: Isolated[..., Any]) -> set[int]:
    """Its workers."""
    return {one.pid for one in function.status().workers}


class TestPause:
    def test_no_policy_replaces_a_worker(self, seen: list[telemetry.Event]) -> None:
        """However many calls it takes; it is reported once, shown in the status, and done at the end."""
        with using(functions.counted) as counted:
            counted.pause()
            before = pids(counted)
            for _ in range(30):
                assert counted() in before
            status = counted.status()
            assert (before, True) == ({one.pid for one in status.workers}, status.paused)
            assert ("paused", ["uses"]) == (status.postponed.cause, [one.kind for one in status.postponed.reasons])
            told = [event for event in seen if isinstance(event, telemetry.ReloadPostponed)]
            assert [("paused", True)] == [(event.cause, event.worker in before) for event in told]
            counted.resume()
            wait_until(lambda: counted() not in before, "fresh workers")
            assert None is counted.status().postponed

    def test_no_policy_replaces_the_mold(self) -> None:
        """New weights are seen and wait; a reload by hand does not wait."""
        with using(functions.watching) as watching:
            first = watching()
            watching.pause()
            functions.WEIGHTS.write_text(str(time.time()))
            wait_until(lambda: watching.status().postponed is not None, "the news")
            assert ["modified"] == [one.kind for one in watching.status().postponed.reasons]
            assert first == watching()
            watching.reload()
            second = watching()
            assert (True, True) == (second != first, watching.status().paused)
            functions.WEIGHTS.write_text(f"{time.time()} again")
            wait_until(lambda: watching.status().postponed is not None, "the news")
            watching.resume()
            wait_until(lambda: watching() != second, "the next mold")

    def test_crashes_and_deadlines_are_no_policies(self) -> None:
        """A dead worker, a hung call and a dead mold cost what they cost without a pause."""
        with using(functions.ends) as ends:
            ends.pause()
            with pytest.raises(WorkerCrashed):
                ends("exit")
            with pytest.raises(DeadlineExceeded):
                ends("hang")
            wait_until(lambda: states(ends).count("idle") == 3, "two workers, and a spare one after the deaths")
            mold = ends.status().mold
            os.kill(mold, signal.SIGKILL)
            wait_until(lambda: ends.status().mold not in {None, mold}, "another mold")
            assert ("back", True) == (ends("back"), ends.status().paused)

    def test_a_pause_before_the_first_load(self) -> None:
        """It holds for the mold that a call starts then, and its end reaches that."""
        functions.counted.pause()
        with using(functions.counted) as counted:
            assert counted.status().paused
            before = pids(counted)
            for _ in range(20):
                assert counted() in before
            counted.resume()
            wait_until(lambda: counted() not in before, "fresh workers")

    def test_spawned_workers_stay_too(self) -> None:
        """Those that have each loaded for themselves."""
        with using(functions.spawned) as spawned:
            spawned.pause()
            before = pids(spawned)
            assert {True} == {spawned()[1] in before for _ in range(60)}
            assert before == pids(spawned)


class TestUnload:
    def test_the_calls_that_run_end_first(self) -> None:
        """The mold waits for them, as for the end of a stream."""
        with using(functions.items) as items:
            stream = items(3)
            assert 0 == next(stream)
            unloading = threading.Thread(target=items.unload)
            unloading.start()
            wait_until(lambda: items.status().state == "draining", "the beginning of the end")
            assert [1, 2] == list(stream)
            unloading.join(60)
            assert (False, "idle") == (unloading.is_alive(), items.status().state)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with the app, whose workers are worn after three calls; nothing that met there is left afterwards."""
    code = APP.replace("Idle, guard", "Uses, guard").replace(
        'reload_on=None, loading=Loading(backoff=Backoff(0.05, 0.2)), wait_timeout="40s"',
        'reload_on=Uses(3), loading=Loading(backoff=Backoff(0.05, 0.2)), wait_timeout="40s"',
    )
    assert "Uses(3)" in code
    write(tmp_path, code)
    yield tmp_path
    end_all(tmp_path)


class TestHost:
    def test_a_pause_is_everybodys(self, folder: Path) -> None:
        """Whoever asks, it holds for the one mold of all processes, and any of them ends it."""
        with Caller(folder) as one, Caller(folder) as two:
            one.run("app.predict.load(); app.predict.pause()")
            before = workers_of(two)
            for caller in (one, two) * 6:
                assert caller.call()[0] in before
            assert [True, True] == [caller.status("paused") for caller in (one, two)]
            cause = "result = getattr(app.predict.status().postponed, 'cause', None)"
            wait_until(lambda: two.run(cause) == "paused", "what waits")
            two.run("app.predict.resume()")
            wait_until(lambda: one.call()[0] not in before, "fresh workers")
            assert [False, False] == [caller.status("paused") for caller in (one, two)]

    def test_each_process_reports_it_once(self, folder: Path) -> None:
        """So the gauge counts processes, as it does for guards."""
        collect = "from modelguard import telemetry; global seen; seen = []; telemetry.add_hook(seen.append)"
        told = "result = [type(one).__name__ for one in seen if 'Guard' in type(one).__name__]"
        with Caller(folder) as one, Caller(folder) as two:
            for caller in (one, two):
                caller.run(f"{collect}; app.predict.load()")
            one.run("app.predict.pause(); app.predict.pause()")
            for caller in (one, two):
                wait_until(lambda: caller.run(told) == ["GuardPaused"], "its event")  # noqa: B023
            two.run("app.predict.resume()")
            for caller in (one, two):
                wait_until(lambda: caller.run(told) == ["GuardPaused", "GuardResumed"], "its event")  # noqa: B023

    def test_it_outlasts_its_broker(self, folder: Path) -> None:
        """The broker is killed: the next one is paused, whichever process starts it."""
        with Caller(folder) as one, Caller(folder) as two:
            one.run("app.predict.load(); app.predict.pause()")
            two.run("app.predict.load()")
            broker = one.status("broker")
            os.kill(broker, signal.SIGKILL)
            wait_until(lambda: two.status("broker") not in {None, broker}, "the next broker")
            wait_until(lambda: two.status("state") == "ready", "its mold")
            assert [True, True] == [caller.status("paused") for caller in (one, two)]

    def test_without_a_broker_none_is_started(self, folder: Path) -> None:
        """The pause begins with the first mold, whoever loads it."""
        with Caller(folder) as one, Caller(folder) as two:
            one.run("app.predict.pause()")
            assert ([], True) == (family(folder), one.status("paused"))
            two.run("app.predict.load()")
            wait_until(lambda: one.status("broker") is not None, "the broker that the other one has started")
            wait_until(lambda: two.status("paused"), "the pause")

    def test_unload_ends_the_one_mold(self, folder: Path) -> None:
        """For all processes, until one of them calls; the broker stays."""
        with Caller(folder) as one, Caller(folder) as two:
            first = one.call()[1]
            two.run("app.predict.unload()")
            wait_until(lambda: one.status("state") == "idle", "the broker's word")
            wait_until(lambda: not molds(folder), "the end of its process")
            assert not psutil.pid_exists(first) or not alive(first)
            assert first != one.call()[1]
            assert 2 == len((folder / "loads").read_text().splitlines())


def workers_of(caller: Caller) -> list[int]:
    """The workers, once all have come up."""
    found: list[int] = []

    def complete() -> bool:
        idle = "result = [one.pid for one in app.predict.status().workers if one.state == 'idle']"
        found[:] = caller.run(idle)
        return len(found) == 2

    wait_until(complete, "all workers")
    return found
