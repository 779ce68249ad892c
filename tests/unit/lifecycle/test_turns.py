"""Replicas are replaced one at a time, and the oldest first where memory decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from modelguard import TTL, Idle, MemoryGrowth, Policy, Swap, Uses, guard, replicas
from modelguard.lifecycle.replicas import ModelReplicas
from modelguard.telemetry import ReloadDue
from modelguard.testing import Clock, Loader

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import World


def pair_of(world: World, policy: Policy) -> ModelReplicas[object]:
    """Two replicas with models."""
    pair = replicas(world.guard(reload_on=policy, defer=0), 2)
    pair.load()
    world.join()
    return pair


def generations(pair: ModelReplicas[object]) -> list[int]:
    return [status.generation for status in pair.status()]


def test_only_one_is_replaced_at_a_time(world: World) -> None:
    """The other one waits until the first has been replaced, however long that takes, and is asked again meanwhile."""
    pair = pair_of(world, TTL(10, jitter=0))
    first, second = pair._guards
    world.tick(20)
    world.loader.hold()
    assert first.check()
    world.loader.reached()
    world.tick(60)
    assert (False, 1.0) == (second.check(), second.engine.check_interval())
    world.loader.open.set()
    world.join()
    assert (False, True) == (first.check(), second.check())
    world.join()
    assert [2, 2] == generations(pair)


def test_the_end_of_the_next_call_asks_again(world: World) -> None:
    """Where only calls count, time alone asks nobody."""
    pair = pair_of(world, Uses(2))
    number = pair(lambda model: model.number)  # type: ignore[attr-defined]
    world.loader.hold()
    with pair.lease():
        for _ in range(2):
            number()
    world.loader.reached()
    for _ in range(2):
        number()
    assert [1, 1] == generations(pair)
    world.loader.open.set()
    world.join()
    number()
    number()
    world.join()
    assert [2, 2] == generations(pair)


def test_a_replica_without_a_model_is_no_oldest(modelguard_clock: Clock, modelguard_loader: Loader) -> None:
    """One that has released its model until its next use does not keep the others from being replaced."""
    pair = replicas(guard(modelguard_loader, reload_on=MemoryGrowth("50 MB"), swap=Swap(defer=0)), 2)
    pair.load()
    modelguard_clock.advance("5m")
    pair._guards[0].unload()
    modelguard_clock.memory += 60_000_000
    modelguard_clock.advance("1m")
    assert [0, 2] == generations(pair)


def test_releasing_needs_no_turn(world: World) -> None:
    """What nobody uses is released, also while another one is loaded."""
    pair = pair_of(world, Idle("1m"))
    world.loader.hold()
    pair._guards[1].reload(wait=False)
    world.loader.reached()
    world.tick(61)
    pair._guards[0].check()
    assert [0, 1] == generations(pair)
    world.loader.open.set()
    world.join()


def test_policies_keep_what_they_are(world: World) -> None:
    """Events name the policy as it was written, and each member of a disjunction counts by itself."""
    pair = pair_of(world, TTL("1h") | Uses(5))
    assert TTL("1h") | Uses(5) == pair._guards[0].reload_on
    world.tick(3600)
    assert pair._guards[0].check()
    world.join()
    assert ("TTL('1h')",) == world.reasons(ReloadDue)


@pytest.mark.timeout(60)
def test_a_signal_handler_may_call_another_replica(world: World) -> None:
    """It may interrupt the very thread that is deciding whose turn it is: one at a time, and nobody waits."""
    pair = pair_of(world, TTL(10, jitter=0))
    with pair._free.turn(0) as first, pair._free.turn(1) as second:
        assert (True, False) == (first, second)
    with pair._free.turn(1) as second:
        assert second
