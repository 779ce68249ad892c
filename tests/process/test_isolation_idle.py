"""Isolated functions that nobody calls: ``Idle(keep="mold")`` ends the workers, a pool's ``idle`` the molds of keys."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process import idle_functions as functions
from tests.process.harness import wait_until
from tests.process.host_callers import APP, Caller, end_all, write
from tests.process.host_callers import molds as molds_of_host

from modelguard import Isolated, telemetry
from modelguard.errors import WorkerCrashed

pytestmark = pytest.mark.timeout(240)


@contextmanager
def using(function: Isolated[..., Any]) -> Iterator[Any]:
    """Close it at the end; no process is left afterwards."""
    with function:
        yield function
    wait_until(lambda: not family(), "the end of all processes")


def family() -> list[psutil.Process]:
    """The processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


def of(kind: type[telemetry.Event], events: list[telemetry.Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def wait_idle(function: Any) -> None:
    wait_until(lambda: "idle" == function.status().state, "idleness")


class TestAKeptMold:
    def test_only_its_workers_end(self, seen: list[telemetry.Event]) -> None:
        """The mold stays, with the model in memory; the function is ready, and the next call gets a new fork of it."""
        with using(functions.kept) as kept:
            mold, worker = kept()
            wait_idle(kept)
            wait_until(lambda: [mold] == [one.pid for one in family()], "the end of the workers")
            status = kept.status()
            assert (mold, (), True, 0) == (status.mold, status.workers, kept.ready, status.reloads)
            assert (mold, True) == (kept()[0], worker != kept()[1])
            assert "ready" == kept.status().state
            assert 1 == len({event.generation for event in of(telemetry.LoadFinished, seen)})

    def test_the_memory_of_the_workers_comes_back(self, seen: list[telemetry.Event]) -> None:
        """The event proves it: what the mold held with its workers, and what is left."""
        with using(functions.kept) as kept:
            kept()
            wait_until(lambda: of(telemetry.WorkersReleased, seen), "the end of the workers")
            event = of(telemetry.WorkersReleased, seen)[0]
            assert (2, ["Idle('300ms', keep='mold')"]) == (event.workers, [str(reason) for reason in event.reasons])
            assert event.freed > 0.9 * functions.CACHE
            assert event.bytes_after > 0
            assert {"idle"} == {end.cause for end in of(telemetry.WorkerEnded, seen)}

    def test_a_call_that_runs_is_use(self, seen: list[telemetry.Event]) -> None:
        """Also a stream between two steps."""
        with using(functions.kept) as kept:
            kept(1.0)
            assert [] == of(telemetry.WorkersReleased, seen)
        with using(functions.steps) as steps:
            stream = steps(2)
            first = next(stream)
            time.sleep(1.0)
            assert [first] == list(stream)
            assert [] == [one for one in of(telemetry.WorkersReleased, seen) if one.guard == steps.name]
            wait_idle(steps)

    def test_every_kind_of_call_gets_a_worker(self) -> None:
        """Blocking, awaited, submitted, and many at once: as many workers as before come back."""
        with using(functions.kept) as kept:
            for call in (kept, lambda: asyncio.run(kept.aio()), lambda: kept.submit().result(60)):
                wait_idle(kept)
                assert kept.status().mold == call()[0]
            wait_idle(kept)
            with ThreadPoolExecutor(8) as threads:
                assert 1 == len({mold for mold, _ in threads.map(lambda _: kept(0.05), range(8))})
            wait_until(lambda: 2 == len(kept.status().workers), "all workers")

    def test_loading_brings_the_workers_back(self) -> None:
        """``load()``, ``aload()``, and entering it again: a worker can answer afterwards."""
        with using(functions.unready) as unready:
            mold = unready.status().mold
            wait_idle(unready)
            assert not unready.ready
            unready.load()
            assert (True, mold) == (unready.ready, unready.status().mold)
            wait_idle(unready)
            asyncio.run(unready.aload(timeout="30s"))
            assert (True, mold) == (unready.ready, unready.status().mold)

    def test_a_second_idle_ends_the_mold(self, seen: list[telemetry.Event]) -> None:
        """First the workers, later the rest; the next call loads."""
        with using(functions.in_two_steps) as function:
            mold = function()
            wait_until(lambda: of(telemetry.WorkersReleased, seen), "the end of the workers")
            assert mold == function.status().mold
            wait_until(lambda: not family(), "the end of the mold")
            wait_until(lambda: "idle" == function.status().state, "the end of its release")
            assert function.status().mold is None
            assert mold != function()

    def test_new_weights_make_a_new_mold_all_the_same(self) -> None:
        """So a call after a long pause gets the newest; its workers end again then."""
        with using(functions.renewed) as renewed:
            mold = renewed()
            wait_idle(renewed)
            functions.WEIGHTS.write_text(str(time.time()))
            wait_until(lambda: renewed.status().mold not in (None, mold), "the next mold")
            wait_idle(renewed)
            assert renewed.status().mold == renewed()

    def test_a_pause_holds_it_back(self) -> None:
        """As every policy."""
        with using(functions.kept) as kept:
            kept.pause()
            wait_until(lambda: kept.status().postponed is not None, "it is due")
            assert 2 == len(kept.status().workers)
            kept.resume()
            wait_idle(kept)
            assert kept()

    def test_unload_ends_the_mold_too(self) -> None:
        """And a reload makes another one, with workers."""
        with using(functions.kept) as kept:
            mold = kept()[0]
            wait_idle(kept)
            kept.unload()
            assert [] == family()
            second = kept()[0]
            wait_idle(kept)
            kept.reload()
            assert 3 == len({mold, second, kept()[0]})

    def test_a_mold_that_is_killed_meanwhile(self) -> None:
        """It is replaced, as one with workers."""
        with using(functions.kept) as kept:
            mold = kept()[0]
            wait_idle(kept)
            os.kill(mold, signal.SIGKILL)
            wait_until(lambda: kept.status().mold not in (None, mold), "the next mold")
            assert mold != kept()[0]

    def test_without_a_guard(self) -> None:
        """``recycle_on`` takes it."""
        with using(functions.without_guard) as function:
            worker = function()
            mold = function.status().mold
            wait_idle(function)
            assert (mold, True) == (function.status().mold, worker != function())

    def test_calls_and_crashes_at_every_moment(self) -> None:
        """Workers come and go twenty times a second under calls: each has its own answer."""
        wrong: list[object] = []

        def call(seed: int) -> None:
            chance = random.Random(seed)
            for number in range(60):
                time.sleep(chance.choice((0, 0, 0.05, 0.1)))
                crash = chance.random() < 0.03
                try:
                    answer = functions.often(number, crash)
                except WorkerCrashed:
                    continue
                if crash or answer != number:
                    wrong.append((number, answer))

        with using(functions.often) as often:
            with ThreadPoolExecutor(2) as threads:
                for one in [threads.submit(call, seed) for seed in range(2)]:
                    one.result(200)
            wait_idle(often)
            wait_until(lambda: 1 == len(family()), "the mold alone")
        assert [] == wrong

    def test_of_all_processes_of_a_host(self, tmp_path: Path) -> None:
        """The broker ends the workers when no process calls, tells all that they are ready, and the next call forks."""
        app = APP.replace("load, reload_on=None", 'load, reload_on=Idle("1s", keep="mold")').replace(
            "Backoff, Uses", "Backoff, Idle"
        )
        write(tmp_path, app)
        try:
            with Caller(tmp_path) as one, Caller(tmp_path) as two:
                one.call()
                mold = two.status("mold")
                wait_until(lambda: "idle" == two.status("state"), "idleness")
                wait_until(lambda: [mold] == [process.pid for process in molds_of_host(tmp_path)], "the mold alone")
                for caller in (one, two):
                    wait_until(lambda: caller.run("result = app.predict.ready"), "ready")  # noqa: B023
                assert two.call()
                assert (mold, 1) == (one.status("mold"), len((tmp_path / "loads").read_text().splitlines()))
                wait_until(lambda: "idle" == two.status("state"), "idleness")
                one.run("app.predict.load()")
                assert (mold, "ready") == (one.status("mold"), one.status("state"))
        finally:
            end_all(tmp_path)


class TestAPool:
    def test_the_mold_of_an_idle_key_ends(self, seen: list[telemetry.Event]) -> None:
        """With its workers; the molds of other keys stay, and the next call with its key starts one."""
        with using(functions.speak) as speak:
            _, first = speak("a")
            stop = threading.Event()

            def use() -> set[int]:
                molds = set()
                while not stop.is_set():
                    molds.add(speak("b")[1])
                    time.sleep(0.02)
                return molds

            with ThreadPoolExecutor(1) as threads:
                using_b = threads.submit(use)
                try:
                    wait_until(lambda: ("a",) == speak.status().pool.idle, "the end of the idle key")
                    wait_until(lambda: not psutil.pid_exists(first), "the end of its mold")
                    pool = speak.status().pool
                    assert (["b"], True, "ready") == (list(pool.models), speak.ready, speak.status().state)
                finally:
                    stop.set()
                assert 1 == len(using_b.result(60))
            assert ["Idle('500ms')"] == [str(one.reasons[0]) for one in of(telemetry.UnloadStarted, seen)][:1]
            name, second = speak("a")
            assert ("a", True) == (name, second != first)
            wait_until(lambda: not family(), "the end of all molds")
            assert ("idle", True, {"a", "b"}) == (speak.status().state, speak.ready, set(speak.status().pool.idle))

    def test_a_call_that_runs_is_use(self) -> None:
        """However long it takes."""
        with using(functions.speak) as speak:
            before = speak.status().pool.unloads  # of earlier tests
            speak("a", seconds=1.5)
            assert before == speak.status().pool.unloads

    def test_in_this_process(self) -> None:
        """A ticker looks, in no thread of the pool's own, and ends with the last model."""
        with functions.voices as voices:
            functions.speak_here("a")
            wait_until(lambda: ("a",) == voices.status().idle, "the release")
            functions.speak_here("a")
            assert (2, 1, ()) == (voices.status().loads, voices.status().unloads, voices.status().idle)
            wait_until(lambda: 2 == voices.status().unloads, "the release")
            wait_until(lambda: "modelguard-ticker" not in {one.name for one in threading.enumerate()}, "the ticker")
