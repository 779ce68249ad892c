"""Sizes planned for overload follow what requests ask for."""

from __future__ import annotations

import math

from modelguard.serving._times import Arrivals, Curve

#: 50 ms a batch, and 1 ms for each item or each unit of weight.
BY_COUNT = Curve(fixed=0.05, each=0.001, unit=0.0, most=math.inf, reach=256)
BY_WEIGHT = Curve(fixed=0.05, each=0.0, unit=0.001, most=math.inf, reach=256)


def overloaded(*, timeout: float, max_weight: float = math.inf) -> Arrivals:
    """2,000 requests a second, each with ``timeout`` seconds for its answer."""
    arrivals = Arrivals()
    arrivals.configure(256, max_weight, math.inf)
    for at in range(5):
        for _ in range(2000):
            arrivals.note(timeout)
        arrivals.note_batch(float(at))
    return arrivals


def crowd(arrivals: Arrivals, curve: Curve, mean: float = 0.0) -> int:
    return arrivals.crowd(None, curve, mean, lines=1, ceiling=256)


def test_batches_shrink_when_requests_have_less_time() -> None:
    """At the same rate and the same times of batches, too."""
    arrivals = overloaded(timeout=5.0)
    patient = crowd(arrivals, BY_COUNT)
    for _ in range(100):
        arrivals.note(0.1)
    hurried = crowd(arrivals, BY_COUNT)
    assert hurried == crowd(overloaded(timeout=0.1), BY_COUNT)
    assert hurried < patient


def test_batches_shrink_when_items_become_heavier() -> None:
    """At the same rate and the same times of batches, too."""
    arrivals = overloaded(timeout=5.0, max_weight=256.0)
    light = crowd(arrivals, BY_WEIGHT, mean=1.0)
    assert crowd(arrivals, BY_WEIGHT, mean=32.0) <= 8 < light
    assert light == crowd(arrivals, BY_WEIGHT, mean=1.0)
