"""The end of a guard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, World, number, outcome, until

from modelguard import Uses, replicas, telemetry
from modelguard.errors import GuardClosed, InvalidOption, LoadFailed, WouldDeadlock
from modelguard.lifecycle.runtime import use
from modelguard.telemetry import GenerationAbandoned, GenerationReleased, LoadDiscarded, LoadFinished


def uses_of(guard: Any) -> list[Callable[[], object]]:
    """Every way to use a guard."""

    async def alease() -> None:
        async with guard.lease():
            pytest.fail("it let a call in")

    @guard
    async def coroutine(model: object) -> object:
        return model

    @guard
    def generator(model: object) -> Any:
        yield model

    return [
        guard.load,
        lambda: asyncio.run(guard.aload()),
        guard.reload,
        lambda: guard.reload(wait=False),
        lambda: asyncio.run(guard.areload()),
        lambda: guard.lease().__enter__(),
        lambda: asyncio.run(alease()),
        guard(lambda model: model),
        lambda: asyncio.run(coroutine()),
        lambda: list(generator()),
        lambda: guard.recycle_in_children(print),
        lambda: guard.recycle_here(print),
    ]


@pytest.mark.parametrize("use", range(12))
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "never loaded"])
def test_every_use_after_close_is_refused(world: World, use: int, loaded: bool) -> None:  # noqa: FBT001
    """After ``close()`` each way to use the guard raises ``GuardClosed`` with its name, and nothing is loaded."""
    guard = world.guard()
    if loaded:
        guard.load()
    call = uses_of(guard)[use]
    guard.close()
    with pytest.raises(GuardClosed, match="'model' is closed; make a new one") as refusal:
        call()
    assert ("model", int(loaded)) == (refusal.value.guard, world.loader.calls)


def test_a_generator_that_is_still_running_opens_no_closed_guard(world: World) -> None:
    """Between its steps each use is rejected, as after any ``close()``; the generator itself runs to its end."""
    guard = world.guard(drain_timeout=0)

    @guard
    def numbers(model: Any) -> Iterator[int]:
        yield model.number
        yield model.number

    running = numbers()
    assert 1 == next(running)
    guard.close()
    with pytest.raises(GuardClosed):
        number(guard)
    assert [1] == list(running)


def test_entering_a_closed_guard_reopens_it(world: World) -> None:
    """An application that has its guard in its lifespan can be started several times in one process."""
    guard = world.guard()
    for expected in (1, 2):
        with guard:
            assert expected == number(guard)
        with pytest.raises(GuardClosed):
            guard.load()

    async def once() -> int:
        async with guard:
            return number(guard)

    assert [3, 4] == [asyncio.run(once()), asyncio.run(once())]


def test_a_guard_that_is_reopened_while_its_last_load_ends_loads_again(world: World) -> None:
    """The thread of the first load still reports it: the callers of the reopened guard do not wait in vain."""
    guard = world.guard()
    ending = threading.Event()
    remove = telemetry.add_hook(lambda event: isinstance(event, LoadFinished) and ending.wait(TIMEOUT))
    try:
        assert 1 == outcome(world.spawn(number, guard))
        guard.close()
        guard.engine.reopen()
        again = world.spawn(number, guard)
        until(lambda: len(guard.engine.state.waiting) == 1)
    finally:
        ending.set()
        remove()
    assert 2 == outcome(again)


def test_closing_releases_the_model(world: World) -> None:
    """``close()`` unloads the model, drops it and reports the memory that it returned; then nothing serves."""
    unloaded: list[int] = []
    world.model_size = 50
    guard = world.guard(unload=lambda model: unloaded.append(model.number))
    guard.load()
    guard.close()
    status = guard.status()
    assert ([1], 50) == (unloaded, world.last(GenerationReleased).freed)
    assert ("closed", 0, 0, False) == (status.state, status.generation, status.in_flight, guard.ready)


def test_closing_twice_does_nothing(world: World) -> None:
    """A guard that is closed already stays closed, and its model is released once."""
    guard = world.guard()
    guard.load()
    guard.close()
    guard.close()
    asyncio.run(guard.aclose())
    assert 1 == len(world.seen(GenerationReleased))


def test_closing_what_never_loaded_releases_nothing(world: World) -> None:
    """A guard that was never used may be closed."""
    world.guard().close()
    assert [] == world.events


def test_calls_under_way_are_waited_for(world: World) -> None:
    """``close()`` returns when the last call has ended; until then the model is whole, for nested calls as well."""
    guard = world.guard()
    words = guard(lambda model, text: model.words(text))
    with guard.lease() as model:
        closing = world.spawn(guard.close)
        until(lambda: guard.status().state == "closed")
        assert (["a"], ["b"], 1) == (model.words("a"), words("b"), guard.status().in_flight)
        assert not closing.done()
    assert outcome(closing) is None
    assert 1 == len(world.seen(GenerationReleased))


def test_calls_are_not_waited_for_longer_than_the_drain_timeout(world: World) -> None:
    """Calls that outlast ``drain_timeout`` keep their model; the guard is closed without waiting for them."""
    guard = world.guard(drain_timeout=0)
    with guard.lease() as model:
        outcome(world.spawn(guard.close))
        assert (1, []) == (world.last(GenerationAbandoned).in_flight, world.seen(GenerationReleased))
        assert ["still", "here"] == model.words("still here")
    world.join()
    assert 1 == len(world.seen(GenerationReleased))


@pytest.mark.parametrize("way", ["close", "aclose"])
def test_the_timeout_bounds_the_wait_for_calls(world: World, way: str) -> None:
    """After it ``close()`` returns, the calls go on with a whole model, and the last of them releases it."""
    guard = world.guard(drain_timeout="1h")
    close = guard.close if way == "close" else lambda timeout: asyncio.run(guard.aclose(timeout))
    with guard.lease() as model:
        outcome(world.spawn(close, "1ms"))
        abandoned = world.last(GenerationAbandoned)
        assert (1, 0.001, "closed", 1) == (
            abandoned.in_flight,
            abandoned.drain_timeout,
            guard.status().state,
            guard.status().in_flight,
        )
        assert ["still", "here"] == model.words("still here")
        with pytest.raises(GuardClosed):
            outcome(world.spawn(guard.load))
    world.join()
    assert (1, 0) == (len(world.seen(GenerationReleased)), guard.status().in_flight)


def test_a_longer_timeout_than_the_drain_timeout_counts(world: World) -> None:
    """The last chance of a shutdown is the caller's to give."""
    guard = world.guard(drain_timeout=0)
    with guard.lease():
        closing = world.spawn(guard.close, "1h")
        until(lambda: guard.status().state == "closed")
        assert not closing.done()
    outcome(closing)
    assert [] == world.seen(GenerationAbandoned)


