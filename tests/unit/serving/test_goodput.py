"""Answers in time under load, on a simulated clock: what benchmarks/goodput.py measures at length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # as for the scripts there
goodput = pytest.importorskip("goodput")

#: Fixed milliseconds, milliseconds an item, deadline over the time of a single item.
CELLS = [
    (0, 80, 12.5),  # a batch of 16 takes longer than the deadline
    (0, 100, 20.0),  # and so does a batch of 32
    (0, 0.1, 5.0),
    (1, 10, 5.0),
    (10, 1, 2.0),
    (10, 1, 1.2),  # a batch pays only if two requests come at the end of the run before
    (10, 10, 2.0),
    (30, 0.5, 8.0),
    (100, 0.1, 2.0),
    (100, 0.1, 20.0),
    (100, 10, 5.0),
    (100, 100, 20.0),
]


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(("fixed", "each", "times"), CELLS)
def test_answers_come_in_time_whatever_the_model_costs(fixed: float, each: float, times: float, load: float) -> None:
    """At least 0.85 of what a batcher answers that knows the time of each batch beforehand."""
    ratio, outcome = goodput.cell(fixed / 1000, each / 1000, times, load, 1000)
    assert ratio > 0.85
    assert 0 == outcome.harmed


@pytest.mark.parametrize(("fixed", "times", "load"), [(10, 1.2, 2.0), (1, 2.0, 1.0)])
def test_deciding_when_a_request_arrives_costs_nothing_else(fixed: float, times: float, load: float) -> None:
    """Where a clairvoyant batcher answers more, it drops what it admitted; one that does not answers hardly more."""
    ratio, _ = goodput.cell(fixed / 1000, 0.0001, times, load, 2000, best=goodput.at_the_door)
    assert ratio > 0.93


@pytest.mark.parametrize("load", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("kind", goodput.KINDS)
def test_answers_come_in_time_from_models_of_all_kinds(kind: str, load: float) -> None:
    """Uneven items, groups, models that change their speed or stall: at least 0.85 of what is possible."""
    assert goodput.KINDS[kind](load, 16.0) > 0.85


@pytest.mark.parametrize("fair", [False, True], ids=["in order", "in turns"])
@pytest.mark.parametrize("patience", goodput.PATIENCE)
@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_short_deadlines_do_not_take_the_capacity_from_long_ones(share: float, patience: float, fair: bool) -> None:  # noqa: FBT001 - pytest passes it
    """With any share of requests that have hardly longer than a run takes, as many are answered as by a plain queue."""
    assert goodput.mixed(share, patience, 12.0, fair=fair) > 0.95


@pytest.mark.parametrize("short", [0.05, 0.02], ids=["short", "hopeless"])
@pytest.mark.parametrize("fair", [False, True], ids=["in order", "in turns"])
def test_nothing_is_left_of_short_deadlines_after_the_last_one(fair: bool, short: float) -> None:  # noqa: FBT001 - pytest passes it
    """Once they stop, everybody is answered again."""
    assert goodput.mixed(0.02, 1.0, 20.0, fair=fair, until=6.0, short=short) > 0.99


@pytest.mark.parametrize("load", [0.5, 1.0, 2.0, 5.0])
def test_polite_callers_have_their_answers_beside_400_greedy_ones(load: float) -> None:
    """Callers that send less than their share are answered in time at any load; in order of arrival they are not."""
    answered = {fair: goodput.fairness(load, 24.0, fair=fair) for fair in (True, False)}
    assert answered[True] > 0.9
    assert load < 1.5 or answered[False] < 0.65


@pytest.mark.parametrize(("share", "least"), [(0.03, 0.9), (0.1, 0.75)])
def test_bad_items_that_come_again_and_again_stop_nobody(share: float, least: float) -> None:
    """They make their batch raise; after a while they are known, and no healthy item fails because of them."""
    ratio, outcome = goodput.poisoned(share, 40.0, repeated=True)
    assert ratio > least
    assert 0 == outcome.harmed


@pytest.mark.parametrize(("share", "named", "least"), [(0.03, True, 0.35), (0.03, False, 0.15), (0.1, False, 0.07)])
def test_bad_items_that_nobody_has_seen_before_cost_runs_but_no_neighbours(
    share: float,
    named: bool,  # noqa: FBT001 - pytest passes it
    least: float,
) -> None:
    """Each raising run says one bit: with 3 % bad items a quarter of the capacity is left for healthy ones."""
    ratio, outcome = goodput.poisoned(share, 20.0, named=named)
    assert ratio > least
    assert outcome.harmed <= 5
