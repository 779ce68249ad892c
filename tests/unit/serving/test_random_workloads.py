"""Answers in time on random workloads, on a simulated clock: what benchmarks/random_workloads.py measures at length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # as for the scripts there
random_workloads = pytest.importorskip("random_workloads")


@pytest.mark.parametrize("seed", range(40_001, 40_009))
def test_as_many_are_answered_in_time_as_by_the_best_fixed_policy(seed: int) -> None:
    """Whatever arrives and whatever it costs: at least 0.8 of the best of nine policies that learn nothing."""
    result = random_workloads.judge(seed, 1000)
    assert result.of_fixed > 0.8, result.words


@pytest.mark.parametrize("seed", range(40_001, 40_006))
def test_what_has_passed_leaves_nothing_behind(seed: int) -> None:
    """Ten seconds after a burst, a slow model, short deadlines, bad items or a stall, all is as it was before."""
    result = random_workloads.recovered(seed)
    assert result.of_fixed > 0.95, result.words
