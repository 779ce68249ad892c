"""The workers of a function over several molds, without processes: calls, deaths, replacements, new molds, an end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelguard import Backoff, Bounds, Breaker, telemetry
from modelguard.errors import CircuitOpen
from modelguard.isolation import _mold_workers
from modelguard.isolation._mold_workers import CallTimes, Claim, Waiter, Worker, Workers

SIZE = 2

#: Why a worker asks for its replacement.
WORN = telemetry.Reason("uses", "Uses(5)")


class FakeChannel:
    """Can be closed."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True

    def hang_up(self) -> None:
        pass


class FakeTime:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class FakeMold:
    """Takes the orders of its workers, whose workers it makes when it is told to go on."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.paused = False
        breaker = Breaker(failures=4, cooldown=5, max_cooldown=20)
        options: Any = SimpleNamespace(name="f", workers=SIZE, bounds=Bounds(queue=10), breaker=breaker)
        self.workers = Workers(
            options, self, generation=generation, backoff=Backoff(1, 60), spare=1, is_paused=lambda: self.paused
        )
        self.made: dict[int, Worker] = {}
        self.starting: set[int] = set()
        self.gave_up = False
        self.closed = False
        self.workers.look_again()

    def start_worker(self, worker: Worker) -> None:
        assert not self.closed
        channel: Any = FakeChannel()
        worker.channel = channel
        worker.pid = 1000 * self.generation + worker.number
        self.made[worker.number] = worker
        self.starting.add(worker.number)

    def give_up(self) -> None:
        self.gave_up = True

    def look_again_later(self, seconds: float) -> None:
        assert seconds > 0

    def alive(self) -> list[Worker]:
        """The workers whose channel is open."""
        return [worker for worker in self.made.values() if not getattr(worker.channel, "closed", False)]


class WorkersMachine(RuleBasedStateMachine):
    """Calls come and go while workers start, wear out, crash and hang, and molds die and are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeTime()
        self.patching = patch.object(_mold_workers, "time", self.clock)
        self.patching.start()
        self.started: list[int] = []
        self.ended: list[telemetry.WorkerEnded] = []
        self.remove = telemetry.add_hook(self.note)
        self.molds = [FakeMold(1)]
        self.calls: list[tuple[FakeMold, Worker]] = []

    def teardown(self) -> None:
        for mold in self.molds:
            mold.workers.retire_all()
        for mold, worker in self.calls:
            mold.workers.release(worker, worn=())
        for mold in self.molds:
            assert [] == [one for one, state, *_ in mold.workers.listed() if state != "starting"]
            assert [] == [one for one in mold.alive() if one.number not in mold.starting]
        assert sorted(self.started) == sorted(event.worker for event in self.ended)
        self.remove()
        self.patching.stop()

    def note(self, event: telemetry.Event) -> None:
        if isinstance(event, telemetry.WorkerStarted):
            self.started.append(event.worker)
        elif isinstance(event, telemetry.WorkerEnded):
            self.ended.append(event)

    @property
    def current(self) -> FakeMold:
        return self.molds[-1]

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        for mold in self.molds:
            mold.workers.look_again()

    @precondition(lambda self: any(mold.starting for mold in self.molds))
    @rule(comes_up=st.booleans(), pick=st.integers(0, 10))
    def start_ends(self, comes_up: bool, pick: int) -> None:  # noqa: FBT001 - hypothesis passes it
        waiting = [(mold, number) for mold in self.molds for number in sorted(mold.starting)]
        mold, number = waiting[pick % len(waiting)]
        mold.starting.discard(number)
        worker = mold.made[number]
        if comes_up:
            mold.workers.ready(worker)
        elif pick % 2:
            worker.channel.close()
            mold.workers.lost(worker, "no memory")
        else:
            mold.workers.exited(worker, "SIGKILL")

    @rule(pick=st.integers(0, 10))
    def call_begins(self, pick: int) -> None:
        """On the current mold most of the time; a call that has just met an old one is sent on."""
        mold = self.molds[pick] if pick < len(self.molds) else self.current
        try:
            waiter = Waiter(Claim(CallTimes(0.0, again=pick % 3 == 1)))
            worker = mold.workers.request(waiter)
        except CircuitOpen:
            assert not mold.closed
        else:
            if worker is None:
                assert mold.workers.withdraw(waiter)
                return
            assert not mold.closed
            assert worker not in [taken for _, taken in self.calls]
            assert worker in mold.alive()
            self.calls.append((mold, worker))

    @precondition(lambda self: self.calls)
    @rule(
        outcome=st.sampled_from(["answer", "answer", "worn", "crashed", "timeout", "cancelled"]),
        pick=st.integers(0, 10),
    )
    def call_ends(self, outcome: str, pick: int) -> None:
        mold, worker = self.calls.pop(pick % len(self.calls))
        if outcome in {"answer", "worn"}:
            mold.workers.release(worker, worn=(WORN,) if outcome == "worn" else ())
        else:
            worker.has_exited("SIGSEGV")
            mold.workers.end_worker(worker, outcome)  # type: ignore[arg-type]
            mold.workers.exited(worker, "SIGSEGV")  # the mold reports it too
            assert worker not in mold.alive()

    @rule()
    def pause_or_resume(self) -> None:
        mold = self.current
        mold.paused = not mold.paused
        mold.workers.look_again()

    @rule(pick=st.integers(0, 10))
    def idle_worker_dies(self, pick: int) -> None:
        mold = self.current
        idle = [worker for worker, state, *_ in mold.workers.listed() if state == "idle"]
        if idle:
            mold.workers.exited(idle[pick % len(idle)], "SIGKILL")

    @rule()
    def nobody_calls(self) -> None:
        """All workers end, and with cause ``idle``; or none does, because one has something to do."""
        mold = self.current
        before = {worker.number: state for worker, state, *_ in mold.workers.listed()}
        told = mold.workers.counts["idle"]
        numbers = mold.workers.end_until_next_call()
        if numbers is None:
            assert told == mold.workers.counts["idle"]
            return
        assert {"idle"} >= set(before.values())
        assert (sorted(before), [], told + len(before)) == (
            sorted(numbers),
            mold.workers.listed(),
            mold.workers.counts["idle"],
        )
        mold.workers.look_again()
        assert ([], "ended") == (mold.workers.listed(), mold.workers.presence)

    @precondition(lambda self: len(self.molds) < 4)
    @rule(dies=st.booleans())
    def new_mold(self, dies: bool) -> None:  # noqa: FBT001 - hypothesis passes it
        """The old one has died with all of its workers, or serves its last calls beside the new one."""
        old = self.current
        old.closed = True
        if dies:
            old.workers.mold_ended("SIGKILL")
            for number in old.starting:  # the supervisor reads the end of their channels
                old.made[number].channel.close()
            old.starting.clear()
            lost, self.calls = [one for one in self.calls if one[0] is old], [c for c in self.calls if c[0] is not old]
            for mold, worker in lost:
                assert worker.exit is not None
                mold.workers.end_worker(worker, "crashed")
        else:
            old.workers.retire_all()
        self.molds.append(FakeMold(len(self.molds) + 1))

    @invariant()
    def as_many_calls_as_workers(self) -> None:
        for mold in self.molds:
            assert sum(one is mold for one, _ in self.calls) <= SIZE
            assert len(mold.workers.listed()) <= SIZE + 1

    @invariant()
    def every_end_is_told_once(self) -> None:
        """Of those whose start was told."""
        told = [event.worker for event in self.ended]
        assert set(told) <= set(self.started)
        assert len(set(told)) == len(told)
        assert len(self.ended) == sum(sum(mold.workers.counts.values()) for mold in self.molds)

    @invariant()
    def what_is_open_is_known(self) -> None:
        """A worker that is neither listed nor in a call has its channel closed: no process is forgotten."""
        for mold in self.molds:
            listed = {worker for worker, *_ in mold.workers.listed()}
            in_calls = {worker for one, worker in self.calls if one is mold}
            starting = {mold.made[number] for number in mold.starting}
            assert set(mold.alive()) <= listed | in_calls | starting


WorkersMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestWorkersMachine = WorkersMachine.TestCase
