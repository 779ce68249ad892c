"""``Cron``: a policy that is due at the moments of a cron expression."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.lifecycle.world import World, number

from modelguard import TTL, Between, Cron, ModelGuard, Snapshot, Swap, Uses, guard
from modelguard.errors import InvalidOption, NotSupported
from modelguard.lifecycle import policies
from modelguard.lifecycle.policies import subset
from modelguard.testing import Clock, Loader

needs_cronsim = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('cronsim')", reason="needs cronsim")


def at(text: str, zone: str = "UTC") -> float:
    """A moment of the wall clock, in seconds since the epoch."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def moments(policy: Cron, since: str, until: str, zone: str) -> list[str]:
    """When it is due, looked at each minute by the clock of the zone, with a model that is replaced at once."""
    began, now, end, found = at(since, zone), at(since, zone), at(until, zone), []
    while now < end:
        now += 60
        if policy.due(Snapshot(time=now, began=began)):
            began = now
            found.append(f"{datetime.fromtimestamp(now, ZoneInfo(zone)):%d %H:%M %z}")
    return found


@needs_cronsim
class TestMoments:
    def test_once_for_each_moment(self) -> None:
        """At the moment, not before it, and not again after the reload."""
        three = Cron("0 3 * * *", tz="UTC", jitter=0)
        found = moments(three, "2026-01-10T00:00", "2026-01-12T12:00", "UTC")
        assert ["10 03:00 +0000", "11 03:00 +0000", "12 03:00 +0000"] == found
        assert [False, True] == [
            three.due(Snapshot(began=at("2026-01-10T00:00"), time=at(f"2026-01-10T{time}")))
            for time in ("02:59:59", "03:00:00")
        ]

    def test_a_moment_that_is_left_out_comes_after_the_gap(self) -> None:
        """On the day on which 02:30 does not exist, it is due at 03:00."""
        policy = Cron("30 2 * * *", tz="Europe/Berlin", jitter=0)
        found = moments(policy, "2026-03-28T00:00", "2026-03-31T00:00", "Europe/Berlin")
        assert ["28 02:30 +0100", "29 03:00 +0200", "30 02:30 +0200"] == found

    def test_a_moment_that_is_repeated_comes_once(self) -> None:
        """On the day on which 02:30 exists twice, the first of them counts; each half hour comes in both."""
        policy = Cron("30 2 * * *", tz="Europe/Berlin", jitter=0)
        found = moments(policy, "2026-10-24T12:00", "2026-10-26T12:00", "Europe/Berlin")
        assert ["25 02:30 +0200", "26 02:30 +0100"] == found
        often = Cron("*/30 * * * *", tz="Europe/Berlin", jitter=0)
        found = moments(often, "2026-10-25T01:45", "2026-10-25T03:15", "Europe/Berlin")
        assert ["02:00 +0200", "02:30 +0200", "02:00 +0100", "02:30 +0100", "03:00 +0100"] == [
            text[3:] for text in found
        ]

    def test_minutes_that_begin_with_a_star_go_by_the_clock(self) -> None:
        """What the clock leaves out does not come, and what it shows twice comes twice, also in one hour of the day."""
        policy = Cron("*/30 2 * * *", tz="Europe/Berlin", jitter=0)
        assert [] == moments(policy, "2026-03-29T00:00", "2026-03-29T23:00", "Europe/Berlin")
        found = moments(policy, "2026-10-25T00:00", "2026-10-25T23:00", "Europe/Berlin")
        assert ["25 02:00 +0200", "25 02:30 +0200", "25 02:00 +0100", "25 02:30 +0100"] == found

    def test_who_slept_over_several_reloads_once(self) -> None:
        """Five nights in one: due, and after the reload not before the next moment."""
        policy = Cron("0 3 * * *", tz="UTC", jitter=0)
        woken = at("2026-01-15T09:00")
        assert policy.due(Snapshot(time=woken, began=at("2026-01-10T00:00")))
        assert not policy.due(Snapshot(time=woken + 3600, began=woken))

    def test_sleep_of_the_machine_counts(self) -> None:
        """The monotonic clock stands still in a suspended machine: the age is an hour, though the night has passed."""
        now = Snapshot(time=at("2026-01-11T07:00"), began=at("2026-01-10T22:00"), age=3600)
        assert Cron("0 3 * * *", tz="UTC", jitter=0).due(now)

    def test_a_clock_that_is_set_back_brings_no_moment_twice(self) -> None:
        """Replaced at 03:00:05, the clock then says 02:10: the moment has come already."""
        policy = Cron("0 3 * * *", tz="UTC", jitter=0)
        began = at("2026-01-10T03:00:05")
        times = [f"2026-01-10T0{hour}:10:00" for hour in (2, 3, 4)]
        assert [False] * 3 == [policy.due(Snapshot(time=at(time), began=began)) for time in times]

    def test_a_fleet_does_not_reload_in_the_same_second(self) -> None:
        """Each process waits its own part of ``jitter`` after the moment."""
        policy = Cron("0 3 * * *", tz="UTC", jitter="10m")
        began, moment = at("2026-01-10T00:00"), at("2026-01-10T03:00")
        first = [
            next(s for s in range(700) if policy.due(Snapshot(time=moment + s, began=began, jitter=draw)))
            for draw in (0.0, 0.25, 0.5, 0.999)
        ]
        assert [0, 150, 300, 600] == first

    @given(st.floats(0, 86_400 * 400), st.floats(0, 86_400 * 3), st.floats(0, 1, exclude_max=True))
    @settings(max_examples=200)
    def test_the_next_check_is_never_later_than_the_moment(self, start: float, passed: float, draw: float) -> None:
        """Asked again when it says, a guard misses no moment by more than that."""
        policy = Cron("*/7 2-4 * * *", tz="Europe/Berlin", jitter="1m")
        began = at("2026-01-01T00:00") + start
        now = Snapshot(time=began + passed, began=began, jitter=draw)
        next_check = policy.next_check(now)
        assert next_check.uses > 1e9
        assert 0 <= next_check.seconds <= 30
        assert policy.due(now) is (next_check.seconds == 0)

    def test_times_are_those_of_the_zone(self) -> None:
        """Three in Berlin is two in UTC in winter, and one in summer."""
        policy = Cron("0 3 * * *", tz="Europe/Berlin", jitter=0)
        assert ["10 02:00 +0000"] == moments(policy, "2026-01-10T00:00", "2026-01-10T23:00", "UTC")
        assert ["10 01:00 +0000"] == moments(policy, "2026-07-10T00:00", "2026-07-10T23:00", "UTC")


