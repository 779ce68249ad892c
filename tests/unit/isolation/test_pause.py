"""``pause()`` of an isolated function, without processes: its workers and its molds."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.isolation.test_mold_workers import FakeMold
from tests.unit.isolation.test_worker_plan import End, Plan, Start, numbers, running
from tests.unit.lifecycle.world import until

from modelguard import TTL, Backoff, Isolated, Loading, guard, isolate, pool, telemetry
from modelguard.errors import GuardClosed, InvalidOption, NoPreviousModel
from modelguard.isolation import _mold_owner
from modelguard.isolation._mold_workers import CallTimes, Claim, Waiter, Worker, Workers
from modelguard.lifecycle.status import Postponed
from modelguard.telemetry import GuardPaused, GuardResumed, Reason, ReloadPostponed

USES, LIMIT = Reason("uses", "Uses(5)"), Reason("memory_limit", "MemoryLimit('1 GB')")


def of(kind: type[telemetry.Event], events: list[telemetry.Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


class Switch:
    """Whether it is paused."""

    def __init__(self) -> None:
        self.on = True

    def __call__(self) -> bool:
        return self.on


def call(plan: Plan, *, worn: bool = False) -> int:
    """One call, and what its end brings about."""
    member = plan.take()
    assert member is not None
    plan.answered(member.number, worn=worn)
    return member.number


class TestWorkers:
    @pytest.mark.parametrize("spare", [0, 1])
    def test_a_worn_worker_stays(self, spare: int) -> None:
        """It takes calls as before, and is replaced after ``resume()``."""
        paused = Switch()
        plan = running(2, spare=spare, is_paused=paused)
        worn = call(plan, worn=True)
        assert [] == plan.settle(0.0)
        assert worn == call(plan)
        paused.on = False
        (start,) = numbers(plan.settle(0.0), Start)
        plan.started(start)
        plan.settle(0.0)
        assert worn not in plan.members

    def test_one_that_was_due_before_stays_too(self) -> None:
        """Its replacement had been started: both serve until ``resume()``."""
        paused = Switch()
        paused.on = False
        plan = running(1, is_paused=paused)
        worn = call(plan, worn=True)
        (start,) = numbers(plan.settle(0.0), Start)
        paused.on = True
        plan.started(start)
        assert [] == plan.settle(0.0)
        paused.on = False
        assert [worn] == numbers(plan.settle(0.0), End)

    def test_what_has_died_is_replaced(self) -> None:
        """Also where the others are worn: a crash must not cost a worker for as long as the pause lasts."""
        plan = running(2, spare=1, is_paused=Switch())
        for number in (call(plan, worn=True), 1):
            if number in plan.members:
                plan.lost(number, plan.now)
                for start in numbers(plan.settle(plan.now + 60.0), Start):
                    plan.started(start)
        assert 3 == len(plan.members)  # and a spare one


def taken(workers: Workers) -> Worker:
    """An idle worker, taken for a call."""
    worker = workers.request(Waiter(Claim(CallTimes(0.0))))
    assert worker is not None
    return worker


class TestWorkersOfAMold:
    @pytest.fixture
    def mold(self) -> FakeMold:
        """A paused mold whose workers are idle."""
        mold = FakeMold(3)
        for worker in mold.made.values():
            mold.workers.ready(worker)
        mold.paused = True
        return mold

    def wear(self, workers: Workers, *reasons: Reason) -> int:
        worker = taken(workers)
        workers.release(worker, worn=reasons)
        return worker.pid

    def test_each_policy_is_reported_once(self, mold: FakeMold, seen: list[telemetry.Event]) -> None:
        """With the worker that would be replaced; not again for another worker, and not for each call."""
        first = self.wear(mold.workers, USES)
        for _ in range(3):
            self.wear(mold.workers, USES)
        self.wear(mold.workers, LIMIT)
        told = of(ReloadPostponed, seen)
        assert [((USES,), "paused", None, 3, first), ((LIMIT,), "paused", None, 3, first)] == [
            (event.reasons, event.cause, event.seconds, event.generation, event.worker) for event in told
        ]

    def test_what_waits_is_known_until_it_is_done(self, mold: FakeMold) -> None:
        """Until the worker has ended, or ``resume()``."""
        self.wear(mold.workers, USES)
        assert (USES,) == mold.workers.postponed
        mold.paused = False
        mold.workers.look_again()
        mold.paused = True
        assert () == mold.workers.postponed

    def test_a_worker_that_has_died_waits_no_more(self, mold: FakeMold) -> None:
        """What would have been replaced is gone."""
        worker = taken(mold.workers)
        mold.workers.release(worker, worn=(USES,))
        mold.workers.exited(worker, "SIGKILL")
        assert () == mold.workers.postponed

    def test_nothing_is_reported_without_a_pause(self, mold: FakeMold, seen: list[telemetry.Event]) -> None:
        """The worker is replaced instead."""
        mold.paused = False
        self.wear(mold.workers, USES)
        mold.workers.look_again()
        for number in tuple(mold.starting):
            mold.workers.ready(mold.made[number])
        assert [] == of(ReloadPostponed, seen)
        assert ["recycled"] == [event.cause for event in of(telemetry.WorkerEnded, seen)]


class Process:
    """Stands for a mold."""

    fails = False
    made: list[Process]
    gate, loading = threading.Event(), threading.Event()

    def __init__(self, instructions: Any, owner: Any, *, generation: int) -> None:
        self.instructions, self.generation, self.is_paused = instructions, generation, owner.is_paused
        self.die = lambda: owner.replace_failed(self)
        self.code = self.version = None
        self.died: float | None = None
        self.born = time.monotonic()
        self.settled = 0
        self.pid, self.idle = 1, False
        self.workers = SimpleNamespace(
            look_again=self.settle,
            postponed=(),
            listed=list,
            pids=list,
            counts={},
            is_ready=True,
            presence="present",
            gone=False,
            send_on=lambda: None,
            retire_all=lambda: None,
        )

    def settle(self) -> None:
        self.settled += 1

    def load(self) -> None:
        type(self).loading.set()
        assert type(self).gate.wait(60)
        if type(self).fails:
            raise OSError("no weights")
        type(self).made.append(self)

    def pids(self) -> list[int]:
        return []

    def end(self) -> None:
        """Nothing runs."""

    def abandon(self) -> None:
        """Nothing is open."""

    def end_at_once(self) -> None:
        """Nothing runs."""


class Supervisor:
    """Keeps timers that a test runs."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], object]]] = []

    def later(self, seconds: float, work: Callable[[], object]) -> None:
        self.timers.append((seconds, work))

    def run(self) -> int:
        """Run those that there are; returns how many."""
        timers, self.timers = self.timers, []
        for _, work in timers:
            work()
        return len(timers)


