"""``Between``: a daily span of time that restricts other policies."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.lifecycle.world import World, number

from modelguard import TTL, Between, Idle, Policy, Snapshot, Uses
from modelguard.errors import InvalidOption
from modelguard.lifecycle.policies import subset

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: str = "UTC") -> Snapshot:
    """A moment of the wall clock."""
    return Snapshot(time=datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp())


@pytest.mark.parametrize(
    ("span", "moment", "due"),
    [
        (("02:00", "05:00"), "2026-01-10T01:59:59", False),
        (("02:00", "05:00"), "2026-01-10T02:00:00", True),
        (("02:00", "05:00"), "2026-01-10T04:59:59", True),
        (("02:00", "05:00"), "2026-01-10T05:00:00", False),
        (("22:30", "01:00"), "2026-01-10T22:29:59", False),
        (("22:30", "01:00"), "2026-01-10T23:00:00", True),
        (("22:30", "01:00"), "2026-01-11T00:59:59", True),
        (("22:30", "01:00"), "2026-01-11T01:00:00", False),
        (("00:00", "00:01"), "2026-01-11T00:00:30", True),
    ],
)
def test_the_span_includes_its_start_and_not_its_end(span: tuple[str, str], moment: str, due: bool) -> None:  # noqa: FBT001
    """Also a span that includes midnight."""
    assert due is Between(*span, tz="UTC").due(at(moment))


def test_times_are_those_of_the_zone() -> None:
    """Three in the morning in Berlin is two or one in UTC."""
    night = Between("03:00", "04:00", tz="Europe/Berlin")
    assert [True, False] == [night.due(at(f"2026-01-10T0{hour}:30")) for hour in (2, 1)]
    assert [False, True] == [night.due(at(f"2026-07-10T0{hour}:30")) for hour in (2, 1)]


def test_the_hour_that_daylight_saving_leaves_out_does_not_come() -> None:
    """And the one that it repeats comes twice."""
    night = Between("02:00", "03:00", tz="Europe/Berlin")

    def minutes(day: datetime) -> int:
        moments = (day + timedelta(minutes=minute) for minute in range(24 * 60))
        return sum(night.due(Snapshot(time=moment.timestamp())) for moment in moments)

    spring, autumn, other = (datetime(2026, *day, tzinfo=UTC) for day in ((3, 28, 23), (10, 24, 22), (6, 1, 22)))
    assert [0, 120, 60] == [minutes(day) for day in (spring, autumn, other)]


@given(st.integers(0, 1439), st.integers(0, 1439), st.floats(0, 4e9))
def test_a_span_and_its_complement_cover_the_day(first: int, last: int, moment: float) -> None:
    """Every moment is in exactly one of the two."""
    if first == last:
        return
    start, end = (f"{minute // 60:02}:{minute % 60:02}" for minute in (first, last))
    now = Snapshot(time=moment)
    assert Between(start, end, tz="UTC").due(now) is not Between(end, start, tz="UTC").due(now)


def test_a_policy_waits_for_the_span(world: World) -> None:
    """``TTL & Between``: a model that is too old at noon is replaced at night."""
    world.wall = at("2026-01-10T12:00:00").time
    guard = world.guard(reload_on=TTL("1h", jitter=0) & Between("02:00", "05:00", tz="UTC"), defer=0)
    number(guard)
    for expected, hours in ((1, 2), (1, 11.9), (2, 0.2), (3, 1.1), (3, 6)):
        world.tick(hours * 3600)
        guard.check()
        world.join()
        assert expected == guard.status().generation, world.wall


@pytest.mark.parametrize(
    "policy",
    [
        Between("02:00", "05:00"),
        TTL("1d") | Between("02:00", "05:00"),
        Between("02:00", "05:00") & Between("03:00", "04:00"),
        (TTL("1d") | Between("02:00", "05:00")) & Between("03:00", "04:00"),
    ],
)
def test_alone_it_is_rejected(world: World, policy: object) -> None:
    """It would be due at every moment of the span, one reload after another."""
    with pytest.raises(InvalidOption, match=r"Join it by &, as in TTL\('1d'\) & "):
        world.guard(reload_on=policy)


NIGHT = Between("02:00", "05:00")


@pytest.mark.parametrize(
    "both", [(TTL("1d") & NIGHT) | (Uses(5) & NIGHT) | (Idle("1h") & NIGHT), (TTL("1d") | Uses(5) | Idle("1h")) & NIGHT]
)
def test_what_it_restricts_decides_where_models_are_shared(both: Policy) -> None:
    """``TTL & Between`` asks for new weights, ``Uses & Between`` does not, and ``Idle & Between`` is for neither."""
    assert ["TTL('1d') & Between('02:00', '05:00')", "Uses(5) & Between('02:00', '05:00')"] == [
        repr(subset(both, renews=renews)) for renews in (True, False)
    ]


@pytest.mark.parametrize("given", ["2:00", "24:00", "02:60", "02.00", "²2:00", "", 2, None])
@pytest.mark.parametrize("argument", ["start", "end"])
def test_a_bad_time_is_rejected(argument: str, given: object) -> None:
    """The message names the argument and shows how to write it."""
    times = {"start": "01:00", "end": "05:00", argument: given}
    with pytest.raises(InvalidOption, match=f"{argument}='02:30'"):
        Between(**times)  # type: ignore[arg-type]


@pytest.mark.parametrize("zone", ["Berlin", "Europe/Bärlin", "", "../etc/passwd", 1])
def test_an_unknown_zone_is_rejected(zone: object) -> None:
    """At the definition, not at the first check."""
    with pytest.raises(InvalidOption, match="is not a known time zone"):
        Between("02:00", "05:00", tz=zone)  # type: ignore[arg-type]


def test_an_empty_span_is_rejected() -> None:
    """Nobody means a whole day, or no time at all."""
    with pytest.raises(InvalidOption, match="is the same as start"):
        Between("02:00", "02:00")
