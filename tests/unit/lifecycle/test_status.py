"""What ``status()`` and ``repr`` of a guard report."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World, outcome, until

from modelguard import ModelGuard
from modelguard.errors import LoadFailed
from modelguard.lifecycle.status import Status
from modelguard.telemetry import GenerationReleased


def state(guard: ModelGuard[Any]) -> tuple[str, bool]:
    return guard.status().state, guard.ready


def test_a_new_guard(world: World) -> None:
    """A guard that was never used says so, and that nothing has happened."""
    expected = Status(
        name="model",
        state="new",
        generation=0,
        age=0.0,
        uses=0,
        in_flight=0,
        reloads=0,
        failures=0,
        last_error=None,
        model_bytes=None,
        last_release=None,
    )
    assert expected == world.guard().status()


def test_a_guard_in_use(world: World) -> None:
    """Number, age, uses, calls in flight, size and reloads are those of the serving generation."""
    world.model_size = 30 * MB
    guard = world.guard()
    guard.load()
    guard.reload()
    world.join()
    world.tick(90)
    for _ in range(3):
        with guard.lease():
            pass
    with guard.lease():
        status = guard.status()
    expected = Status(
        name="model",
        state="ready",
        generation=2,
        age=90.0,
        uses=3,
        in_flight=1,
        reloads=1,
        failures=0,
        last_error=None,
        model_bytes=30 * MB,
        last_release=world.last(GenerationReleased),
    )
    assert expected == status


def test_states_of_a_life_that_drains_first(world: World) -> None:
    """With ``drain_first`` none serves while the model is replaced, nor after a load that failed."""
    guard = world.guard(swap="drain_first")
    guard.load()
    with guard.lease():
        reload = world.spawn(guard.reload)
        until(lambda: not guard.ready)
        states = [state(guard)]
        world.loader.fails = True
    with pytest.raises(LoadFailed):
        outcome(reload)
    states.append(state(guard))
    assert [("draining", False), ("failed", False)] == states


def test_a_guard_is_ready_again_when_its_reload_returns(world: World) -> None:
    """When ``reload()`` has returned the state is ``ready``, even if the old generation still drains behind it."""
    guard = world.guard()
    guard.load()
    with guard.lease():
        outcome(world.spawn(guard.reload))
        assert ("ready", True) == state(guard)


def test_calls_on_old_generations_are_in_flight_too(world: World) -> None:
    """Calls on draining and abandoned generations are counted until they end."""
    guard = world.guard(drain_timeout=0)
    with guard.lease():
        outcome(world.spawn(guard.reload))
        world.join()
        with guard.lease():  # joins the abandoned one
            assert (2, 2) == (guard.status().in_flight, guard.status().generation)
    assert 0 == guard.status().in_flight


def test_a_guard_shows_its_name_and_state(world: World) -> None:
    """``repr`` shows the guard's name and state."""
    guard = world.guard(name="ginza")
    guard.load()
    assert "<ModelGuard 'ginza' ready>" == repr(guard)
    with guard.lease():
        assert "<generation 1, 1 in flight>" == repr(guard.engine.state.current)