@needs_cronsim
class TestInAGuard:
    def check(self, world: World, guard: ModelGuard[object], hours: float) -> int:
        world.tick(hours * 3600)
        guard.check()
        world.join()
        return guard.status().generation

    def test_replaces_the_model_once(self, world: World) -> None:
        """Between two moments nothing happens; each night one reload."""
        world.wall = at("2026-01-10T12:00")
        guard = world.guard(reload_on=Cron("0 3 * * *", tz="UTC", jitter=0), defer=0)
        guard.load()
        assert [1, 1, 2, 2, 2, 3] == [self.check(world, guard, hours) for hours in (1, 13.9, 0.2, 1, 22.7, 0.2)]

    def test_a_moment_while_it_warms_up_has_passed(self, world: World) -> None:
        """What came before the model took calls is no reason to replace it."""
        world.wall = at("2026-01-10T02:59:30")
        policy = Cron("0 3 * * *", tz="UTC", jitter=0)
        guard = world.guard(reload_on=policy, defer=0, warmup=lambda _: world.tick(60))
        guard.load()
        assert [1, 2] == [self.check(world, guard, hours) for hours in (0.1, 24)]

    def test_either_of_two(self, world: World) -> None:
        """``|``: what comes first, and the other counts from there."""
        world.wall = at("2026-01-10T12:00")
        guard = world.guard(reload_on=Cron("0 3 * * *", tz="UTC") | TTL("6h", jitter=0), defer=0)
        guard.load()
        assert [1, 2, 3, 4] == [self.check(world, guard, hours) for hours in (5.9, 0.2, 6, 3.1)]

    def test_both_of_two(self, world: World) -> None:
        """``&``: after the moment, once the other one is due too."""
        world.wall = at("2026-01-10T12:00")
        guard = world.guard(reload_on=Cron("0 3 * * *", tz="UTC", jitter=0) & Uses(2), defer=0)
        number(guard)
        assert [1, 1] == [self.check(world, guard, hours) for hours in (15.1, 1)]
        number(guard)
        assert 2 == self.check(world, guard, 0.1)

    def test_within_a_span(self, world: World) -> None:
        """Every hour, but only at night."""
        world.wall = at("2026-01-10T00:30")
        night = Between("02:00", "05:00", tz="UTC")
        guard = world.guard(reload_on=Cron("0 * * * *", tz="UTC", jitter=0) & night, defer=0)
        guard.load()
        assert [1, 2, 3, 4, 4, 4] == [self.check(world, guard, 1) for _ in range(6)]

    def test_a_paused_guard_reloads_once_after_it(self, world: World) -> None:
        """A pause over three nights is slept over."""
        world.wall = at("2026-01-10T12:00")
        guard = world.guard(reload_on=Cron("0 3 * * *", tz="UTC"), defer=0)
        guard.load()
        guard.pause()
        assert [1, 1, 1] == [self.check(world, guard, 24) for _ in range(3)]
        guard.resume()
        assert [2, 2] == [self.check(world, guard, 0.1) for _ in range(2)]

    def test_with_the_fixture_of_tests(self, modelguard_clock: Clock, modelguard_loader: Loader) -> None:
        """``modelguard_clock.wall`` sets the time of day, and ``advance`` brings the moment."""
        modelguard_clock.wall = datetime(2026, 3, 28, 23, tzinfo=UTC)
        nlp = guard(modelguard_loader, reload_on=Cron("30 2 * * *", tz="Europe/Berlin"), swap=Swap(defer=0))
        nlp.load()
        modelguard_clock.advance("1h59m")
        assert 1 == nlp.status().generation
        modelguard_clock.advance("2m")
        assert 2 == nlp.status().generation

    def test_it_asks_for_new_weights(self) -> None:
        """Where processes share one copy, the one that loads it acts, as on ``TTL``."""
        both = Cron("0 3 * * *") | Uses(5)
        assert ["Cron('0 3 * * *')", "Uses(5)"] == [repr(subset(both, renews=renews)) for renews in (True, False)]


