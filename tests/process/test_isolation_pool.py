"""Isolated functions over a pool: each key has a mold of its own, within one budget."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from tests.process import isolated_functions as functions
from tests.process.harness import wait_until

from modelguard import isolate, pool, telemetry
from modelguard.errors import DeadlineExceeded, LoadFailed, NotSupported, Overloaded, WorkerCrashed
from modelguard.isolation._mold_owner import MoldGuard

pytestmark = pytest.mark.timeout(180)


def family() -> list[psutil.Process]:
    """The processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


@pytest.fixture
def speak() -> Iterator[Any]:
    """A function over a pool of two models at most; nothing of it is left afterwards."""
    with functions.speak as function:
        yield function
    wait_until(lambda: not family(), "the end of all processes")


def length(_: object, text: str) -> int:
    """A function to isolate."""
    return len(text)


class TestKeys:
    def test_each_key_has_a_mold_of_its_own(self, speak: Any) -> None:
        """Its workers share its model, and calls with that key go to them."""
        one, other = speak("a"), speak("b")
        assert ("a", "b") == (one[0], other[0])
        assert 5 == len({os.getpid(), *one[1:], *other[1:]})
        assert one[1] == speak("a")[1]
        assert {"a", "b"} == set(speak.status().pool.models)
        assert 0 == functions.voices.status().loads

    def test_a_mold_that_is_evicted_ends_with_all_its_memory(self, speak: Any) -> None:
        """The least recently used one makes room, and its processes are gone."""
        _, evicted, _ = speak("a")
        kept = speak("b")[1]
        speak("c")
        wait_until(lambda: not psutil.pid_exists(evicted), "the end of the mold")
        assert {"b", "c"} == set(speak.status().pool.models)
        assert kept == speak("b")[1]
        assert evicted != speak("a")[1]

    def test_molds_that_end_leave_nothing_in_their_owner(self, speak: Any) -> None:
        """Not a guard for each, however many there were."""

        def guards() -> int:
            gc.collect()
            return sum(type(one) is MoldGuard for one in gc.get_objects())

        speak("a")
        first = guards()
        for _ in range(3):
            speak.reload()
            speak("a")
        wait_until(lambda: guards() == first, "the end of the others")

    def test_a_mold_in_use_is_not_evicted(self, speak: Any) -> None:
        """Its call has its answer first."""
        _, mold, _ = speak("a")
        busy = speak.submit("a", do="hang")
        wait_until(lambda: speak.status().in_flight, "the call runs")
        assert "b" == speak("b")[0]
        assert psutil.pid_exists(mold)
        with pytest.raises(DeadlineExceeded):
            busy.result(30)

    def test_coroutines_use_it_too(self, speak: Any) -> None:
        """Without blocking the loop."""

        async def main() -> list[tuple[str, int, int]]:
            return await asyncio.gather(*(speak.aio(key) for key in "abab"))

        assert ["a", "b", "a", "b"] == [name for name, *_ in asyncio.run(main())]

    def test_a_policy_replaces_workers(self, speak: Any) -> None:
        """recycle_on counts in each worker."""
        workers = {speak("a")[2]}
        loads = speak.status().pool.loads
        wait_until(lambda: workers.add(speak("a")[2]) or len(workers) > 3, "fresh workers")
        assert loads == speak.status().pool.loads


class TestCommands:
    def test_unload_ends_the_molds_of_all_keys(self, speak: Any) -> None:
        """When it returns; the next call starts one."""
        molds = {speak(key)[1] for key in "ab"}
        asyncio.run(speak.aunload())
        assert [] == family()
        assert ("idle", True, {"a", "b"}) == (speak.status().state, speak.ready, set(speak.status().pool.idle))
        assert speak("a")[1] not in molds

    def test_a_pause_holds_back_policies(self, speak: Any) -> None:
        """Workers that are worn stay, and room is made all the same, for keys whose molds are paused from the start."""
        speak.pause()
        wait_until(lambda: speak("a") and speak.status().postponed is not None, "a worn worker")
        workers = {one.pid for one in speak.status().workers}
        assert speak("a")[2] in workers
        speak("b"), speak("c")
        assert {"b", "c"} == set(speak.status().pool.models)
        wait_until(lambda: speak("c") and speak.status().postponed is not None, "a worn worker")
        before = {one.pid for one in speak.status().workers}
        speak.resume()
        wait_until(lambda: before != {one.pid for one in speak.status().workers}, "the next worker")
        assert (False, "c") == (speak.status().paused, speak("c")[0])


