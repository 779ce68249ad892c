"""What counts as a change of a source: a state machine without clock and thread."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from modelguard.lifecycle._readings import FEWEST, LASTING, MOST, UNKNOWN, ProbedSource


def loaded(value: object = "a") -> ProbedSource:
    """A source whose model was loaded at that value."""
    source = ProbedSource()
    source.loaded(value)
    return source


def ask(source: ProbedSource, *values: object) -> bool:
    """Give these answers; returns whether the source counts as changed."""
    for value in values:
        source.answered(value)
    return source.changed


@pytest.mark.parametrize(
    ("answers", "changed"),
    [
        ((), False),
        (("a", "a", "a"), False),
        (("b",), False),
        (("b", "b"), True),
        (("b", "b", "b"), True),
        (("b", "c"), False),
        (("b", "c", "c"), True),
        (("b", "a", "b"), False),
        (("b", "b", "a"), False),  # it was taken back before it was loaded
        (("b", "b", "c"), False),
        (("b", "b", "c", "c"), True),
    ],
)
def test_a_change_is_confirmed_by_a_second_answer(answers: tuple[str, ...], changed: bool) -> None:  # noqa: FBT001
    """One answer that differs may be a mistake, and what changes back is no change."""
    assert changed is ask(loaded(), *answers)


def test_a_load_is_the_new_measure() -> None:
    """After a load, a change is a difference from the value at that load."""
    source = loaded()
    assert ask(source, "b", "b")
    source.loaded("b")
    assert not ask(source, "b", "b")
    source.loaded("b")
    assert ask(source, *["a"] * MOST)


def test_a_change_between_the_answer_and_the_load_is_not_lost() -> None:
    """The value before the load counts, also if the loader then read a newer model."""
    source = loaded()
    ask(source, "b", "b")
    source.loaded("b")
    assert ask(source, "c", "c", "c", "c")


def test_without_an_answer_at_the_load_the_last_one_counts() -> None:
    """What has changed since is found when the probe answers again."""
    source = loaded("a")
    ask(source, "a")
    source.loaded(UNKNOWN)
    assert not ask(source, "a", "a")
    assert ask(source, "b", "b")


def test_without_any_answer_the_first_one_counts() -> None:
    """A probe that comes to life after the first load causes no reload."""
    source = loaded(UNKNOWN)
    assert not ask(source, "a", "a", "a")
    assert ask(source, "b", "b")


def test_lasting_changes_stay_cheap() -> None:
    """A source that changes once in a while needs two answers each time."""
    source = loaded(0)
    for value in range(1, 20):
        ask(source, *[value - 1] * LASTING)
        assert ask(source, *[value] * FEWEST)
        source.loaded(value)


def test_changes_that_do_not_last_need_more_answers() -> None:
    """Twice as many each time, up to a bound, so that a source that really changes often is still loaded."""
    source, needed = loaded(0), []
    for value in range(1, 10):
        count = 0
        while not source.changed:
            source.answered(value)
            count += 1
        needed.append(count)
        source.loaded(value)
    assert [2, 4, 8, 16, 32, 64, 64, 64, 64] == needed


@pytest.mark.parametrize("values", [range(10_000), [value % 2 for value in range(10_000)], [float("nan")] * 100])
def test_a_value_that_always_changes_is_no_change(values: list[object]) -> None:
    """Such as a time, a counter, or the answers of two servers in turn; it counts as unsteady."""
    source = loaded("a" if values != [0, 1] else 0)
    fresh = [float("nan") if value != value else value for value in values]  # noqa: PLR0124 - a test for nan
    alternating = set(values) == {0, 1}
    if alternating:
        source.loaded(0)
    for value in fresh:
        source.answered(value)
        assert not source.changed
    assert source.unsteady or alternating


def test_one_strange_answer_is_not_unsteady() -> None:
    """It takes several, and a source that has come to rest is steady again."""
    source = loaded()
    ask(source, "b", "a", "c", "a")
    assert not source.unsteady
    ask(source, *"bcdefgh")
    assert source.unsteady
    ask(source, *["a"] * 10)
    assert not source.unsteady


@given(st.integers(0, 2**32), st.floats(0.05, 0.95))
def test_servers_that_disagree_cause_few_reloads(seed: int, share: float) -> None:
    """A load balancer over two servers with different answers, asked once a minute for three days."""
    chance = random.Random(seed)
    answers = ["new" if chance.random() < share else "old" for _ in range(3 * 24 * 60)]
    source, reloads = loaded(answers[0]), 0
    for answer in answers:
        source.answered(answer)
        if source.changed:
            reloads += 1
            source.loaded("new" if chance.random() < share else "old")
    assert reloads <= 40


class Machine(RuleBasedStateMachine):
    """Any sequence of answers, loads and gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.source = ProbedSource()
        self.at_load: object = UNKNOWN
        self.recent: list[object] = []

    @rule(value=st.integers(0, 3))
    def answer(self, value: int) -> None:
        self.source.answered(value)
        if self.at_load is UNKNOWN:
            self.at_load = value
        self.recent.append(value)

    @rule(value=st.integers(0, 3))
    def load(self, value: int) -> None:
        self.source.loaded(value)
        self.at_load, self.recent = value, []

    @rule()
    def load_blindly(self) -> None:
        self.source.loaded(UNKNOWN)
        if self.recent:
            self.at_load = self.recent[-1]
        self.recent = []

    @invariant()
    def a_change_is_real_and_confirmed(self) -> None:
        if self.source.changed:
            assert self.recent[-1] != self.at_load
            assert self.recent[-FEWEST:] == [self.recent[-1]] * FEWEST

    @invariant()
    def a_lasting_change_always_counts(self) -> None:
        last = self.recent[-MOST:]
        if len(last) == MOST and len(set(last)) == 1 and last[0] != self.at_load:
            assert self.source.changed


TestMachine = Machine.TestCase