@needs_cronsim
@pytest.mark.parametrize("expression", ["0 0 31 2 *", "0 0 30 2 *", "0 0 31 4,6,9,11 *", "0 0 31 FEB *"])
def test_what_never_comes_is_rejected(expression: str) -> None:
    """At the definition: a service that waits for 31 February would never reload."""
    with pytest.raises(InvalidOption, match="never comes"):
        Cron(expression)


@needs_cronsim
@pytest.mark.parametrize(
    "expression", ["0 0 29 2 *", "0 0 L * *", "0 0 31 2,3 *", "0 0 * * SUN#5", "0  3 * *\tMON-FRI"]
)
def test_what_comes_rarely_is_accepted(expression: str) -> None:
    """29 February comes; spaces are those of the reader."""
    assert " ".join(expression.split()) == Cron(expression).expression


@needs_cronsim
@pytest.mark.parametrize(
    "expression", ["60 0 * * *", "0 24 * * *", "x 0 * * *", "0 0 0 * *", "*/0 * * * *", "0 0 * * 8"]
)
def test_what_is_no_expression_is_rejected(expression: str) -> None:
    """With the field that is wrong."""
    with pytest.raises(InvalidOption, match=r"is not a cron expression, or never comes \(bad "):
        Cron(expression)


@pytest.mark.parametrize("expression", ["", "0 3 * *", "0 0 3 * * *", "@daily", "@reboot", None, 3, b"0 3 * * *"])
def test_what_has_not_five_fields_is_rejected(expression: object) -> None:
    """Also without cronsim, with what to write instead."""
    with pytest.raises(InvalidOption, match=r"expression=.*Write five fields"):
        Cron(expression)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("jitter", "why"), [(0.1, "less than a second"), ("2h", "longer than"), (-1, "negative"), (None, "duration")]
)
@needs_cronsim
def test_a_bad_jitter_is_rejected(jitter: object, why: str) -> None:
    """A share as for ``TTL`` would be a tenth of a second; a long one would skip moments."""
    with pytest.raises(InvalidOption, match=why):
        Cron("0 * * * *", jitter=jitter)  # type: ignore[arg-type]


