"""Answers in time on random workloads, on a simulated clock: what benchmarks/random_workloads.py measures at length."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("load", [0.4, 0.7, 1.2])
@pytest.mark.parametrize("noise", [0.2, 0.5])
@pytest.mark.parametrize("size", [4, 16])
def test_a_model_whose_times_vary_by_chance_is_not_refused_its_requests(size: int, noise: float, load: float) -> None:
    """With a deadline of three full batches, as many are answered in time as by a plain queue, or nearly."""

    def workload() -> Any:
        dice, model = random.Random(7), random_workloads.Model(0.01)
        model.noise = noise
        full, at = model.expects([0.0002] * size, size, 0.0), 0.0
        work = random_workloads.Workload(7, max_size=size, model=model)
        for _ in range(2000):
            at += dice.expovariate(load * size / full)
            work.arrivals.append(random_workloads.Item(at, 0.0002, 3 * full))
        return work

    assert workload().run() > 0.85 * workload().run(random_workloads._Fixed(size, 256))
