"""``_estimator``: run times by what was measured at the same fill."""

from __future__ import annotations

import pytest

from modelguard.serving._batches import Limits
from modelguard.serving._estimator import Estimator
from modelguard.serving.status import Quantiles


def estimator() -> Estimator:
    return Estimator(Limits(name="f", max_size=4, max_queue=8))


def measured(*seconds: float, fill: float = 1.0, now: float = 0.0) -> Estimator:
    made = estimator()
    for one in seconds:
        made.record(fill, 4, one, now)
    return made


def test_two_measurements_are_not_enough() -> None:
    """Three are."""
    assert measured(1.0, 1.0).seconds(1.0, 0.0) is None
    assert 1.0 == measured(1.0, 1.0, 1.0).seconds(1.0, 0.0)


@pytest.mark.parametrize("fill", [1 / 32, 0.5, 0.9])
def test_another_fill_is_not_used(fill: float) -> None:
    """Nothing is extrapolated, neither up nor down."""
    assert measured(1.0, 1.0, 1.0, fill=fill).seconds(1.0, 0.0) is None


def test_an_estimate_is_on_the_safe_side() -> None:
    """It is the second longest of sixteen: with the median, half of what is admitted would be late."""
    assert 15.0 == measured(*(float(n) for n in range(1, 17))).seconds(1.0, 0.0)


def test_the_last_sixteen_count() -> None:
    """Older measurements are forgotten."""
    assert 1.0 == measured(*[9.0] * 30, *[1.0] * 16).seconds(1.0, 0.0)


def test_measurements_last_ten_seconds() -> None:
    """After that there is no estimate."""
    made = measured(1.0, 1.0, 1.0)
    assert 1.0 == made.seconds(1.0, 10.0)
    assert made.seconds(1.0, 10.1) is None
    made.record(1.0, 4, 5.0, 11.0)
    assert made.seconds(1.0, 11.0) is None, "one new measurement is not enough"


def test_the_rate_is_items_over_the_time_that_they_took() -> None:
    """It is None if nothing was computed recently."""
    made = measured(1.0, 3.0)
    assert 2.0 == made.rate(0.0)
    assert made.rate(31.0) is None
    assert estimator().rate(0.0) is None


def test_quantiles_are_values_that_occurred() -> None:
    """No interpolation; zero before the first."""
    found = Quantiles.of(float(n) for n in range(100))
    assert (50.0, 90.0, 99.0, 99.0) == (found.p50, found.p90, found.p99, found.max)
    assert 0.0 == Quantiles.of([]).p99