@needs_cronsim
def test_a_value_with_a_readable_name() -> None:
    """Equal if all is equal, also after pickling; logs show the expression and the zone."""
    berlin = Cron("0  3 * * *", tz="Europe/Berlin", jitter="2m")
    assert (True, True) == (
        berlin == pickle.loads(pickle.dumps(berlin)),
        berlin == Cron("0 3 * * *", tz="Europe/Berlin", jitter=120),
    )
    assert ("Cron('0 3 * * *', tz='Europe/Berlin')", "Cron('0 3 * * *')") == (repr(berlin), repr(Cron("0 3 * * *")))
    assert berlin != Cron("0 3 * * *", tz="UTC", jitter="2m")


@needs_cronsim
def test_moments_each_minute_get_the_default_jitter() -> None:
    """The default fits every expression."""
    assert 60 == Cron("* * * * *").jitter


@needs_cronsim
@pytest.mark.parametrize("zone", ["Berlin", "", 1])
def test_an_unknown_zone_is_rejected(zone: object) -> None:
    """At the definition."""
    with pytest.raises(InvalidOption, match="is not a known time zone"):
        Cron("0 3 * * *", tz=zone)  # type: ignore[arg-type]


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine with a time zone of its own."""
    policies.local_zone.cache_clear()
    monkeypatch.delenv("TZ", raising=False)
    monkeypatch.setattr(policies, "_LOCAL", tmp_path / "localtime")
    yield tmp_path / "localtime"
    policies.local_zone.cache_clear()


class TestLocalTime:
    def test_that_of_the_environment(self, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """``TZ`` comes first, also with its colon."""
        monkeypatch.setenv("TZ", ":Europe/Berlin")
        assert timedelta(hours=2) == datetime(2026, 7, 1, tzinfo=policies.local_zone()).utcoffset()

    def test_that_of_the_machine(self, local: Path) -> None:
        """The file that the system has, with its summer time."""
        files = (Path(folder) / "Asia/Tokyo" for folder in ("/usr/share/zoneinfo", "/usr/lib/zoneinfo"))
        found = next((file for file in files if file.exists()), None)
        if found is None:
            pytest.skip("the system has no time zones")
        local.write_bytes(found.read_bytes())
        assert timedelta(hours=9) == datetime(2026, 7, 1, tzinfo=policies.local_zone()).utcoffset()

    def test_without_any_it_is_utc(self, local: Path) -> None:
        """As in most containers."""
        assert timedelta(0) == datetime(2026, 7, 1, tzinfo=policies.local_zone()).utcoffset()

    @needs_cronsim
    def test_what_has_no_name_is_rejected(self, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rule in ``TZ`` would not bring daylight saving time; the message says what to give."""
        monkeypatch.setenv("TZ", "CET-1CEST")
        with pytest.raises(InvalidOption, match="TZ='CET-1CEST'"):
            Cron("0 3 * * *")
        assert "UTC" == Cron("0 3 * * *", tz="UTC").tz


def test_without_cronsim(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the line that installs it."""
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(NotSupported, match=r"cronsim is not installed; pip install 'modelguard-lifecycle\[cron\]'"):
        Cron("0 3 * * *")
