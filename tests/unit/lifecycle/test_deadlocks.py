"""Loads that wait for themselves raise, and do not hang."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.unit.interrupts import interrupted_everywhere, traces_instructions
from tests.unit.lifecycle.world import TIMEOUT, Loader, World, number

from modelguard import Loading, ModelGuard, guard, telemetry
from modelguard.errors import LoadFailed, Overloaded, WouldDeadlock
from modelguard.lifecycle import _engine
from modelguard.telemetry import Event, GenerationReleased, LoadFinished

INSTEAD = "Use the model itself, move the call to warmup"


def causes(error: BaseException | None) -> list[type[BaseException]]:
    """The kinds of an error and of what led to it."""
    found: list[type[BaseException]] = []
    while error is not None:
        found.append(type(error))
        error = error.__cause__
    return found


@pytest.mark.parametrize("options", [{}, {"loading": Loading("1h")}], ids=str)
@pytest.mark.parametrize("use", ["lease", "load", "reload"])
def test_a_loader_that_uses_its_own_guard_is_told(world: World, use: str, options: dict[str, Any]) -> None:
    """A loader that waits for its own model fails with what to do instead, whichever way it asks."""

    def load() -> Any:
        if use == "lease":
            number(guard)
        else:
            getattr(guard, use)()
        return world.loader()

    guard = world.guard(load, **options)
    with pytest.raises(LoadFailed, match=INSTEAD) as failure:
        guard.load(TIMEOUT)
    assert [LoadFailed, WouldDeadlock] == causes(failure.value)


def test_a_loader_that_awaits_a_release_of_its_model_in_another_thread_is_told(world: World) -> None:
    """The release waits for the load, and is found by what the loader waits for."""

    async def load() -> Any:
        await asyncio.to_thread(guard.unload)
        return world.loader()

    guard = world.guard(load)
    with pytest.raises(LoadFailed, match="waits for this thread") as failure:
        guard.load(TIMEOUT)
    assert [LoadFailed, WouldDeadlock] == causes(failure.value)


@pytest.mark.parametrize("options", [{}, {"loading": Loading("1h")}], ids=str)
@pytest.mark.parametrize("use", ["reload", "unload"])
@pytest.mark.parametrize("event", [LoadFinished, GenerationReleased])
def test_a_hook_that_waits_for_the_load_that_it_hears_of_is_told(
    world: World, event: type[Event], use: str, options: dict[str, Any]
) -> None:
    """Its thread is that of the load, to the end of the old model: waiting would keep both from ending."""
    told: list[str] = []

    def again(heard: Event) -> None:
        if isinstance(heard, event) and not told:
            try:
                getattr(guard, use)(timeout=0.01)
            except WouldDeadlock as error:
                told.append(error.fix)

    guard = world.guard(**options)
    remove = telemetry.add_hook(again)
    try:
        guard.load(TIMEOUT)
        guard.reload(timeout=TIMEOUT)
        world.join()
    finally:
        remove()
    assert ["wait=False."] == [fix[-11:] for fix in told]


def test_an_async_loader_that_uses_its_own_guard_is_told(world: World) -> None:
    """The same for coroutines."""

    async def load() -> Any:
        async with guard.lease():
            return world.loader()

    guard = world.guard(load)
    with pytest.raises(LoadFailed, match=INSTEAD):
        guard.load(TIMEOUT)


def test_two_loaders_that_wait_for_each_other_are_told(world: World) -> None:
    """A circle is found through any number of guards, and every one of them fails instead of hanging."""
    guards: dict[str, ModelGuard[Any]] = {}
    following = {"a": "b", "b": "c", "c": "a"}
    for name, other in following.items():
        guards[name] = world.guard(lambda other=other: number(guards[other]), name=name)
    with pytest.raises(LoadFailed) as failure:
        guards["a"].load(TIMEOUT)
    assert WouldDeadlock in causes(failure.value)
    world.join()
    assert ["failed"] * 3 == [guard.status().state for guard in guards.values()]


def test_a_loader_may_use_other_guards(world: World) -> None:
    """A model may be made of other guards' models, several callers and detours included."""
    base = world.guard(name="base")
    left = world.guard(lambda: (number(base), Loader(world)())[1], name="left")
    right = world.guard(lambda: (number(base), Loader(world)())[1], name="right")
    top = world.guard(lambda: (number(left), number(right), Loader(world)())[2], name="top")
    calls = [world.spawn(number, top) for _ in range(4)]
    assert [1] * 4 == [call.result(TIMEOUT) for call in calls]
    assert 1 == world.loader.calls


def test_a_reload_s_loader_may_use_the_old_model(world: World) -> None:
    """While a generation serves, a loader may call functions of its own guard: they run on that."""
    made_on: list[int] = []

    def load() -> Any:
        if guard.ready:
            made_on.append(number(guard))
        return world.loader()

    guard = world.guard(load)
    guard.load()
    guard.reload()
    assert ([1], 2) == (made_on, number(guard))


def test_a_loader_that_leases_from_its_own_pool_is_told(world: World) -> None:
    """Models of a pool are loaded one at a time, so such a loader waits in vain, up to its deadline."""

    def load(key: str) -> Any:
        with pool.lease("b" if key == "a" else "a", timeout="1ms"):
            return world.loader.load(key)

    pool = world.pool(load)
    with pytest.raises(LoadFailed) as failure, pool.lease("a"):
        pass
    assert Overloaded in causes(failure.value)


def waited_for() -> set[Any]:
    """What this thread waits for."""
    return {wait.state for wait in _engine.waits if wait.thread == threading.get_ident()}


def test_waits_leave_nothing_behind(world: World) -> None:
    """A wait that has ended, however it ended, is not part of any later circle."""
    guard = world.guard()
    world.loader.fails = True
    with pytest.raises(LoadFailed):
        guard.load()
    with pytest.raises(LoadFailed):
        asyncio.run(guard.aload())
    assert not waited_for()


@traces_instructions
def test_a_wait_that_a_signal_handler_ends_leaves_nothing_behind() -> None:
    """Wherever its exception comes: a later load does not count as waiting for this thread."""
    for _, where in interrupted_everywhere(lambda: guard(dict, reload_on=None), lambda made: made.load()):
        assert not waited_for(), where


def test_tasks_of_one_loop_end_their_waits_in_any_order(world: World) -> None:
    """A task that waits longer than one that began before it leaves nothing behind either."""

    async def wait_in(order: list[int]) -> None:
        cores = [world.guard().engine.state for _ in order]
        ends = [asyncio.Event() for _ in order]

        async def wait(number: int) -> None:
            with _engine.LoadWait(cores[number]):
                await ends[number].wait()

        tasks = [asyncio.create_task(wait(number)) for number in order]
        await asyncio.wait(tasks, timeout=0)
        assert set(cores) == waited_for()
        for each in order:
            ends[each].set()
            await tasks[each]

    asyncio.run(wait_in([0, 1]))
    assert not waited_for()
