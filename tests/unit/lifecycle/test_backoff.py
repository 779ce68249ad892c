from __future__ import annotations

from datetime import timedelta

import pytest

from modelguard import Backoff
from modelguard.errors import InvalidOption


@pytest.mark.parametrize(("failures", "wait"), [(1, 1.0), (2, 2.0), (3, 4.0), (6, 32.0), (7, 60.0), (10_000, 60.0)])
def test_waits_double_up_to_a_minute(failures: int, wait: float) -> None:
    """By default the first wait is one second, each failure doubles it, and no wait is longer than a minute."""
    assert wait == Backoff().seconds(failures, draw=1.0)


@pytest.mark.parametrize(("draw", "wait"), [(0.0, 4.0), (0.5, 6.0), (1.0, 8.0)])
def test_waits_are_drawn_from_their_upper_half(draw: float, wait: float) -> None:
    """Workers whose loader failed together do not retry together."""
    assert wait == Backoff("8s", "1h").seconds(1, draw)


def test_growth_can_be_chosen() -> None:
    """A factor of 1 keeps the waits equal, a larger one spreads them further."""
    assert [3.0, 3.0] == [Backoff(3, factor=1).seconds(n, 1.0) for n in (1, 9)]
    assert [3.0, 30.0] == [Backoff(3, factor=10).seconds(n, 1.0) for n in (1, 2)]


def test_backoffs_are_values() -> None:
    """Durations are read as everywhere: text, timedelta or seconds make the same backoff."""
    assert Backoff("2s", "1m") == Backoff(timedelta(seconds=2), 60)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"first": 0}, "first"),
        ({"first": -1}, "first"),
        ({"first": "soon"}, "first"),
        ({"longest": "-1m"}, "longest"),
        ({"first": "10s", "longest": "5s"}, "longest"),
        ({"factor": 0.5}, "factor"),
        ({"factor": 101}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": True}, "factor"),
        ({"factor": "2"}, "factor"),
    ],
)
def test_backoffs_that_cannot_be_meant_are_refused(options: dict[str, object], argument: str) -> None:
    """The error names the argument."""
    with pytest.raises(InvalidOption) as refusal:
        Backoff(**options)  # type: ignore[arg-type]
    assert argument == refusal.value.argument
