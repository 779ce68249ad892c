"""How long callers wait for a model, and what ends their wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, World, number, outcome, until

from modelguard import ModelGuard
from modelguard.errors import InvalidOption, LoadFailed, Overloaded, Reloading, WouldDeadlock


async def anumber(guard: ModelGuard[Any], timeout: float | None = None) -> int:
    async with guard.lease(timeout) as model:
        return int(model.number)


def replacing(world: World, **options: Any) -> ModelGuard[Any]:
    """A guard without a serving generation, whose second model is being loaded."""
    guard = world.guard(swap="drain_first", **options)
    guard.load()
    world.loader.hold()
    guard.reload(wait=False)
    world.loader.reached()
    return guard


class TestTheFirstLoad:
    def test_is_waited_for_as_long_as_it_takes(self, world: World) -> None:
        """``wait_timeout`` is about replacements: the first model has no bound but the caller's own."""
        guard = world.guard(wait_timeout=0)
        world.loader.hold()
        call = world.spawn(number, guard)
        until(lambda: len(guard.engine.state.waiting) == 1)
        world.loader.open.set()
        assert 1 == outcome(call)

    @pytest.mark.parametrize("timeout", [0, "1ms"])
    def test_is_not_waited_for_longer_than_the_caller_wants(self, world: World, timeout: Any) -> None:
        """A caller's own ``timeout`` ends its wait with ``Reloading``; the load goes on for others."""
        guard = world.guard()
        world.loader.hold()
        with pytest.raises(Reloading):
            guard.load(timeout)
        with pytest.raises(Reloading), guard.lease(timeout):
            pass
        with pytest.raises(Reloading):
            asyncio.run(guard.aload(timeout))
        assert 0 == len(guard.engine.state.waiting)
        world.loader.open.set()
        world.join()
        assert (1, 1) == (number(guard), world.loader.calls)


class TestWhileAModelIsReplaced:
    @pytest.mark.parametrize("load", [ModelGuard.load, lambda guard: asyncio.run(guard.aload())], ids=["load", "aload"])
    def test_load_waits_as_long_as_it_takes(self, world: World, load: Callable[[ModelGuard[Any]], None]) -> None:
        """``wait_timeout`` is for calls, and ``load()`` has a ``timeout`` of its own."""
        guard = replacing(world, wait_timeout=0)
        loading = world.spawn(load, guard)
        until(lambda: len(guard.engine.state.waiting) == 2)  # with the reload that was asked for
        world.loader.open.set()
        assert (None, 2) == (outcome(loading), number(guard))

    @pytest.mark.parametrize("wait_timeout", [0, "1ms"])
    def test_calls_wait_up_to_their_deadline(self, world: World, wait_timeout: Any) -> None:
        """If no generation serves, calls wait up to ``wait_timeout`` and then get ``Reloading``."""
        guard = replacing(world, wait_timeout=wait_timeout)
        assert ("draining", False) == (guard.status().state, guard.ready)
        for call in (lambda: number(guard), lambda: asyncio.run(anumber(guard))):
            with pytest.raises(Reloading, match="guard 'model' had no model to serve after") as late:
                call()
            assert isinstance(late.value, Overloaded)
            assert isinstance(late.value, TimeoutError)
            assert late.value.waited < TIMEOUT

    def test_calls_that_waited_run_on_the_new_model(self, world: World) -> None:
        """Threads and tasks that wait are served as soon as the new generation is."""
        guard = replacing(world)
        calls = [world.spawn(number, guard), world.spawn(asyncio.run, anumber(guard))]
        until(lambda: len(guard.engine.state.waiting) == 3)  # and the reload that was asked for
        world.loader.open.set()
        assert [2, 2] == [outcome(call) for call in calls]

    def test_a_decorated_function_waits_as_well(self, world: World) -> None:
        """Calls of decorated functions follow the same deadline."""
        guard = replacing(world, wait_timeout=0)
        with pytest.raises(Reloading):
            guard(lambda model: model.number)()

    def test_a_lease_may_have_a_deadline_of_its_own(self, world: World) -> None:
        """``lease(timeout)`` takes precedence over ``wait_timeout``."""
        guard = replacing(world, wait_timeout="1h")
        with pytest.raises(Reloading), guard.lease(0):
            pass
        with pytest.raises(Reloading):
            asyncio.run(anumber(guard, 0))