@pytest.mark.parametrize("timeout", [-1, "soon", True, "5"])
def test_a_bad_timeout_closes_nothing(world: World, timeout: object) -> None:
    """The message names it, and the guard is as it was."""
    guard = world.guard()
    guard.load()
    for close in (guard.close, lambda bad: asyncio.run(guard.aclose(bad))):
        with pytest.raises(InvalidOption, match="timeout="):
            close(timeout)
    assert 1 == number(guard)


def test_a_pool_and_replicas_share_the_timeout(world: World) -> None:
    """It bounds the wait for the calls on all their models together."""
    models = world.pool()
    with use(lambda: world.runtime):
        pair = replicas(world.guard(drain_timeout="1h"), 2)
    with models.lease("a"), models.lease("b"), pair.lease():
        outcome(world.spawn(models.close, "1ms"))
        outcome(world.spawn(pair.close, "1ms"))
        assert 3 == len(world.seen(GenerationAbandoned))


def test_who_waits_for_a_model_is_told(world: World) -> None:
    """Callers that wait when the guard is closed get ``GuardClosed``; the model that comes too late is dropped."""
    guard = world.guard()
    world.loader.hold()
    calls = [world.spawn(guard.load), world.spawn(lambda: asyncio.run(guard.aload()))]
    until(lambda: len(guard.engine.state.waiting) == 2)
    world.loader.reached()
    guard.close()
    assert [GuardClosed, GuardClosed] == [type(call.exception(TIMEOUT)) for call in calls]
    world.loader.open.set()
    world.join()
    assert (["closed"], False) == ([event.cause for event in world.seen(LoadDiscarded)], guard.ready)


