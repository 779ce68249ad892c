"""The figures that the demo draws from what it has seen."""

from __future__ import annotations

from typing import Any

import pytest
from examples.demo.record import Record, Reload, Sample, differing, percentile
from examples.demo.traffic import Outcome


def outcome(due: float, latency: float = 0.01, *, digest: int | None = 1, error: str | None = None) -> Outcome:
    """Make the outcome of a request, by default a good one."""
    return Outcome(due, latency, digest, error)


def finished(generation: int, time: float, swap: str, *, seconds: float = 1.0, waited: float = 0.0) -> dict[str, Any]:
    """Make the fields of a LoadFinished event."""
    return {
        "event": "LoadFinished",
        "generation": generation,
        "time": time,
        "swap": swap,
        "seconds": seconds,
        "waited_seconds": waited,
        "reasons": [["uses", "Uses(3)"]],
    }


def released(generation: int, *, freed: int) -> dict[str, Any]:
    """Make the fields of a GenerationReleased event."""
    return {"event": "GenerationReleased", "generation": generation, "bytes_before": freed + 5, "bytes_after": 5}


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([1, 2, 3, 4], 50, 2), ([1, 2, 3, 4], 99, 4), ([7], 1, 7), (list(range(1, 101)), 99, 99), ([1, 2], 100, 2)],
)
def test_percentile_is_a_value_that_was_seen(values: list[float], percent: float, expected: float) -> None:
    """A percentile is the nearest rank, never a value between two requests."""
    assert expected == percentile(values, percent)


def test_percentile_of_nothing() -> None:
    """Without requests there is no latency, not a latency of zero."""
    assert percentile([], 50) is None


def test_the_first_load_is_not_a_reload() -> None:
    """What a server loads at its start replaces nothing."""
    record = Record("guarded", events=[finished(1, 99.0, "first")], epoch=100.0)
    assert [] == record.reloads()


def test_a_reload_that_drains_first_begins_when_nobody_serves() -> None:
    """The time in which calls would wait counts, not only the loader's."""
    events = [released(1, freed=300), finished(2, 130.0, "drain_first", seconds=1.0, waited=1.5)]
    record = Record("guarded", events=events, epoch=100.0)
    assert [Reload(began=28.5, ended=30.0, freed=300, reasons=("Uses(3)",))] == record.reloads()


def test_a_reload_that_loads_first_frees_the_old_generation() -> None:
    """Bytes given back are found under the generation that was replaced, even when reported later."""
    events = [finished(2, 130.0, "load_first", seconds=2.0), released(1, freed=200)]
    record = Record("guarded", events=events, epoch=100.0)
    assert [Reload(began=28.0, ended=30.0, freed=200, reasons=("Uses(3)",))] == record.reloads()


def test_a_reload_whose_release_was_not_reported() -> None:
    """An unknown amount is unknown, not zero."""
    record = Record("guarded", events=[finished(2, 130.0, "load_first")], epoch=100.0)
    assert [None] == [reload.freed for reload in record.reloads()]


@pytest.mark.parametrize(
    ("due", "latency", "expected"),
    [(9.0, 0.5, False), (9.0, 1.5, True), (10.5, 0.1, True), (11.0, 0.1, True), (11.5, 0.1, False)],
)
def test_a_reload_meets_what_was_under_way(due: float, latency: float, *, expected: bool) -> None:
    """A request counts against a reload when any part of it fell into it."""
    reload = Reload(began=10.0, ended=11.0, freed=None, reasons=())
    assert expected is (reload.slowest([outcome(due, latency)]) is not None)


def test_slowest_beside_a_reload() -> None:
    """Only requests that met the reload are charged to it."""
    reload = Reload(began=10.0, ended=11.0, freed=None, reasons=())
    assert 0.7 == reload.slowest([outcome(5.0, 3.0), outcome(10.2, 0.7), outcome(10.9, 0.2)])
    assert reload.slowest([outcome(5.0, 3.0)]) is None


def test_figures() -> None:
    """Start and end are medians, growth is their difference, failed requests have no latency."""
    samples = [Sample(float(second), size) for second, size in enumerate([10, 11, 99, 11, 12, 40, 50, 51, 52, 53])]
    outcomes = [outcome(0.0, 0.1), outcome(1.0, 0.3), outcome(2.0, 9.0, digest=None, error="status 500")]
    figures = Record("unguarded", samples=samples, outcomes=outcomes).figures()
    assert (11, 51, 40, 99) == (
        figures["private_start"],
        figures["private_end"],
        figures["growth"],
        figures["private_highest"],
    )
    assert (3, 1) == (figures["requests"], figures["failed"])
    assert (0.1, 0.3, 0.3) == (figures["p50"], figures["p99"], figures["slowest"])


def test_a_run_that_ends_in_a_reload() -> None:
    """The memory at the end is that of a server with a model, not of one that is between two."""
    samples = [Sample(float(second), 500) for second in range(10)] + [Sample(10.5, 200), Sample(11.0, 250)]
    events = [finished(2, 111.0, "drain_first", waited=1.0)]
    assert 500 == Record("guarded", samples=samples, events=events, epoch=100.0).figures()["private_end"]


def test_errors_in_the_order_of_time() -> None:
    """The first error reported is the first that happened."""
    outcomes = [outcome(2.0, error="later"), outcome(1.0, error="sooner"), outcome(0.0)]
    assert ["at 1.0 s: sooner", "at 2.0 s: later"] == Record("guarded", outcomes=outcomes).errors()


def test_differing_answers() -> None:
    """Answers to the same request are compared; a request that one server failed is not a difference."""
    left = Record(
        "left", outcomes=[outcome(0.0, digest=1), outcome(1.0, digest=2), outcome(2.0, digest=None, error="lost")]
    )
    right = Record("right", outcomes=[outcome(1.0, digest=3), outcome(0.0, digest=1), outcome(2.0, digest=4)])
    third = Record("third", outcomes=[outcome(0.0, digest=5), outcome(1.0, digest=2)])
    assert 1 == differing(left, right)
    assert 2 == differing(left, right, third)
