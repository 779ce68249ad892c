"""The state machine over workers, without processes: which worker gets a call, and which is started or ended."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelguard import Backoff, Breaker
from modelguard.isolation._mold_workers import FAILED_STARTS, End, Order, ReplaceMold, Start, WorkerPlan


def crew_of(size: int, **breaker: int) -> WorkerPlan:
    """A crew whose backoff waits 1, 2, 4, ... seconds without jitter of note."""
    return WorkerPlan(size, breaker=Breaker(**breaker), backoff=Backoff(1, 60))


def running(size: int, **breaker: int) -> WorkerPlan:
    """A crew whose workers are all idle."""
    crew = crew_of(size, **breaker)
    for order in crew.settle(0.0):
        assert isinstance(order, Start)
        crew.started(order.number)
    return crew


def numbers(orders: list[Order], kind: type[Start | End]) -> list[int]:
    return [order.number for order in orders if isinstance(order, kind)]


class TestStart:
    def test_all_workers_start_together(self) -> None:
        """A new mold forks all of its workers at once."""
        crew = crew_of(3)
        assert [1, 2, 3] == numbers(crew.settle(0.0), Start)
        assert [] == crew.settle(0.0)

    def test_it_is_complete_when_all_have_come_up(self) -> None:
        """A mold takes calls only when every worker can."""
        crew = crew_of(2)
        crew.settle(0.0)
        crew.started(1)
        assert not crew.complete
        crew.started(2)
        assert crew.complete

    def test_workers_that_do_not_come_up_condemn_the_mold(self) -> None:
        """A mold that fails to fork twice is replaced, and asked for only once."""
        crew = crew_of(1)
        orders: list[Order] = []
        for now in range(0, 100, 10):
            for order in crew.settle(float(now)):
                orders.append(order)
                if isinstance(order, Start):
                    crew.lost(order.number, float(now), draw=1.0)
        assert FAILED_STARTS == len(numbers(orders, Start))
        assert 1 == sum(isinstance(order, ReplaceMold) for order in orders)


class TestCalls:
    def test_the_worker_used_last_is_used_next(self) -> None:
        """Its caches are warm."""
        crew = running(2)
        first, second = crew.take(), crew.take()
        assert first is not None
        assert second is not None
        crew.answered(second.number, worn=False)
        crew.answered(first.number, worn=False)
        assert first is crew.take()

    def test_no_worker_gets_two_calls(self) -> None:
        """A worker computes one call at a time."""
        crew = running(2)
        taken = [crew.take() for _ in range(3)]
        assert taken[2] is None
        assert 2 == len({one.number for one in taken if one is not None})


class TestSpare:
    def spared(self) -> WorkerPlan:
        """Two calls at a time, and one worker more."""
        crew = WorkerPlan(2, spare=1, breaker=Breaker(), backoff=Backoff(1, 60))
        for order in crew.settle(0.0):
            assert isinstance(order, Start)
            crew.started(order.number)
        return crew

    def test_it_takes_no_calls_of_its_own(self) -> None:
        """As many calls run at a time as there are workers without it."""
        crew = self.spared()
        assert 3 == len(crew.members)
        assert [True, True, False] == [crew.take() is not None for _ in range(3)]

    def test_it_takes_the_place_of_a_worn_worker_at_once(self) -> None:
        """The worn worker ends after the call that wore it, and the next spare one is started."""
        crew = self.spared()
        worn, other = crew.take(), crew.take()
        assert worn is not None
        assert other is not None
        assert not crew.answered(worn.number, worn=True)
        orders = crew.settle(0.0)
        assert [worn.number] == numbers(orders, End)
        assert [4] == numbers(orders, Start)
        assert crew.take() is not None

    def test_it_takes_the_place_of_a_dead_worker_at_once(self) -> None:
        """Also while the backoff of a crash loop lasts."""
        crew = self.spared()
        for _ in range(2):
            member = crew.take()
            assert member is not None
            crew.lost(member.number, 0.0, draw=1.0)
        assert crew.take() is not None


class TestReplacement:
    def test_a_worn_worker_serves_until_its_replacement_is_ready(self) -> None:
        """A policy that is due costs no capacity."""
        crew = running(1)
        assert crew.take() is not None
        assert not crew.answered(1, worn=True)
        assert [Start(2)] == crew.settle(0.0)
        worn = crew.take()
        assert worn is not None
        assert 1 == worn.number
        crew.answered(1, worn=True)
        crew.started(2)
        assert [End(1)] == crew.settle(0.0)
        assert [2] == list(crew.members)

    def test_a_busy_worn_worker_ends_after_its_call(self) -> None:
        """Its last call gets its answer."""
        crew = running(1)
        crew.take()
        crew.answered(1, worn=True)
        crew.settle(0.0)
        crew.take()
        crew.started(2)
        assert [] == crew.settle(0.0)
        assert crew.answered(1, worn=False)

    def test_replacements_start_one_at_a_time(self) -> None:
        """Workers that are worn together are not replaced in step."""
        crew = running(3)
        for _ in range(3):
            crew.take()
        for number in (1, 2, 3):
            crew.answered(number, worn=True)
        assert [4] == numbers(crew.settle(0.0), Start)
        assert [] == numbers(crew.settle(0.0), Start)
        crew.started(4)
        orders = crew.settle(0.0)
        assert [5] == numbers(orders, Start)
        assert 1 == len(numbers(orders, End))


class TestDeaths:
    def test_the_first_death_is_replaced_at_once(self) -> None:
        """One crash costs one call, and no time."""
        crew = running(2)
        crew.take()
        crew.lost(2, 5.0, draw=0.5)
        assert [Start(3)] == crew.settle(5.0)

    def test_a_crash_loop_backs_off(self) -> None:
        """The second death in a row waits for the backoff."""
        crew = running(1)
        for number, now in ((1, 0.0), (2, 0.0)):
            crew.take()
            crew.lost(number, now, draw=1.0)
            for order in crew.settle(now):
                assert isinstance(order, Start)
                crew.started(order.number)
        assert [] == crew.settle(0.9)
        assert [Start(3)] == crew.settle(1.0)

    def test_an_answer_ends_a_series(self) -> None:
        """Deaths far apart are not a loop."""
        crew = running(1)
        for number in (1, 2, 3):
            crew.take()
            crew.lost(number, 0.0, draw=1.0)
            assert [Start(number + 1)] == crew.settle(0.0)
            crew.started(number + 1)
            crew.take()
            crew.answered(number + 1, worn=False)

    def test_the_breaker_opens_and_a_probe_closes_it(self) -> None:
        """While workers keep dying calls are refused at once, and one call tries again after the cooldown."""
        crew = running(2, failures=2, cooldown=10, max_cooldown=10)
        for now in (0.0, 0.0):
            member = crew.take()
            assert member is not None
            crew.lost(member.number, now, draw=0.0)
        assert crew.refusal(0.0) is not None
        assert not crew.ready
        (order,) = crew.settle(20.0)  # one is enough for the probe
        assert isinstance(order, Start)
        crew.started(order.number)
        assert crew.refusal(20.0) is None
        probe = crew.take()
        assert probe is not None
        assert probe.probe
        assert crew.refusal(20.0) is not None
        crew.answered(probe.number, worn=False)
        assert crew.refusal(20.0) is None
        assert 1 == len(numbers(crew.settle(20.0), Start))

    def test_an_interrupted_call_blames_nobody(self) -> None:
        """Ctrl-C in the owner ends a worker, and is not a failure of the model."""
        crew = running(1, failures=1)
        crew.take()
        crew.lost(1, 0.0, draw=0.5, blame=False)
        assert crew.refusal(0.0) is None
        assert 0 == crew.failures

    def test_a_death_is_counted_once(self) -> None:
        """Its caller and the mold both report it."""
        crew = running(1)
        crew.take()
        crew.lost(1, 0.0, draw=0.5)
        crew.lost(1, 0.0, draw=0.5)
        assert 1 == crew.failures


class TestUntilTheNextCall:
    def test_all_end_and_none_starts(self) -> None:
        """However much time passes."""
        crew = running(2)
        assert [End(1), End(2)] == crew.end_until_next_call()
        assert ("ended", {}, []) == (crew.presence, crew.members, crew.settle(1000.0))
        assert crew.take() is None

    def test_a_call_brings_all_back(self) -> None:
        """They are present again once the first of them has come up."""
        crew = running(2)
        crew.end_until_next_call()
        crew.call_back()
        assert ("returning", [3, 4]) == (crew.presence, numbers(crew.settle(0.0), Start))
        crew.started(3)
        assert ("present", True) == (crew.presence, crew.take() is not None)

    def test_nothing_ends_while_one_has_something_to_do(self) -> None:
        """It runs a call, starts, or is being replaced."""
        crew = running(2)
        assert crew.take() is not None
        assert (None, "present") == (crew.end_until_next_call(), crew.presence)
        crew = crew_of(2)
        crew.settle(0.0)
        crew.started(1)
        assert (None, "present") == (crew.end_until_next_call(), crew.presence)

    def test_a_backoff_holds_for_the_first_call_too(self) -> None:
        """Workers that died before are not started faster because nobody called meanwhile."""
        crew = running(1)
        for _ in range(2):
            crew.lost(max(crew.members), 0.0, draw=1.0)
            for order in crew.settle(0.0):
                assert isinstance(order, Start)
                crew.started(order.number)
        assert [] == crew.end_until_next_call()
        crew.call_back()
        assert [] == crew.settle(crew.start_at - 0.1)
        assert 1 == len(numbers(crew.settle(crew.start_at), Start))

    def test_a_start_that_fails_is_tried_again(self) -> None:
        """As without it."""
        crew = running(1)
        crew.end_until_next_call()
        crew.call_back()
        (number,) = numbers(crew.settle(0.0), Start)
        crew.lost(number, 0.0, draw=0.0)
        assert ("present", 1) == (crew.presence, len(numbers(crew.settle(0.0), Start)))

    def test_a_closed_crew_has_none(self) -> None:
        """Whatever is asked for."""
        crew = running(1)
        crew.close()
        assert (None, "present") == (crew.end_until_next_call(), crew.presence)


class TestEnd:
    def test_a_worker_that_comes_up_too_late_is_ended(self) -> None:
        """Closing does not wait for it, and does not forget it."""
        crew = crew_of(1)
        crew.settle(0.0)
        crew.close()
        assert crew.started(1)
        assert not crew.members

    def test_closing_ends_idle_workers_and_lets_busy_ones_answer(self) -> None:
        """Closing drains."""
        crew = running(2)
        busy = crew.take()
        assert busy is not None
        assert 1 == len(numbers(crew.close(), End))
        assert crew.answered(busy.number, worn=False)
        assert not crew.members
        assert [] == crew.settle(0.0)


@given(st.integers(1, 8))
def test_a_crew_of_any_size_settles(size: int) -> None:
    """As many workers as were asked for, and no order after that."""
    assert size == len(running(size).members)


class CrewMachine(RuleBasedStateMachine):
    """Workers that start, answer, wear out and die in any order."""

    SIZE, SPARE = 3, 0

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.paused = False
        self.crew = WorkerPlan(
            self.SIZE,
            spare=self.SPARE,
            breaker=Breaker(failures=4, cooldown=5, max_cooldown=20),
            backoff=Backoff(1, 60),
            is_paused=lambda: self.paused,
        )
        self.starting: set[int] = set()
        self.busy: set[int] = set()
        self.condemned = False
        self.settle()

    def settle(self) -> None:
        for order in self.crew.settle(self.now):
            if isinstance(order, Start):
                self.starting.add(order.number)
            elif isinstance(order, End):
                assert order.number not in self.busy | self.starting
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
            self.crew.started(number)
        else:
            self.crew.lost(number, self.now, draw=0.5)
        self.settle()

    @precondition(lambda self: self.crew.refusal(self.now) is None)
    @rule()
    def call_begins(self) -> None:
        member = self.crew.take()
        if member is not None:
            assert member.number not in self.busy | self.starting
            self.busy.add(member.number)

    @precondition(lambda self: self.busy)
    @rule(outcome=st.sampled_from(["answer", "worn", "crash", "interrupted"]), pick=st.integers(0, 10))
    def call_ends(self, outcome: str, pick: int) -> None:
        number = sorted(self.busy)[pick % len(self.busy)]
        self.busy.discard(number)
        if outcome in {"answer", "worn"}:
            self.crew.answered(number, worn=outcome == "worn")
        else:
            self.crew.lost(number, self.now, draw=0.5, blame=outcome == "crash")
        self.settle()

    @rule()
    def nobody_calls(self) -> None:
        """All end at once, or none; and a call brings them back."""
        has_work = any(member.state != "idle" for member in self.crew.members.values())
        before = set(self.crew.members)
        orders = self.crew.end_until_next_call()
        if orders is None:
            assert self.condemned or has_work
        else:
            assert (before, "ended") == ({order.number for order in orders}, self.crew.presence)

    @rule()
    def a_call_comes(self) -> None:
        self.crew.call_back()
        self.settle()

    @invariant()
    def never_more_than_one_above_the_size(self) -> None:
        """Overlap costs the memory of one worker."""
        assert len(self.crew.members) <= self.SIZE + 1
        assert len(self.busy) <= self.SIZE

    @invariant()
    def every_worker_is_accounted_for(self) -> None:
        """Busy and starting workers are exactly those whose end has not been reported."""
        states = {number: member.state for number, member in self.crew.members.items()}
        assert self.busy == {number for number, state in states.items() if state in {"busy", "retiring"}}
        assert self.starting == {number for number, state in states.items() if state == "starting"}

    @invariant()
    def it_recovers(self) -> None:
        """Unless the mold was condemned, or nobody has called, time alone brings a worker back."""
        if self.crew.presence == "ended":
            assert not self.crew.members
        elif not self.condemned and not self.crew.members:
            self.now += 120.0
            self.settle()
            assert self.condemned or self.starting


class SpareMachine(CrewMachine):
    """The same with a spare worker."""

    SPARE = 1


SpareMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSpareMachine = SpareMachine.TestCase
CrewMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCrewMachine = CrewMachine.TestCase
