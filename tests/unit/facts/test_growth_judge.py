"""The judge of growth: what it says of readings whose truth is known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from modelguard.facts._growth_judge import judge

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # as for the scripts there
growth_series = pytest.importorskip("_growth_series")

MB = 10**6
READINGS = 24
CALLS = tuple(range(0, 100 * READINGS, 100))


@pytest.mark.parametrize(
    ("verdict", "size"),
    [
        ("grows", lambda at: 10 * MB * at),
        ("grows", lambda at: 10 * MB * at + (at % 2) * 30 * MB),
        ("grows", lambda at: 1.5 * MB * at / READINGS),
        ("grows", lambda at: 60 * MB * (at > 12) + 5 * MB * at / READINGS),
        ("grows", lambda at: 10 * MB * (at // 3)),
        ("steady", lambda _: 200 * MB),
        ("steady", lambda at: (at % 5) * 30 * MB),
        ("steady", lambda at: min(at, 4) * 30 * MB),
        ("steady", lambda at: 100 * MB * (1 - 0.6**at)),
        ("steady", lambda at: 0.8 * MB * at / READINGS),
        ("steady", lambda at: 60 * MB * (at > 12)),
        ("steady", lambda at: 60 * MB * (at > 3) + 20 * MB * (at > 11)),
        ("steady", lambda at: 50 * MB * (at in (5, 6, 14))),
        ("steady", lambda at: -3 * MB * at),
        ("undecided", lambda at: 60 * MB * (at > 3) + 20 * MB * (at > 18)),
        ("undecided", lambda at: (at % 11) * 5 * MB),
        ("undecided", lambda at: 100 * MB * at / (at + 15)),
    ],
    ids=[
        "line", "line with teeth", "slow line", "line with a step", "stairs", "flat", "teeth", "warm-up", "fills",
        "too little", "step", "two early steps", "peaks", "falls", "two steps", "long teeth", "slows down",
    ],
)  # fmt: skip
def test_only_what_goes_on_with_the_calls_is_growth(verdict: str, size: Callable[[int], float]) -> None:
    """Steps, teeth, peaks and what ends are none; what may be either is undecided, with how much more it needs."""
    found = judge(CALLS, [size(at) for at in range(READINGS)])
    assert verdict == found.verdict, found
    assert (verdict == "undecided") == bool(found.reason)
    assert (verdict == "undecided") == (found.more > 1)


def test_the_growth_has_an_interval_and_leaves_out_steps() -> None:
    """23 MB with the calls, and 60 MB at once: both are told apart, with where the step was."""
    found = judge(CALLS, [at * MB + 60 * MB * (at > 12) for at in range(READINGS)])
    assert ("grows", [(1300, 60 * MB)]) == (found.verdict, [(step.calls, step.size) for step in found.steps])
    assert found.low <= 23 * MB <= found.high
    assert pytest.approx(23 * MB) == found.growth


@pytest.mark.parametrize("readings", [0, 1, 3, 8])
def test_few_readings_decide_nothing(readings: int) -> None:
    """However much memory has grown: the sentence says how many there are."""
    found = judge(CALLS[:readings], [at * 100 * MB for at in range(readings)])
    assert "undecided" == found.verdict
    assert f"{readings} reading" in found.reason


def test_without_calls_nothing_grows_with_them() -> None:
    """Memory that rises while no call ends says nothing about calls."""
    assert "undecided" == judge([7] * READINGS, [at * MB for at in range(READINGS)]).verdict


def test_random_series_of_every_kind() -> None:
    """Of 1,000 leaks above 1.2 MB and healthy runs, at most 0.5 % are cleared wrongly, and 1 % accused wrongly."""
    found = [(one, judge(one.calls, one.sizes).verdict) for one in map(growth_series.series, range(1000))]
    cleared = [one.kind for one, verdict in found if one.leak and verdict == "steady"]
    accused = [one.kind for one, verdict in found if not one.leak and verdict == "grows"]
    assert len(cleared) <= 0.005 * sum(1 for one, _ in found if one.leak), cleared
    assert len(accused) <= 0.01 * sum(1 for one, _ in found if not one.leak), accused


def test_quiet_series_are_decided() -> None:
    """On a quiet machine nine of ten leaks in a straight line are found, and nine of ten single steps are cleared."""
    quiet = [one for one in map(growth_series.series, range(2000)) if one.noise == "quiet"]
    for kind, verdict in (("line", "grows"), ("step", "steady"), ("flat", "steady")):
        found = [judge(one.calls, one.sizes).verdict for one in quiet if one.kind == kind]
        assert found.count(verdict) >= 0.9 * len(found), (kind, found)


def test_memory_that_returns_to_its_lowest_until_the_end_is_steady() -> None:
    """Calls that take much and keep nothing leave readings at the floor; a leak would raise it."""
    random = Random(4)
    sizes = [26e6 + (random.uniform(1e6, 16e6) if number % 9 else random.uniform(0, 1e5)) for number in range(48)]
    assert "steady" == judge(range(48), sizes).verdict
    leaking = [size + 120_000 * number for number, size in enumerate(sizes)]
    assert "steady" != judge(range(48), leaking).verdict
