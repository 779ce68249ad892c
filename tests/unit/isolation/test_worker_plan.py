"""Which worker of a mold gets a call, and which is started, replaced or ended, without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelguard import Backoff, Bounds, Breaker, telemetry
from modelguard.errors import CircuitOpen
from modelguard.isolation import _mold_workers
from modelguard.isolation._mold_workers import FAILED_STARTS, CallTimes, Claim, Waiter, Worker, Workers


class Start(NamedTuple):
    """An order to start one."""

    worker: Worker


class End(NamedTuple):
    """The end of one that was told to go."""

    worker: Worker


class ReplaceMold(NamedTuple):
    """An order to make another mold."""


Order = Start | End | ReplaceMold

WORN = (telemetry.Reason("uses", "Uses(5)"),)


class Plan:
    """The workers of a mold that only notes what it is told. Time is what the tests say.

    The backoff waits 1, 2, 4, ... seconds.
    """

    def __init__(
        self,
        size: int,
        *,
        spare: int = 0,
        breaker: Breaker | None = None,
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        options: Any = SimpleNamespace(name="f", workers=size, bounds=Bounds(queue=10), breaker=breaker or Breaker())
        self.workers = Workers(options, self, generation=1, backoff=Backoff(1, 60), spare=spare, is_paused=is_paused)
        self.now = 0.0
        self._made: dict[int, Worker] = {}
        self._orders: list[Order] = []

    # As their mold

    def start_worker(self, worker: Worker) -> None:
        """Note it."""
        channel: Any = SimpleNamespace(close=lambda: self._orders.append(End(worker)), hang_up=lambda: None)
        worker.channel = channel
        self._made[worker.number] = worker
        self._orders.append(Start(worker))

    def give_up(self) -> None:
        """Note it."""
        self._orders.append(ReplaceMold())

    def look_again_later(self, seconds: float) -> None:
        """The tests look when they like."""

    # What happens

    def _at(self, now: float | None, draw: float = 1.0) -> Any:
        self.now = self.now if now is None else now
        clock = SimpleNamespace(monotonic=lambda: self.now)
        return patch.multiple(_mold_workers, time=clock, random=SimpleNamespace(random=lambda: draw))

    def _new_orders(self) -> list[Order]:
        orders = self._orders[:]
        self._orders.clear()
        return orders

    def settle(self, now: float) -> list[Order]:
        """What was ordered since the last look, and is now."""
        with self._at(now):
            self.workers.look_again()
        return self._new_orders()

    def started(self, number: int) -> bool:
        """It has come up; whether it was ended instead of taken."""
        with self._at(None):
            self.workers.ready(self._made[number])
        return number not in self.members

    def take(self, *, again: bool = False) -> Worker | None:
        with self._at(None):
            try:
                return self.workers.take_now(again=again)
            except CircuitOpen:
                return None

    def wait(self, *, again: bool = False) -> Waiter:
        """A call for which there is no worker."""
        waiter = Waiter(Claim(CallTimes(self.now, again=again)))
        with self._at(None):
            assert self.workers.request(waiter) is None
        return waiter

    def answered(self, number: int, *, worn: bool) -> bool:
        """Its call has ended; whether it has, too."""
        with self._at(None):
            self.workers.release(self._made[number], worn=WORN if worn else ())
        return number not in self.members

    def lost(self, number: int, now: float, *, draw: float = 1.0, blame: bool = True) -> None:
        """It has ended, in its call or before one."""
        worker, before = self._made[number], len(self._orders)
        with self._at(now, draw):
            if worker.state in {"busy", "retiring"}:
                worker.has_exited("SIGKILL")
                self.workers.end_worker(worker, "crashed" if blame else "cancelled")
            else:
                self.workers.exited(worker, "SIGKILL")
        self._orders[before:] = [one for one in self._orders[before:] if one != End(worker)]  # nobody ordered that

    def end_until_next_call(self) -> list[Order] | None:
        numbers = self.workers.end_until_next_call()
        return None if numbers is None else self._new_orders()

    def call_back(self) -> None:
        with self._at(None):
            self.workers.call_back()

    def close(self) -> list[Order]:
        self.workers.retire_all()
        return self._new_orders()

    # What there is

    @property
    def members(self) -> dict[int, Worker]:
        return {worker.number: worker for worker, *_ in self.workers.listed()}

    @property
    def presence(self) -> str:
        return self.workers.presence

    def refuses(self, now: float) -> bool:
        """Whether the breaker lets no call pass."""
        with self._at(now):
            return self.workers._refusal() is not None


def running(size: int, *, spare: int = 0, is_paused: Callable[[], bool] = lambda: False, **breaker: int) -> Plan:
    """A plan whose workers are all idle."""
    plan = Plan(size, spare=spare, breaker=Breaker(**breaker), is_paused=is_paused)
    come_up(plan)
    return plan


def come_up(plan: Plan) -> None:
    for order in plan.settle(plan.now):
        assert isinstance(order, Start)
        plan.started(order.worker.number)


def numbers(orders: Iterable[Order], kind: type[Start | End]) -> list[int]:
    return [order.worker.number for order in orders if isinstance(order, kind)]


def told(orders: Iterable[Order] | None) -> list[tuple[type[Start | End], int]]:
    """The orders, by their kinds and the numbers of the workers."""
    assert orders is not None
    return [(type(order), order.worker.number) for order in orders if not isinstance(order, ReplaceMold)]


class TestStart:
    def test_all_workers_start_together(self) -> None:
        """A new mold forks all of its workers at once."""
        plan = Plan(3)
        assert [1, 2, 3] == numbers(plan.settle(0.0), Start)
        assert [] == plan.settle(0.0)

    def test_it_is_complete_when_all_have_come_up(self) -> None:
        """A mold takes calls only when every worker can."""
        plan = Plan(2)
        plan.settle(0.0)
        plan.started(1)
        assert not plan.workers.is_complete
        plan.started(2)
        assert plan.workers.is_complete

    def test_workers_that_do_not_come_up_condemn_the_mold(self) -> None:
        """A mold that fails to fork twice is replaced, and asked for only once."""
        plan = Plan(1)
        orders: list[Order] = []
        for now in range(0, 100, 10):
            for order in plan.settle(float(now)):
                orders.append(order)
                if isinstance(order, Start):
                    plan.lost(order.worker.number, float(now), draw=1.0)
        assert FAILED_STARTS == len(numbers(orders, Start))
        assert 1 == sum(isinstance(order, ReplaceMold) for order in orders)

    def test_workers_that_serve_are_no_reason_to_wait_when_they_have_gone(self) -> None:
        """Another mold is asked for when new workers do not come up, and once more when no other is left."""
        plan = Plan(2)
        plan.settle(0.0)
        plan.started(1)
        plan.lost(2, 0.0, draw=1.0)
        plan.settle(10.0)
        plan.lost(3, 10.0, draw=1.0)
        assert 1 == sum(isinstance(order, ReplaceMold) for order in plan.settle(20.0))
        assert plan.workers.is_ready
        assert [] == plan.settle(30.0)
        plan.lost(1, 30.0, draw=1.0)
        assert 1 == sum(isinstance(order, ReplaceMold) for order in plan.settle(40.0))
        assert [] == plan.settle(50.0)


class TestCalls:
    def test_the_worker_used_last_is_used_next(self) -> None:
        """Its caches are warm."""
        plan = running(2)
        first, second = plan.take(), plan.take()
        assert first is not None
        assert second is not None
        plan.answered(second.number, worn=False)
        plan.answered(first.number, worn=False)
        assert first is plan.take()

    def test_no_worker_gets_two_calls(self) -> None:
        """A worker computes one call at a time."""
        plan = running(2)
        taken = [plan.take() for _ in range(3)]
        assert taken[2] is None
        assert 2 == len({one.number for one in taken if one is not None})


class TestSpare:
    def spared(self) -> Plan:
        """Two calls at a time, and one worker more, as one has died."""
        plan = Plan(2, spare=1)
        come_up(plan)
        assert 2 == len(plan.members)
        died = plan.take()
        assert died is not None
        plan.lost(died.number, 0.0, draw=1.0)
        come_up(plan)
        for _ in range(2):  # the circuit and the backoff forget it
            member = plan.take()
            assert member is not None
            plan.answered(member.number, worn=False)
        return plan

    def test_it_comes_with_the_first_replacement(self) -> None:
        """A sound model pays for no worker that it does not need."""
        plan = Plan(2, spare=1)
        come_up(plan)
        worn = plan.take()
        assert worn is not None
        plan.answered(worn.number, worn=False)
        assert [] == plan.settle(0.0)
        plan.take()
        plan.answered(worn.number, worn=True)
        come_up(plan)  # beside the worn worker, which serves meanwhile
        orders = plan.settle(0.0)
        assert [worn.number] == numbers(orders, End)
        assert 1 == len(numbers(orders, Start))
        assert 3 == len(plan.members)

    def test_it_takes_no_calls_of_its_own(self) -> None:
        """As many calls run at a time as there are workers without it."""
        plan = self.spared()
        assert 3 == len(plan.members)
        assert [True, True, False] == [plan.take() is not None for _ in range(3)]

    def test_it_takes_the_place_of_a_worn_worker_at_once(self) -> None:
        """The worn worker ends after the call that wore it, and the next spare one is started."""
        plan = self.spared()
        worn, other = plan.take(), plan.take()
        assert worn is not None
        assert other is not None
        assert plan.answered(worn.number, worn=True)
        orders = plan.settle(0.0)
        assert [worn.number] == numbers(orders, End)
        assert 1 == len(numbers(orders, Start))
        assert plan.take() is not None

    def test_it_takes_the_place_of_a_dead_worker_at_once(self) -> None:
        """Also while the backoff of a crash loop lasts."""
        plan = self.spared()
        for _ in range(2):
            member = plan.take()
            assert member is not None
            plan.lost(member.number, 0.0, draw=1.0)
        assert plan.take() is not None


class TestReplacement:
    def test_a_worn_worker_serves_until_its_replacement_is_ready(self) -> None:
        """A policy that is due costs no capacity."""
        plan = running(1)
        assert plan.take() is not None
        assert not plan.answered(1, worn=True)
        assert [(Start, 2)] == told(plan.settle(0.0))
        worn = plan.take()
        assert worn is not None
        assert 1 == worn.number
        plan.answered(1, worn=True)
        plan.started(2)
        assert [(End, 1)] == told(plan.settle(0.0))
        assert [2] == list(plan.members)

    def test_a_busy_worn_worker_ends_after_its_call(self) -> None:
        """Its last call gets its answer."""
        plan = running(1)
        plan.take()
        plan.answered(1, worn=True)
        plan.settle(0.0)
        plan.take()
        plan.started(2)
        assert [] == plan.settle(0.0)
        assert plan.answered(1, worn=False)

    def test_replacements_start_one_at_a_time(self) -> None:
        """Workers that are worn together are not replaced in step."""
        plan = running(3)
        for _ in range(3):
            plan.take()
        for number in (1, 2, 3):
            plan.answered(number, worn=True)
        assert [4] == numbers(plan.settle(0.0), Start)
        assert [] == numbers(plan.settle(0.0), Start)
        plan.started(4)
        orders = plan.settle(0.0)
        assert [5] == numbers(orders, Start)
        assert 1 == len(numbers(orders, End))


class TestDeaths:
    def test_the_first_death_is_replaced_at_once(self) -> None:
        """One crash costs one call, and no time."""
        plan = running(2)
        plan.take()
        plan.lost(2, 5.0, draw=0.5)
        assert [(Start, 3)] == told(plan.settle(5.0))

    def test_a_crash_loop_backs_off(self) -> None:
        """The second death in a row waits for the backoff."""
        plan = running(1)
        for number, now in ((1, 0.0), (2, 0.0)):
            plan.take()
            plan.lost(number, now, draw=1.0)
            for order in plan.settle(now):
                assert isinstance(order, Start)
                plan.started(order.worker.number)
        assert [] == plan.settle(0.9)
        assert [(Start, 3)] == told(plan.settle(1.0))

    def test_an_answer_ends_a_series(self) -> None:
        """Deaths far apart are not a loop."""
        plan = running(1)
        for number in (1, 2, 3):
            plan.take()
            plan.lost(number, 0.0, draw=1.0)
            assert [(Start, number + 1)] == told(plan.settle(0.0))
            plan.started(number + 1)
            plan.take()
            plan.answered(number + 1, worn=False)

    def test_the_breaker_opens_and_a_probe_closes_it(self) -> None:
        """While workers keep dying calls are refused at once, and one call tries again after the cooldown."""
        plan = running(2, failures=2, cooldown=10, max_cooldown=10)
        for now in (0.0, 0.0):
            member = plan.take()
            assert member is not None
            plan.lost(member.number, now, draw=0.0)
        assert plan.refuses(0.0)
        assert not plan.workers.is_ready
        assert [(Start, 3)] == told(plan.settle(20.0))  # one is enough for the probe
        plan.started(3)
        assert not plan.refuses(20.0)
        probe = plan.take()
        assert probe is not None
        assert plan.refuses(20.0)
        plan.answered(probe.number, worn=False)
        assert not plan.refuses(20.0)
        assert 1 == len(numbers(plan.settle(20.0), Start))

    def test_what_is_run_again_passes_an_open_circuit_and_closes_it(self) -> None:
        """Its failures say nothing, nor make others wait for longer; its success shows that the model works."""
        plan = running(1, failures=1, cooldown=10, max_cooldown=10)
        plan.take()
        plan.lost(1, 0.0)
        for number in (2, 3):
            assert [(Start, number)] == told(plan.settle(0.0))
            plan.started(number)
            assert plan.take() is None
            assert plan.take(again=True) is not None
            plan.lost(number, 0.0, blame=False)
        plan.settle(0.0)
        plan.started(4)
        plan.take(again=True)
        assert plan.refuses(0.0)
        plan.answered(4, worn=False)
        assert not plan.refuses(0.0)
        assert plan.take() is not None

    def test_what_is_run_again_waits_for_no_backoff(self) -> None:
        """How often it is run again is bounded anyway, and others wait for its end."""
        plan = running(1, failures=9)
        for number in (1, 2):
            plan.take()
            plan.lost(number, 0.0)
            if number == 1:
                come_up(plan)
        assert [] == plan.settle(0.0)
        waiter = plan.wait(again=True)
        assert [(Start, 3)] == told(plan.settle(0.0))
        plan.started(3)
        assert waiter.result(0) is not None

    def test_who_waits_behind_what_is_run_again_is_refused_at_once(self) -> None:
        """An open circuit holds for all others, also while there is no worker for it."""
        plan = running(1, failures=1, cooldown=10, max_cooldown=10)
        plan.take()
        again, *others = plan.wait(again=True), plan.wait(), plan.wait()
        plan.lost(1, 0.0)
        errors = [other.exception(0) for other in others]
        assert [CircuitOpen] * 2 == [type(error) for error in errors]
        assert errors[0] is not errors[1]
        assert not again.done()
        come_up(plan)
        assert again.result(0) is not None

    def test_a_probe_that_is_interrupted_opens_nothing(self, seen: list[telemetry.Event]) -> None:
        """The circuit was open, and is reported once."""
        plan = running(1, failures=1, cooldown=10, max_cooldown=10)
        plan.take()
        plan.lost(1, 0.0)
        plan.settle(20.0)
        plan.started(2)
        assert plan.take() is not None
        plan.lost(2, 20.0, blame=False)
        assert [1] == [event.failures for event in seen if isinstance(event, telemetry.CircuitOpened)]

    def test_an_interrupted_call_blames_nobody(self) -> None:
        """Ctrl-C in the owner ends a worker, and is not a failure of the model."""
        plan = running(1, failures=1)
        plan.take()
        plan.lost(1, 0.0, draw=0.5, blame=False)
        assert not plan.refuses(0.0)
        assert [(Start, 2)] == told(plan.settle(0.0))

    def test_a_death_is_counted_once(self) -> None:
        """Its caller and the mold both report it."""
        plan = running(1)
        plan.take()
        plan.lost(1, 0.0, draw=0.5)
        plan.lost(1, 0.0, draw=0.5)
        assert [(Start, 2)] == told(plan.settle(0.0))  # after a second one it would wait


class TestUntilTheNextCall:
    def test_all_end_and_none_starts(self) -> None:
        """However much time passes."""
        plan = running(2)
        assert [(End, 1), (End, 2)] == told(plan.end_until_next_call())
        assert ("ended", {}, []) == (plan.presence, plan.members, plan.settle(1000.0))
        assert plan.take() is None

    def test_a_call_brings_all_back(self) -> None:
        """They are present again once the first of them has come up."""
        plan = running(2)
        plan.end_until_next_call()
        plan.call_back()
        assert ("returning", [3, 4]) == (plan.presence, numbers(plan.settle(0.0), Start))
        plan.started(3)
        assert ("present", True) == (plan.presence, plan.take() is not None)

    def test_nothing_ends_while_one_has_something_to_do(self) -> None:
        """It runs a call, starts, or is being replaced."""
        plan = running(2)
        assert plan.take() is not None
        assert (None, "present") == (plan.end_until_next_call(), plan.presence)
        plan = Plan(2)
        plan.settle(0.0)
        plan.started(1)
        assert (None, "present") == (plan.end_until_next_call(), plan.presence)

    def test_a_backoff_holds_for_the_first_call_too(self) -> None:
        """Workers that died before are not started faster because nobody called meanwhile."""
        plan = running(1)
        for _ in range(2):
            plan.lost(max(plan.members), 0.0, draw=1.0)
            for order in plan.settle(0.0):
                assert isinstance(order, Start)
                plan.started(order.worker.number)
        assert [] == plan.end_until_next_call()
        plan.call_back()
        assert [] == plan.settle(0.9)
        assert 1 == len(numbers(plan.settle(1.0), Start))

    def test_a_start_that_fails_is_tried_again(self) -> None:
        """As without it."""
        plan = running(1)
        plan.end_until_next_call()
        plan.call_back()
        (number,) = numbers(plan.settle(0.0), Start)
        plan.lost(number, 0.0, draw=0.0)
        assert ("present", 1) == (plan.presence, len(numbers(plan.settle(0.0), Start)))

    def test_a_closed_plan_has_none(self) -> None:
        """Whatever is asked for."""
        plan = running(1)
        plan.close()
        assert (None, "present") == (plan.end_until_next_call(), plan.presence)


class TestEnd:
    def test_a_worker_that_comes_up_too_late_is_ended(self) -> None:
        """Closing does not wait for it, and does not forget it."""
        plan = Plan(1)
        plan.settle(0.0)
        plan.close()
        assert plan.started(1)
        assert not plan.members

    def test_closing_ends_idle_workers_and_lets_busy_ones_answer(self) -> None:
        """Closing drains."""
        plan = running(2)
        busy = plan.take()
        assert busy is not None
        assert 1 == len(numbers(plan.close(), End))
        assert plan.answered(busy.number, worn=False)
        assert not plan.members
        assert [busy.number] == numbers(plan.settle(0.0), End)


@given(st.integers(1, 8))
def test_a_plan_of_any_size_settles(size: int) -> None:
    """As many workers as were asked for, and no order after that."""
    assert size == len(running(size).members)


class PlanMachine(RuleBasedStateMachine):
    """Workers that start, answer, wear out and die in any order."""

    SIZE, SPARE = 3, 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.paused = False
        breaker = Breaker(failures=4, cooldown=5, max_cooldown=20)
        self.plan = Plan(self.SIZE, spare=self.SPARE, breaker=breaker, is_paused=lambda: self.paused)
        self.starting: set[int] = set()
        self.busy: set[int] = set()
        self.condemned = False
        self.settle()

    def settle(self) -> None:
        for order in self.plan.settle(self.now):
            if isinstance(order, Start):
                self.starting.add(order.worker.number)
            elif isinstance(order, End):
                assert order.worker.number not in self.busy | self.starting
                assert not self.paused
            else:
                self.condemned = True

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule()
    def pause_or_resume(self) -> None:
        """What a pause holds back happens at its end; what has ended is replaced in it."""
        self.paused = not self.paused
        self.settle()

    @precondition(lambda self: self.starting)
    @rule(comes_up=st.booleans(), pick=st.integers(0, 10))
    def start_ends(self, comes_up: bool, pick: int) -> None:  # noqa: FBT001 - hypothesis passes it
        number = sorted(self.starting)[pick % len(self.starting)]
        self.starting.discard(number)
        if comes_up:
            self.plan.started(number)
        else:
            self.plan.lost(number, self.now, draw=0.5)
        self.settle()

    @precondition(lambda self: not self.plan.refuses(self.now))
    @rule()
    def call_begins(self) -> None:
        member = self.plan.take()
        if member is not None:
            assert member.number not in self.busy | self.starting
            self.busy.add(member.number)

    @precondition(lambda self: self.busy)
    @rule(outcome=st.sampled_from(["answer", "worn", "crash", "interrupted"]), pick=st.integers(0, 10))
    def call_ends(self, outcome: str, pick: int) -> None:
        number = sorted(self.busy)[pick % len(self.busy)]
        self.busy.discard(number)
        if outcome in {"answer", "worn"}:
            self.plan.answered(number, worn=outcome == "worn")
        else:
            self.plan.lost(number, self.now, draw=0.5, blame=outcome == "crash")
        self.settle()

    @rule()
    def nobody_calls(self) -> None:
        """All end at once, or none; and a call brings them back."""
        has_work = any(member.state != "idle" for member in self.plan.members.values())
        before, had_ended = set(self.plan.members), self.plan.presence != "present"
        orders = self.plan.end_until_next_call()
        if orders is None:
            assert self.condemned or has_work or had_ended
        else:
            assert (before, "ended") == ({order.worker.number for order in orders}, self.plan.presence)

    @rule()
    def a_call_comes(self) -> None:
        self.plan.call_back()
        self.settle()

    @invariant()
    def never_more_than_one_above_the_size(self) -> None:
        """Overlap costs the memory of one worker."""
        assert len(self.plan.members) <= self.SIZE + 1
        assert len(self.busy) <= self.SIZE

    @invariant()
    def every_worker_is_accounted_for(self) -> None:
        """Busy and starting workers are exactly those whose end has not been reported."""
        states = {number: member.state for number, member in self.plan.members.items()}
        assert self.busy == {number for number, state in states.items() if state in {"busy", "retiring"}}
        assert self.starting == {number for number, state in states.items() if state == "starting"}

    @invariant()
    def it_recovers(self) -> None:
        """Unless the mold was condemned, or nobody has called, time alone brings a worker back."""
        if self.plan.presence == "ended":
            assert not self.plan.members
        elif not self.condemned and not self.plan.members:
            self.now += 120.0
            self.settle()
            assert self.condemned or self.starting


class SpareMachine(PlanMachine):
    """The same with a spare worker."""

    SPARE = 1


SpareMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSpareMachine = SpareMachine.TestCase
PlanMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPlanMachine = PlanMachine.TestCase
