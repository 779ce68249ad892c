"""Small fleets on simulated clocks: what benchmarks/fleet.py shows at length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))  # as for the scripts there
_fleet = pytest.importorskip("_fleet")
fleet = pytest.importorskip("fleet")

pytestmark = pytest.mark.filterwarnings("ignore::modelguard.errors.PolicyNeverFires")


def simulated(name: str, size: int = 60) -> tuple[list[_fleet.History], fleet.Scenario]:
    """What a fleet of this size goes through in a scenario of the benchmark."""
    scenario = fleet.SCENARIOS[name]
    return _fleet.fleet(scenario.conditions, size), scenario


def total(histories: list[_fleet.History]) -> int:
    """Requests to the registry."""
    return sum(len(one.requests) for one in histories)


def test_a_fleet_is_the_same_every_time() -> None:
    """Its seed alone decides, and a larger fleet begins with the smaller one."""
    conditions = fleet.SCENARIOS["TTL('1h')"].conditions
    five = _fleet.fleet(conditions, 5)
    assert five == _fleet.fleet(conditions, 5) == _fleet.fleet(conditions, 7)[:5]
    assert five != _fleet.fleet(conditions, 5, seed=2)


@pytest.mark.parametrize("name", ["TTL('1h')", "MemoryLimit('80%')", "Uses(360)"])
def test_replicas_that_started_together_reload_apart(name: str) -> None:
    """With defaults alone, a fleet that ages or leaks in step loads over half an hour, and two in an hour at most."""
    histories, scenario = simulated(name)
    firsts = sorted(one.requests[0] for one in histories)
    assert firsts[-1] - firsts[0] > 1400
    assert all(1 <= len(one.requests) <= 4 for one in histories)
    assert _fleet.most_away(histories) < 0.2
    assert _fleet.herd(histories, fleet.LOAD, scenario.over) < fleet.HERD


def test_new_weights_are_loaded_one_after_the_other_with_a_spread() -> None:
    """Without it all replicas load at once, and without room for a second copy none of them answers."""
    together, _ = simulated("Modified")
    apart, _ = simulated("Modified(spread='20m')")
    assert (1.0, 60, 60) == (_fleet.most_away(together), total(together), total(apart))
    assert _fleet.most_away(apart) < 0.2


@pytest.mark.parametrize("name", ["outage, room for two copies", "outage as new weights appear"])
def test_nobody_notices_an_outage_of_the_registry(name: str) -> None:
    """With room for two copies the old model serves, and all have the new one within two of the longest waits."""
    histories, scenario = simulated(name)
    assert any(one.refused for one in histories)
    assert (0.0, 0) == (_fleet.most_away(histories), sum(one.failed for one in histories))
    assert 0 < _fleet.recovery(histories, scenario.conditions.outage[1]) < fleet.RECOVERY * 60


def test_without_room_an_outage_is_noticed_and_ends_as_soon() -> None:
    """A replica that has let go of its model to load has none until the registry answers."""
    histories, scenario = simulated("outage, room for one copy")
    assert 0.2 < _fleet.most_away(histories) < 0.6
    assert 0 < _fleet.recovery(histories, scenario.conditions.outage[1]) < fleet.RECOVERY * 60


def test_a_poison_input_reloads_nothing() -> None:
    """In a batch it fails alone, whoever gets it: no model is replaced, no circuit opens, no healthy request fails."""
    histories, _ = simulated("one poison input in 32", 30)
    assert (0.0, 0, 0) == (_fleet.most_away(histories), total(histories), sum(one.failed for one in histories))


def test_poison_alone_does_not_reload_all_the_time() -> None:
    """Ten minutes of errors that no reload can end cost each replica a few loads, and not one every half minute."""
    histories, _ = simulated("nothing but poison", 30)
    assert {3, 4, 5} >= {len(one.requests) for one in histories}
    assert 0.0 == _fleet.most_away(histories)


class TestMeasures:
    """What the figures are made of."""

    histories = (
        _fleet.History(requests=[0.0, 1.0], away=[(0.0, 2.0)], refused=[0.0], installed=[5.0, 12.0]),
        _fleet.History(requests=[1.5], away=[(1.0, 3.0)], installed=[30.0]),
        _fleet.History(away=[(2.0, 4.0)]),
        _fleet.History(),
    )

    def test_those_who_are_away_at_the_same_time_count(self) -> None:
        """Who comes back in the moment when another leaves is not away with it."""
        assert 0.5 == _fleet.most_away(self.histories)
        assert [0.25, 0.5, 0.5, 0.25, 0.0] == _fleet.curve_away(self.histories, 1.0, 4.0)

    def test_a_herd_is_more_than_one_a_second(self) -> None:
        """The mean counts as at least a third of a request a second."""
        assert {0: 1, 1: 2} == _fleet.rates(self.histories, 1.0)
        assert 6.0 == _fleet.herd(self.histories, 1.0, 100.0)
        assert 2.0 == _fleet.herd(self.histories, 1.0, 3.0)
        assert 0.0 == _fleet.herd([], 1.0, 1.0)

    def test_recovery_is_that_of_those_who_were_refused(self) -> None:
        """It ends with the first model that each of them has afterwards."""
        assert 2.0 == _fleet.recovery(self.histories, 10.0)
