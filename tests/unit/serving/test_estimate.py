"""``estimate``: what was measured, at the size at which it was measured."""

from __future__ import annotations

import pytest

from modelguard.serving.estimate import Estimator
from modelguard.serving.status import Quantiles


def measured(*seconds: float, share: float = 1.0, now: float = 0.0) -> Estimator:
    made = Estimator()
    for one in seconds:
        made.record(share, 4, one, now)
    return made


def test_two_measurements_are_no_evidence() -> None:
    """Three are."""
    assert measured(1.0, 1.0).seconds(1.0, 0.0) is None
    assert 1.0 == measured(1.0, 1.0, 1.0).seconds(1.0, 0.0)


@pytest.mark.parametrize("share", [1 / 32, 0.5, 0.9])
def test_another_size_is_no_evidence(share: float) -> None:
    """Nothing is extrapolated, neither up nor down."""
    assert measured(1.0, 1.0, 1.0, share=share).seconds(1.0, 0.0) is None


def test_an_estimate_is_on_the_safe_side() -> None:
    """Of sixteen, the second longest: one that half of all overrun would let in what comes too late."""
    assert 15.0 == measured(*(float(n) for n in range(1, 17))).seconds(1.0, 0.0)


def test_the_last_sixteen_count() -> None:
    """What a batch took before is forgotten."""
    assert 1.0 == measured(*[9.0] * 30, *[1.0] * 16).seconds(1.0, 0.0)


def test_evidence_lasts_ten_seconds() -> None:
    """Then nothing is known any more."""
    made = measured(1.0, 1.0, 1.0)
    assert 1.0 == made.seconds(1.0, 10.0)
    assert made.seconds(1.0, 10.1) is None
    made.record(1.0, 4, 5.0, 11.0)
    assert made.seconds(1.0, 11.0) is None, "one new measurement is no evidence"


def test_the_rate_is_items_over_the_time_that_they_took() -> None:
    """None where nothing was computed lately."""
    made = measured(1.0, 3.0)
    assert 2.0 == made.rate(0.0)
    assert made.rate(31.0) is None
    assert Estimator().rate(0.0) is None


def test_quantiles_are_values_that_occurred() -> None:
    """No interpolation; zero before the first."""
    found = Quantiles.of(float(n) for n in range(100))
    assert (50.0, 90.0, 99.0, 99.0) == (found.p50, found.p90, found.p99, found.max)
    assert 0.0 == Quantiles.of([]).p99