class TestFailures:
    def test_a_load_that_fails_concerns_its_key(self, speak: Any) -> None:
        """Its callers get the loader's error; other keys serve."""
        with pytest.raises(LoadFailed, match="no such voice"):
            speak("broken")
        assert "a" == speak("a")[0]

    def test_a_load_that_has_failed_is_tried_again_when_it_is_asked_for(self) -> None:
        """And not in the background, for keys that nobody may ever want again."""
        loads: list[telemetry.Event] = []
        remove = telemetry.add_hook(lambda event: loads.append(event) if type(event) is telemetry.LoadStarted else None)
        with functions.speak as speak:
            for _ in range(3):
                with pytest.raises(LoadFailed):
                    speak("broken")
            begun = len(loads)
            wait_until(lambda: speak("a"), "another key")
            time.sleep(1.0)  # the backoff is 0.2 s at most
            assert begun + 2 == len(loads)  # of the other key, here and in its mold
        remove()

    @pytest.mark.parametrize("start", ["fork", "spawn"])
    def test_a_key_that_cannot_be_sent_is_told(self, start: Any) -> None:
        """Its call waits for no process: none is started."""
        keyed = pool(lambda key: [key], max_memory="1 GB")(key=lambda _: threading.Lock())(length)
        with isolate(workers=1, start=start)(keyed) as isolated, pytest.raises(LoadFailed, match="cannot pickle"):
            isolated.submit("a").result(20)
        assert not family()

    def test_a_crash_costs_one_call(self, speak: Any) -> None:
        """And no other key notices."""
        other = speak("b")[1]
        with pytest.raises(WorkerCrashed, match="exit status 3"):
            speak("a", do="crash")
        assert "a" == speak("a")[0]
        assert other == speak("b")[1]

    def test_a_mold_that_is_killed_is_replaced(self, speak: Any) -> None:
        """The next calls with its key wait for the next one."""
        _, mold, _ = speak("a")
        os.kill(mold, signal.SIGKILL)
        wait_until(lambda: mold != answered(speak, "a"), "the next mold")
        assert "a" == speak("a")[0]

    def test_inside_only_its_own_key(self, speak: Any) -> None:
        """A worker has one model: the function may call itself with that key."""
        assert "a" == speak("a", do="same")[0]
        with pytest.raises(NotSupported, match=r"has the model of key 'a'"):
            speak("a", do="other")


def test_many_keys_from_many_threads(speak: Any) -> None:
    """More keys than fit, and kills meanwhile: each call has its own key's answer, or a named error."""
    stop = threading.Event()
    wrong: list[object] = []
    answers: list[str] = []

    def call(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            key = chance.choice("abcd")
            try:
                name = speak(key)[0]
            except (WorkerCrashed, Overloaded, LoadFailed):
                continue
            answers.append(name)
            if name != key:
                wrong.append((key, name))

    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(call, seed) for seed in range(6)]
        try:
            for _ in range(5):
                before = len(answers)
                wait_until(lambda: len(answers) > before + 3, "answers")  # noqa: B023 - called in this round
                for one in family()[:1]:
                    one.kill()
        finally:
            stop.set()
        for one in calls:
            one.result()
    assert [] == wrong


def answered(function: Any, key: str) -> int:
    """The mold that has answered; 0 if none has."""
    try:
        mold: int = function(key)[1]
    except (WorkerCrashed, LoadFailed, Overloaded):
        return 0
    return mold