def answer(_: object, text: str) -> str:
    """A function to isolate."""
    return text


guarded = guard(
    dict, reload_on=TTL("1h", jitter=0), loading=Loading(backoff=Backoff(0.01, 0.02)), swap="load_first", name="model"
)(answer)
voices = pool(lambda name: {"name": name}, max_memory="1 GB", name="voices")


@voices(key="text")
def voiced(_: object, text: str) -> str:
    """A function of a pool."""
    return text


class TestMolds:
    @pytest.fixture
    def supervised(self, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
        """Molds that are no processes."""
        supervisor = Supervisor()
        monkeypatch.setattr(_mold_owner, "supervisor", lambda: supervisor)
        monkeypatch.setattr(_mold_owner, "Mold", Process)
        monkeypatch.setattr(Process, "fails", False)
        Process.gate.set()
        monkeypatch.setattr(Process, "made", [], raising=False)
        return supervisor

    @pytest.fixture
    def isolated(self, supervised: Supervisor) -> Iterator[Isolated[Any, Any]]:
        """A function whose molds load at once."""
        del supervised
        with isolate()(guarded) as function:
            yield function

    def test_pause_is_a_switch(self, isolated: Isolated[Any, Any], seen: list[telemetry.Event]) -> None:
        """Twice is the same as once, and events say when it begins and ends; its workers are asked at the end."""
        isolated.pause()
        isolated.pause()
        (mold,) = Process.made
        assert (True, True) == (isolated.status().paused, mold.is_paused())
        settled = mold.settled
        isolated.resume()
        isolated.resume()
        assert (False, False) == (isolated.status().paused, mold.is_paused())
        assert mold.settled > settled
        assert [(1, 1)] == [(len(of(GuardPaused, seen)), len(of(GuardResumed, seen)))]

    def test_reload_and_unload_work(self, isolated: Isolated[Any, Any]) -> None:
        """By hand everything can be replaced; a new mold is paused as well."""
        isolated.pause()
        isolated.reload()
        assert 2 == isolated.status().generation
        isolated.unload()
        assert ("idle", False) == (isolated.status().state, isolated.ready)  # as a guard without Idle
        isolated.load()
        assert [True] * 3 == [mold.is_paused() for mold in Process.made]

    def test_a_mold_that_dies_is_replaced(self, isolated: Isolated[Any, Any], supervised: Supervisor) -> None:
        """It takes no calls, so this is no replacement that could wait, and a load that fails is tried again."""
        isolated.pause()
        (mold,) = Process.made
        until(lambda: not isolated._scope._molds.guard.engine.loading)  # type: ignore[attr-defined]
        Process.fails, mold.died = True, time.monotonic()
        mold.die()
        assert 1 == supervised.run()
        until(lambda: isolated.status().failures >= 1)
        Process.fails = False
        until(lambda: isolated.status().generation == 2)
        assert isolated.status().paused
        assert [] == supervised.timers

    def test_a_mold_that_dies_while_another_one_fails_to_load(
        self, isolated: Isolated[Any, Any], supervised: Supervisor
    ) -> None:
        """A paused guard retries no load as long as it has a mold, and this one takes no calls."""
        isolated.pause()
        Process.fails = True
        Process.gate.clear()
        Process.loading.clear()
        isolated.reload(wait=False)
        (mold,) = Process.made
        assert Process.loading.wait(60)
        mold.died = time.monotonic()
        mold.die()
        assert 1 == supervised.run()  # the load may yet succeed
        Process.gate.set()
        until(lambda: isolated.status().failures == 1 and isolated.status().state == "degraded")
        Process.fails = False
        assert 1 == supervised.run()
        until(lambda: isolated.status().generation == 2)
        assert [] == supervised.timers

    def test_a_mold_that_gets_no_workers_is_replaced(
        self, isolated: Isolated[Any, Any], supervised: Supervisor
    ) -> None:
        """It serves on until the next one is there, and the load is tried again though the guard would not."""
        isolated.pause()
        (mold,) = Process.made
        until(lambda: not isolated._scope._molds.guard.engine.loading)  # type: ignore[attr-defined]
        Process.fails = True
        mold.die()
        assert 1 == supervised.run()
        until(lambda: isolated.status().state == "degraded")
        assert isolated.ready
        Process.fails = False
        until(lambda: supervised.run() and isolated.status().generation == 2)
        supervised.run()
        assert [] == supervised.timers

    def test_nothing_keeps_a_dead_mold_alive(self, isolated: Isolated[Any, Any], supervised: Supervisor) -> None:
        """A timer that waits for its end must not hold what it waits for."""
        isolated.pause()
        mold = Process.made.pop()
        mold.died = time.monotonic()
        mold.die()
        kept = weakref.ref(mold)
        del mold.die, mold
        isolated.reload()
        until(lambda: kept() is None)
        supervised.run()
        assert [] == supervised.timers

    def test_the_status_says_what_waits(self, isolated: Isolated[Any, Any]) -> None:
        """Workers and molds in one answer."""
        isolated.pause()
        (mold,) = Process.made
        mold.workers.postponed = (USES,)
        assert Postponed(reasons=(USES,), cause="paused", seconds=None) == isolated.status().postponed

    def test_a_forked_child_is_paused_too(self, isolated: Isolated[Any, Any]) -> None:
        """As its guards are."""
        isolated.pause()
        isolated.renew_in_child()
        assert ("new", True) == (isolated.status().state, isolated.status().paused)

    def test_a_closed_function(self) -> None:
        """It has nothing to unload; a pause outlasts the end, as a guard's does."""
        isolated = isolate()(guarded)
        isolated.close()
        with pytest.raises(GuardClosed):
            isolated.unload()
        isolated.pause()
        assert isolated.status().paused

    @pytest.mark.parametrize("wait", ["5s", 5, None])
    def test_a_bad_wait(self, wait: Any) -> None:
        """The message names it."""
        with pytest.raises(InvalidOption, match="wait="):
            isolate()(guarded).reload(wait=wait)

    def test_over_a_pool_there_is_no_way_back(self) -> None:
        """The error names the function and what it cannot do: no key's mold is kept."""
        with pytest.raises(NoPreviousModel, match=r"voiced' has no previous model: each key of a pool"):
            isolate()(voiced).rollback()

    def test_a_pause_over_a_pool(self, seen: list[telemetry.Event]) -> None:
        """It is the function's, is reported once, holds for keys that come later, and outlasts a reopening."""
        function = isolate()(voiced)
        function.pause()
        function.pause()
        engine = function._scope._engine_of("key", None)  # type: ignore[attr-defined]
        assert (True, True, True) == (function.status().paused, function._scope.paused, engine.state.paused)
        function.close()
        with function:
            assert function.status().paused
            function.resume()
        assert (False, [(1, 1)]) == (
            function.status().paused,
            [(len(of(GuardPaused, seen)), len(of(GuardResumed, seen)))],
        )

    def test_a_closed_function_over_a_pool(self) -> None:
        """It has nothing to reload or unload."""
        function = isolate()(voiced)
        function.reload()
        function.unload()
        assert "new" == function.status().state
        function.close()
        for command in (function.reload, function.unload):
            with pytest.raises(GuardClosed):
                command()
