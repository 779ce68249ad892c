"""``max_size="auto"``: the size of batches follows the measured times. On a simulated clock."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.serving.gated import until
from tests.unit.serving.queues import measured, queue_of, request, run

from modelguard import AutoSize, batched, telemetry
from modelguard.errors import Overloaded
from modelguard.serving import Limits
from modelguard.serving._batcher import ChosenSize
from modelguard.serving._planner import GoalSize
from modelguard.serving._requests import Batch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # as for the scripts there
auto_size = pytest.importorskip("auto_size")
Arrival = auto_size.Arrival

SLO = 0.1
Cost = Callable[[list[Any], float, dict[str, Any]], float]


def linear(fixed: float, each: float) -> Cost:
    return lambda items, _now, _extras: fixed + each * len(items)


def served(
    cost: Cost, *, rate: float, seconds: float, slo: float = SLO, ceiling: int = 256, make: Any = None, **options: Any
) -> Any:
    """What became of random arrivals: the simulation, which notes each batch."""
    limits = Limits(name="f", max_size=ceiling, max_queue=ceiling, slo=slo, **options)
    return auto_size.drive(limits, cost, rate, seconds, **({} if make is None else {"make": make}))


def largest(fixed: float, each: float, slo: float = SLO) -> int:
    """The most items that a batch may have to take half of the goal."""
    return max(1, min(128, math.floor((slo / 2 - fixed) / each + 1e-9)))


@pytest.mark.parametrize("load", [0.8, 2.0])
@pytest.mark.parametrize("slo", [0.03, 0.5])
@pytest.mark.parametrize("each", [0.0001, 0.003, 0.1])
@pytest.mark.parametrize("fixed", [0.0, 0.003, 0.1])
def test_the_size_converges_within_a_hundred_batches(fixed: float, each: float, slo: float, load: float) -> None:
    """To within a tenth of what the goal allows, from one item, whatever the model costs; and then it stays there."""
    best = largest(fixed, each, slo)
    seconds = fixed + each * best
    found = served(
        linear(fixed, each), rate=load * best / seconds, seconds=120 / min(load, 1) * seconds, slo=slo, ceiling=128
    )
    assert len(found.batches) > 100
    for batch in found.batches[100:]:
        assert min(best - 1, 0.85 * best) <= batch.chosen <= best
        assert batch.size == 1 or batch.seconds <= slo / 2 * 1.001


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_requests_have_their_answers_within_the_goal(load: float) -> None:
    """As long as the load can be computed: all but a few in bursts, and during the first batches."""
    found = served(linear(0.03, 0.0005), rate=load * 800, seconds=30.0)
    answers = [seconds for at, seconds in found.latencies if at > 3.0]
    assert len(answers) > 0.95 * load * 800 * 27
    assert sum(seconds > SLO for seconds in answers) < 0.03 * len(answers)


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_times_that_vary_leave_a_margin(noise: float) -> None:
    """So that few batches take longer than they may, and these only a little."""
    dice = random.Random(5)
    found = served(
        lambda items, _now, _extras: dice.uniform(1 - noise, 1 + noise) * (0.01 + 0.001 * len(items)),
        rate=1600.0,
        seconds=20.0,
    )
    late = [batch.seconds for batch in found.batches[50:] if batch.seconds > SLO / 2]
    assert len(late) < 0.05 * len(found.batches)
    assert max(late, default=0.0) < 0.06
    assert min(batch.chosen for batch in found.batches[50:]) >= 40 * (1 - noise) * 0.7


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (1, 2), (2, 1)])
def test_it_follows_a_model_that_becomes_slower_or_faster(before: int, after: int) -> None:
    """Within ten full batches; then batches hold the goal again and are as large as it allows."""

    def cost(items: list[Any], now: float, _extras: dict[str, Any]) -> float:
        return (before if now < 10 else after) * (0.01 + 0.001 * len(items))

    found = served(cost, rate=1600.0, seconds=20.0)
    changed = next(at for at, batch in enumerate(found.batches) if batch.ended > 10)
    best = largest(after * 0.01, after * 0.001)
    held = found.batches[changed + 11 : -1]
    assert len(held) > 80
    assert all(batch.seconds <= SLO / 2 * 1.1 for batch in held)
    assert all(batch.chosen >= best * 0.75 for batch in held[40:])


def test_a_change_in_the_middle_of_rising_load_does_not_confuse_it() -> None:
    """The model becomes slower before it has seen large batches: what mixes both speeds is soon learned anew."""
    found = served(
        lambda items, now, _extras: (1 if now < 4 else 3) * (0.01 + 0.001 * len(items)), rate=250.0, seconds=12.0
    )
    changed = next(at for at, batch in enumerate(found.batches) if batch.ended > 4)
    assert all(4 <= batch.chosen <= 6 for batch in found.batches[changed + 20 :])


def test_a_slow_first_run_is_forgotten() -> None:
    """The first run sets the model up and takes ten seconds; three runs later batches grow."""
    runs = iter([10.0])
    found = served(lambda items, _now, _extras: next(runs, 0.03 + 0.0005 * len(items)), rate=600.0, seconds=20.0)
    assert [1, 1, 1] == [batch.size for batch in found.batches[:3]]
    assert all(batch.chosen >= 30 for batch in found.batches[12:])
    assert found.queue.status(found.now).slo_reachable


def test_a_stall_does_not_shrink_batches() -> None:
    """One run in fifty takes half a second more; that says nothing about the size."""
    dice = random.Random(2)
    found = served(
        lambda items, _now, _extras: 0.01 + 0.001 * len(items) + 0.5 * (dice.random() < 0.02), rate=400.0, seconds=60.0
    )
    sizes = [batch.chosen for batch in found.batches[100:]]
    assert sum(size >= 30 for size in sizes) > 0.9 * len(sizes)


def test_sizes_stay_below_a_jump_in_the_times() -> None:
    """Beyond 32 items a batch takes 0.1 s more, as when a cache overflows. No line fits; hardly a batch tries it."""
    found = served(
        lambda items, _now, _extras: 0.01 + 0.0005 * len(items) + 0.1 * (len(items) > 32), rate=1500.0, seconds=60.0
    )
    later = found.batches[100:]
    assert sum(batch.seconds > SLO / 2 for batch in later) < 0.02 * len(later)
    assert sum(batch.size >= 28 for batch in later) > 0.9 * len(later)


def test_items_run_alone_where_one_takes_longer_than_the_goal() -> None:
    """They run all the same, and the status says that the goal is out of reach."""
    found = served(linear(0.2, 0.01), rate=10.0, seconds=30.0)
    assert {1} == {batch.size for batch in found.batches}
    assert all(outcome > 0 for _, outcome in found.latencies)
    status = found.queue.status(found.now)
    assert status.slo_reachable is False
    assert 1 == status.max_size


def test_nothing_is_said_about_the_goal_before_three_runs() -> None:
    """One slow first run is no evidence."""
    queue = queue_of(slo=SLO)
    assert queue.status(0.0).slo_reachable is None
    for number in range(3):
        queue.admit(request(number), 0.0)
        batch = queue.next_batch(0.0)
        assert isinstance(batch, Batch)
        run(queue, batch, 1.0, 0.0)
        assert queue.status(0.0).slo_reachable is (None if number < 2 else False)


def test_the_ceiling_holds_whatever_was_measured() -> None:
    """A batch never has more than `max_size` of the limits, however fast the model is."""
    found = served(linear(0.0, 1e-6), rate=20_000.0, seconds=1.0, ceiling=16)
    assert all(batch.size <= 16 for batch in found.batches)
    assert 16 == found.batches[-1].chosen


def test_the_first_batch_is_one_item() -> None:
    """However many wait: nothing is known yet, and a full queue might take a minute."""
    queue = queue_of(max_size=8, slo=SLO)
    for number in range(8):
        queue.admit(request(number), 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    assert 1 == len(batch.requests)


def test_each_group_has_a_size_of_its_own() -> None:
    """Where one value of a keyword argument costs eight times as much as another, its batches are smaller."""

    def make(at: float, dice: random.Random) -> Any:
        return Arrival(at, None, math.inf, group=(("times", int, 8 if dice.random() < 0.1 else 1),))

    found = served(
        lambda items, _now, extras: extras["times"] * (0.002 + 0.001 * len(items)), rate=2000.0, seconds=30.0, make=make
    )
    later = found.batches[100:]
    assert max(batch.size for batch in later) >= 40
    assert sum(batch.seconds > SLO / 2 * 1.05 for batch in later) < 0.02 * len(later)


def test_a_goal_is_out_of_reach_if_it_is_for_one_group() -> None:
    """However many batches of others come in between: it is not reported again and again."""
    heard: list[bool | None] = []

    def make(at: float, dice: random.Random) -> Any:
        return Arrival(at, None, math.inf, group=(("dear", bool, dice.random() < 0.3),))

    def cost(items: list[Any], _now: float, extras: dict[str, Any]) -> float:
        heard.append(found_by[0].queue.auto_size.reachable if found_by else None)
        return (0.2 if extras["dear"] else 0.002) + 0.001 * len(items)

    found_by: list[Any] = []
    limits = Limits(name="f", max_size=64, max_queue=64, slo=SLO)
    arrivals = auto_size.poisson(10.0, 60.0, make)
    found_by.append(auto_size.Sized(limits, cost, arrivals))
    found_by[0].run()
    assert {False} == set(heard[40:])


def test_weights_count_where_they_explain_the_time() -> None:
    """Batches of light items have more of them than batches of heavy ones; each takes what the goal allows."""
    found = served(
        lambda items, _now, _extras: 0.005 + 0.0001 * sum(item.weight for item in items),
        rate=100.0,
        seconds=30.0,
        weighed=True,
        make=lambda at, dice: Arrival(at, None, math.inf, weight=dice.choice((5.0, 200.0))),
    )
    later = found.batches[100:]
    assert max(batch.size for batch in later) > 4
    assert sum(batch.seconds > SLO / 2 * 1.01 for batch in later) < 0.02 * len(later)


def test_a_deadline_bounds_batches_as_well() -> None:
    """Whichever is nearer counts: with a deadline of 70 ms, no batch takes the 1 s that the goal of 2 s allows."""
    queue = queue_of(max_size=64, max_queue=64, slo=2.0)
    measured(queue, {1: 0.011, 32: 0.042})
    for number in range(64):
        with contextlib.suppress(Overloaded):
            queue.admit(request(number, deadline=0.07), 0.0)
    batch = queue.next_batch(0.0)
    assert isinstance(batch, Batch)
    assert 40 <= len(batch.requests) <= 60


def test_a_batch_is_full_when_it_has_as_many_as_chosen() -> None:
    """With `max_wait`, what waits for a fuller batch does not wait for the ceiling."""
    queue = queue_of(max_size=64, max_queue=64, max_wait=0.05, slo=0.2)
    for size, seconds in ((1, 0.02), (4, 0.05), (1, 0.02), (4, 0.05), (4, 0.05)):
        for number in range(size):
            queue.admit(request(number), 0.0)
        batch = queue.next_batch(1.0)
        assert isinstance(batch, Batch)
        run(queue, batch, seconds, 0.0)
    most = queue.status(0.0).max_size
    assert 4 <= most <= 9
    for number in range(most):
        queue.admit(request(number), 2.0)
    assert isinstance(queue.next_batch(2.0), Batch)


def events_of(found: list[tuple[int, bool | None, float]], slo: float = SLO) -> list[telemetry.Event]:
    """What is reported of a size, whether the goal is reachable, and a time, one after another."""
    heard: list[telemetry.Event] = []
    telemetry.set_hooks([heard.append])
    try:
        chosen = ChosenSize("f")
        for size, reachable, now in found:
            auto = GoalSize(slo, 0.0, 64)
            auto.size, auto.reachable, auto.item_seconds = size, reachable, 0.01
            chosen.report(auto, now)
    finally:
        telemetry.set_hooks(None)
    return heard


def test_a_size_is_reported_when_it_has_changed_by_a_quarter() -> None:
    """Or if the goal gets out of reach; at most once a second, and not before there are measurements."""
    before = [(1, None, 0.0), (8, True, 1.0), (9, True, 5.0), (16, True, 5.5), (16, True, 6.5)]
    after = [(1, False, 6.6), (1, False, 7.5), (1, False, 9.0), (1, True, 9.1), (1, None, 9.5)]
    events = events_of(before + after)
    assert [(8, 0, True), (16, 8, True), (1, 16, False), (1, 1, True)] == [
        (one.size, one.previous, one.reachable) for one in events if isinstance(one, telemetry.BatchSizeChosen)
    ]


def test_the_end_of_the_choice_is_reported_once() -> None:
    """When a number is configured; where none was ever chosen, nothing is reported."""
    assert [] == events_of([(8, None, 0.0), (8, None, 9.0)], math.inf)


def test_a_function_reports_its_sizes(events: list[telemetry.Event]) -> None:
    """While it serves, and when a number ends the choice."""
    with batched(max_size=AutoSize(slo="10s"), name="f")(lambda items: items) as f:
        for number in range(4):
            f(number)
        until(lambda: any(isinstance(event, telemetry.BatchSizeChosen) for event in events))
        (chosen,) = (event for event in events if isinstance(event, telemetry.BatchSizeChosen))
        assert ("f", 0, 10.0, True) == (chosen.guard, chosen.previous, chosen.slo, chosen.reachable)
        f.configure(max_size=8)
        f(5)
        until(lambda: sum(isinstance(event, telemetry.BatchSizeChosen) for event in events) > 1)
    last = [event for event in events if isinstance(event, telemetry.BatchSizeChosen)][-1]
    assert (8, None) == (last.size, last.slo)


@settings(max_examples=20, deadline=None)
@given(
    fixed=st.floats(0.0, 0.3),
    each=st.floats(1e-5, 0.1),
    slo=st.floats(0.005, 2.0),
    load=st.floats(0.3, 5.0),
    noise=st.floats(0.0, 0.5),
    seed=st.integers(0, 9),
)
def test_every_request_is_answered_and_no_size_is_out_of_bounds(  # noqa: PLR0917 - Hypothesis passes them
    fixed: float, each: float, slo: float, load: float, noise: float, seed: int
) -> None:
    """For any model, goal and load: batches have at least one item and at most the ceiling; everybody is answered."""
    dice = random.Random(seed)
    found = served(
        lambda items, _now, _extras: dice.uniform(1 - noise, 1 + noise) * (fixed + each * len(items)),
        rate=load / (fixed / 8 + each),
        seconds=60 * (fixed + each),
        slo=slo,
        ceiling=32,
    )
    outcome = found.outcome
    assert outcome.offered == outcome.answered + outcome.refused
    assert all(1 <= batch.size <= 32 and 1 <= batch.chosen <= 32 for batch in found.batches)