class TestCommandsWhileAModelServes:
    """Nobody is told that there is no model while one takes calls."""

    def test_commands_whose_time_is_over(self, world: World) -> None:
        """What they wait for goes on, and their error says which generation serves meanwhile."""
        guard = world.guard(swap="load_first")
        guard.load()
        world.loader.hold()
        guard.reload(wait=False)
        world.loader.reached()
        for command in (guard.reload, guard.unload):
            said = r"guard 'model': the load.* was not over after 0.0 s, and goes on; generation 1 serves meanwhile"
            with pytest.raises(Reloading, match=said) as late:
                command(timeout=0)
            assert (1, 1) == (late.value.current, number(guard))

    def test_a_release_that_calls_hold_up(self, world: World) -> None:
        """The time is over, and no generation serves: the error speaks of the release."""
        guard = world.guard()
        with guard.lease():
            unload = world.spawn(guard.unload, "1ms")
            with pytest.raises(Reloading, match="the load or release under way was not over after"):
                outcome(unload)

    def test_a_rollback_during_a_reload(self, world: World) -> None:
        """Who waits for that reload is told which generation serves."""
        guard = world.guard(keep_previous=True, swap="load_first")
        guard.load()
        guard.reload()
        world.loader.hold()
        reload = world.spawn(guard.reload)
        world.loader.reached()
        until(lambda: bool(guard.engine.state.waiting))
        guard.rollback()
        with pytest.raises(LoadFailed, match="has not replaced generation 1, which serves on: rollback"):
            outcome(reload)
        world.loader.open.set()


class TestAWaiterThatGoesAway:
    def test_a_cancelled_task_harms_nobody(self, world: World) -> None:
        """A cancelled waiter is removed; the load goes on for the others."""
        guard = world.guard()
        world.loader.hold()

        async def main() -> tuple[int, int]:
            stays, goes = asyncio.create_task(anumber(guard)), asyncio.create_task(anumber(guard))
            await asyncio.to_thread(world.loader.reached)
            assert 2 == len(guard.engine.state.waiting)
            goes.cancel()
            with pytest.raises(asyncio.CancelledError):
                await goes
            left = len(guard.engine.state.waiting)
            world.loader.open.set()
            return await stays, left

        assert (1, 1) == asyncio.run(main())
        assert (1, 0) == (world.loader.calls, guard.status().in_flight)

    def test_a_loop_that_ended_harms_nobody(self, world: World) -> None:
        """The event loop of a waiter may be gone by the time the model is there."""
        guard = world.guard()
        world.loader.hold()
        with pytest.raises(Reloading):
            asyncio.run(anumber(guard, 0))
        waiter = world.spawn(number, guard)
        until(lambda: len(guard.engine.state.waiting) == 1)
        world.loader.open.set()
        assert 1 == outcome(waiter)


@pytest.mark.parametrize("use", ["load", "__enter__"])
def test_blocking_a_running_loop_is_refused(world: World, use: str) -> None:
    """On a running event loop ``load()`` and ``with`` raise, with what to write instead."""
    guard = world.guard()

    async def main() -> None:
        getattr(guard, use)()

    with pytest.raises(WouldDeadlock, match=r"await f.aload\(\)") as refusal:
        asyncio.run(main())
    assert ("model", 0) == (refusal.value.guard, world.loader.calls)


@pytest.mark.parametrize("timeout", [-1, "soon", float("nan"), True])
def test_deadlines_that_cannot_be_meant_are_refused(world: World, timeout: Any) -> None:
    """A deadline is a duration, and may be zero."""
    guard = world.guard()
    for use in (guard.lease, guard.load, lambda value: guard.reload(timeout=value)):
        with pytest.raises(InvalidOption) as refusal:
            use(timeout)
        assert "timeout" == refusal.value.argument