def test_a_reload_under_way_ends_without_a_model(world: World) -> None:
    """Callers that wait for a reload get the error as well, and neither the old nor the new model is left."""
    world.model_size = 50
    before = world.memory
    guard = world.guard()
    guard.load()
    world.loader.hold()
    reload = world.spawn(guard.reload)
    world.loader.reached()
    guard.close()
    world.loader.open.set()
    assert GuardClosed is type(reload.exception(TIMEOUT))
    world.join()
    assert (before, "closed") == (world.memory, guard.status().state)


@pytest.mark.parametrize("swap", ["load_first", "drain_first"])
def test_a_reload_that_waits_for_its_turn_is_given_up(world: World, swap: str) -> None:
    """A reload that has not begun when the guard is closed loads nothing."""
    guard = world.guard(swap=swap, reload_on=Uses(1))
    with world.runtime.host_lock.held(sleep=world.tick, clock=lambda: world.now, cancelled=lambda: False):
        object.__setattr__(world.runtime, "sleep", lambda _seconds: guard.close())
        guard(lambda model: model.number)()
        world.join()
    assert (1, "closed") == (world.loader.calls, guard.status().state)


def test_a_second_attempt_is_given_up(world: World) -> None:
    """A reload whose first model came too late, and whose guard is closed meanwhile, leaves no model."""
    world.model_size = 50
    before = world.memory

    def load() -> Any:
        model = world.loader()
        if model.number == 2:
            guard.reload(wait=False)  # makes it stale
        if model.number == 3:
            guard.close()
        return model

    guard = world.guard(load)
    guard.load()
    with pytest.raises(GuardClosed):
        guard.reload(timeout=TIMEOUT)
    world.join()
    assert (3, before) == (world.loader.calls, world.memory)


def test_closing_on_a_running_loop_is_refused(world: World) -> None:
    """``close()`` would block an event loop: the error says what to write there."""
    guard = world.guard()

    async def main() -> None:
        guard.close()

    with pytest.raises(WouldDeadlock, match=r"await guard.aclose\(\)"):
        asyncio.run(main())
    assert "new" == guard.status().state


def test_a_retry_is_given_up(world: World) -> None:
    """A closed guard's policies are not asked any more, and it retries no load."""
    guard = world.guard()
    world.loader.fails = True
    with pytest.raises(LoadFailed):
        guard.load()
    guard.close()
    world.tick(3600)
    assert (False, 1) == (guard.check(), world.loader.calls)


def test_closing_inside_a_call_is_refused(world: World) -> None:
    """A call cannot close its own guard: that would wait for the call."""
    guard = world.guard()
    with guard.lease() as model:
        with pytest.raises(WouldDeadlock, match=r"close\(\) inside a call on the same guard"):
            guard.close()
        assert ["fine"] == model.words("fine")
    assert guard.ready


class TestContextManager:
    def test_loads_and_closes(self, world: World) -> None:
        """``with guard:`` loads on entry, so a bad model is found before the service starts, and closes on exit."""
        with world.guard() as guard:
            assert "ready" == guard.status().state
        assert "closed" == guard.status().state

    def test_loads_and_closes_asynchronously(self, world: World) -> None:
        """``async with guard:`` is the same for an application's lifespan."""

        async def main() -> Any:
            async with world.guard() as guard:
                assert "ready" == guard.status().state
            return guard

        assert "closed" == asyncio.run(main()).status().state

    def test_closes_when_the_block_fails(self, world: World) -> None:
        """The model is released however the block ends."""
        guard = world.guard()
        with pytest.raises(ValueError, match="port in use"), guard:
            raise ValueError("port in use")
        assert "closed" == guard.status().state

    def test_lets_a_failed_load_through(self, world: World) -> None:
        """A service whose first load fails does not start."""
        world.loader.fails = True
        with pytest.raises(LoadFailed), world.guard():
            pytest.fail("it began without a model")
