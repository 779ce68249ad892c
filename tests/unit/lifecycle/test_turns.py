"""``_turns``: one replica at a time is replaced, and the oldest first where memory decides."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from modelguard import TTL, Idle, MemoryGrowth, Uses
from modelguard.lifecycle.policies import Policy, Snapshot
from modelguard.lifecycle.replicas import Turns, in_turn

MB = 1_000_000


class Replica:
    """What turns see of the engine of a replica.

    Args:
        loading: Whether it is being replaced.
        loaded: Whether it has a model.
    """

    def __init__(self, loading: Callable[[], bool], loaded: Callable[[], bool]) -> None:
        self._loading, self._loaded = loading, loaded

    @property
    def loading(self) -> bool:
        return self._loading()

    @property
    def state(self) -> SimpleNamespace:
        return SimpleNamespace(current=object() if self._loaded() else None)


class World:
    """Replicas, whether each is being replaced, and a clock."""

    def __init__(self, count: int = 2) -> None:
        self.now = 100.0
        self.loading = [False] * count
        self.loaded = [True] * count
        engines: Any = [
            Replica(partial(self.loading.__getitem__, at), partial(self.loaded.__getitem__, at)) for at in range(count)
        ]
        self.turns = Turns(engines, lambda: self.now)


@pytest.fixture
def world() -> World:
    return World()


def of(policy: Policy | None, replica: int, world: World) -> Policy:
    made = in_turn(policy, replica, world.turns)
    assert made is not None
    return made


def test_only_one_is_due_at_a_time(world: World) -> None:
    """The other one waits until the first has been replaced, and is due then."""
    first, second = (of(TTL(10, jitter=0), at, world) for at in range(2))
    old = Snapshot(age=20.0)
    assert first.due(old)
    assert not second.due(old)
    world.loading[0] = True
    world.now += 60
    assert not second.due(old), "however long it takes"
    world.loading[0] = False
    world.now += 1
    assert not first.due(Snapshot(generation=2, age=0.5))
    assert second.due(old)


def test_a_turn_that_is_not_used_is_lost(world: World) -> None:
    """A replica that was closed after it got its turn holds up nobody for more than a moment."""
    first, second = (of(TTL(10, jitter=0), at, world) for at in range(2))
    assert first.due(Snapshot(age=20.0))
    world.now += 4
    assert not second.due(Snapshot(age=20.0))
    world.now += 2
    assert second.due(Snapshot(age=20.0))


def test_growth_counts_from_the_youngest_and_replaces_the_oldest(world: World) -> None:
    """The load of one replica is no growth of another, whose own baseline it was not in."""
    first, second = (of(MemoryGrowth("50 MB"), at, world) for at in range(2))

    def reading(replica: int, memory: int, *, age: float, baseline: int | None) -> bool:
        snapshot = Snapshot(age=age, memory=(memory,) * 3, baseline=baseline)
        return (first, second)[replica].due(snapshot)

    assert not reading(0, 100 * MB, age=30.0, baseline=100 * MB)
    assert not reading(1, 200 * MB, age=10.0, baseline=None), "the second one has not settled"
    assert not reading(0, 200 * MB, age=30.0, baseline=100 * MB), "so nobody can tell"
    assert not reading(1, 200 * MB, age=10.0, baseline=200 * MB)
    assert not reading(0, 220 * MB, age=30.0, baseline=100 * MB)
    assert not reading(1, 260 * MB, age=10.0, baseline=200 * MB), "it has grown, and the oldest goes first"
    assert reading(0, 260 * MB, age=30.0, baseline=100 * MB)


def test_a_replica_without_a_model_is_no_oldest(world: World) -> None:
    """One that has released its model until its next use does not keep the others from being replaced."""
    first, second = (of(MemoryGrowth("50 MB"), at, world) for at in range(2))
    first.due(Snapshot(age=30.0, memory=(100 * MB,) * 3, baseline=100 * MB))
    grown = Snapshot(age=10.0, memory=(260 * MB,) * 3, baseline=200 * MB)
    assert not second.due(grown)
    world.loaded[0] = False
    assert second.due(grown)


def test_releasing_needs_no_turn(world: World) -> None:
    """What nobody uses is released, all at once."""
    first, second = (of(Idle("1m"), at, world) for at in range(2))
    world.loading[1] = True
    assert first.due(Snapshot(idle=61.0))
    assert second.due(Snapshot(idle=61.0))
    assert first.unloads


def test_policies_keep_what_they_are(world: World) -> None:
    """Events name the policy as it was written, and each member of a disjunction counts by itself."""
    policy = of(TTL("1h") | Uses(5), 0, world)
    assert "TTL('1h') | Uses(5)" == repr(policy)
    assert [TTL, Uses] == [type(part) for part in policy.parts()]
    assert ["uses"] == [reason.kind for reason in policy.reasons(Snapshot(uses=5))]
    assert in_turn(None, 0, world.turns) is None


def test_who_has_to_wait_is_asked_again(world: World) -> None:
    """A due policy that has no turn is asked again in a second, and not without end in between."""
    first, second = (of(TTL(10, jitter=0), at, world) for at in range(2))
    assert first.due(Snapshot(age=20.0))
    second.due(Snapshot(age=20.0))
    assert 1.0 == second.next_check(Snapshot(age=20.0)).seconds
    assert 5.0 == second.next_check(Snapshot(age=5.0)).seconds


@pytest.mark.timeout(60)
def test_a_signal_handler_may_call_another_replica(world: World) -> None:
    """It may interrupt the very thread that is deciding whose turn it is."""
    seen: list[bool] = []

    def interrupted() -> bool:
        if not seen:
            seen.append(of(TTL(10, jitter=0), 1, world).due(Snapshot(age=20.0)))
        return False

    engines: Any = [Replica(loading, lambda: True) for loading in (lambda: False, interrupted)]
    world.turns = Turns(engines, lambda: world.now)
    first: list[bool] = []
    caller = threading.Thread(target=lambda: first.append(of(TTL(10, jitter=0), 0, world).due(Snapshot(age=20.0))))
    caller.daemon = True
    caller.start()
    caller.join(10)
    assert [True] == seen
    assert [False] == first, "one at a time"
