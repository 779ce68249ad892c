"""The end of a guard."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, World, number, outcome, until

from modelguard import Backoff, Loading, Uses, replicas, telemetry
from modelguard.errors import GuardClosed, LoadFailed
from modelguard.lifecycle.system import use
from modelguard.telemetry import GenerationAbandoned, GenerationReleased, LoadErrored, LoadFinished


@pytest.mark.parametrize("recycle", ["recycle_in_children", "recycle_here"])
def test_a_closed_guard_asks_for_no_process(world: World, recycle: str) -> None:
    """A server's hook that comes after ``close()`` is refused, as every other use is."""
    guard = world.guard()
    guard.close()
    with pytest.raises(GuardClosed, match="'model' is closed; make a new one"):
        getattr(guard, recycle)(print)


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


def test_a_guard_that_is_reopened_while_its_last_load_ends_loads_again(world: World) -> None:
    """The thread of the first load still reports it: the callers of the reopened guard do not wait in vain."""
    guard = world.guard()
    begun, ending = threading.Event(), threading.Event()

    def report(event: telemetry.Event) -> None:
        if isinstance(event, LoadFinished):
            begun.set()
            ending.wait(TIMEOUT)

    remove = telemetry.add_hook(report)
    try:
        first = world.spawn(number, guard)
        assert begun.wait(TIMEOUT)
        guard.close()
        guard.engine.reopen()
        again = world.spawn(number, guard)
        until(lambda: len(guard.engine.state.waiting) == 1)
    finally:
        ending.set()
        remove()
    assert (2, 2) == (outcome(first), outcome(again))


def test_a_first_load_after_reopening_is_no_reload(world: World) -> None:
    """Nor is it one if it fails at first: it replaces nothing, and no call waits for a replacement."""
    seen: list[str] = []

    def load() -> Any:
        seen.append(guard.status().state)
        return world.loader()

    guard = world.guard(load, loading=Loading(backoff=Backoff(1, 1)))
    with guard:
        pass
    world.loader.fails = True
    guard.engine.reopen()
    with pytest.raises(LoadFailed):
        guard.load()
    world.loader.fails = False
    world.tick(1)
    guard.load()
    assert (0, ["loading"] * 3) == (guard.status().reloads, seen)


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


def test_a_longer_timeout_than_the_drain_timeout_counts(world: World) -> None:
    """The last chance of a shutdown is the caller's to give."""
    guard = world.guard(drain_timeout=0)
    with guard.lease():
        closing = world.spawn(guard.close, "1h")
        until(lambda: guard.status().state == "closed")
        assert not closing.done()
    outcome(closing)
    assert [] == world.seen(GenerationAbandoned)


def test_a_pool_and_replicas_share_the_timeout(world: World) -> None:
    """It bounds the wait for the calls on all their models together."""
    models = world.pool()
    with use(lambda: world.system):
        pair = replicas(world.guard(drain_timeout="1h"), 2)
    with models.lease("a"), models.lease("b"), pair.lease():
        outcome(world.spawn(models.close, "1ms"))
        outcome(world.spawn(pair.close, "1ms"))
        assert 3 == len(world.seen(GenerationAbandoned))


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
    with world.system.host_lock.held(sleep=world.tick, clock=lambda: world.now, cancelled=lambda: False):
        object.__setattr__(world.system, "sleep", lambda _seconds: guard.close())
        guard(lambda model: model.number)()
        world.join()
    assert (1, "closed") == (world.loader.calls, guard.status().state)


def test_a_load_after_it_is_no_reload(world: World) -> None:
    """It replaces nothing. A reload of the guard that is open again counts."""
    guard = world.guard()
    for _ in range(3):
        with guard:
            pass
    with guard:
        guard.reload()
        assert (5, 1) == (guard.status().generation, guard.status().reloads)


def test_nor_is_a_reload_with_which_it_begins_again(world: World) -> None:
    """``reload()`` on a guard that was closed and is open again has nothing to replace."""
    guard = world.guard()
    for _ in range(2):
        with guard:
            pass
    guard.engine.reopen()
    guard.reload()
    assert (3, 0) == (guard.status().generation, guard.status().reloads)


@pytest.mark.parametrize("swap", ["load_first", "drain_first"])
def test_a_reload_that_succeeds_at_last_is_one(world: World, swap: str) -> None:
    """It has replaced the old model, although an attempt has failed, and by ``drain_first`` none was left."""
    guard = world.guard(swap=swap)
    guard.load()
    world.loader.fails = True
    with pytest.raises(LoadFailed):
        guard.reload()
    world.loader.fails = False
    world.tick(60.0)
    guard.reload()
    assert (2, 1) == (guard.status().generation, guard.status().reloads)


@pytest.mark.parametrize(
    "unload", [lambda guard: guard.unload(), lambda guard: asyncio.run(guard.aunload())], ids=["plain", "async"]
)
def test_an_unload_ends_the_attempts_of_a_reload_that_has_left_no_model(world: World, unload: Any) -> None:
    """Nothing is loaded until the next use, which does not wait for the time of the next attempt."""
    guard = world.guard(swap="drain_first")
    guard.load()
    world.loader.fails = True
    with pytest.raises(LoadFailed):
        guard.reload()
    unload(guard)
    world.loader.fails = False
    status = guard.status()
    assert ("idle", 0) == (status.state, status.failures)
    with guard.lease() as model:
        assert model.words("fine")


def test_a_load_that_fails_after_it_announces_no_other(world: World) -> None:
    """The log says why it failed, and not when somebody would try again."""
    world.loader.fails = True
    world.loader.hold()
    guard = world.guard()
    loading = world.spawn(guard.load)
    world.loader.reached()
    guard.close()
    world.loader.open.set()
    assert GuardClosed is type(loading.exception(TIMEOUT))
    world.join()
    failed = world.last(LoadErrored)
    assert (None, "OSError: no weights") == (failed.retry_after, failed.error)


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


def test_a_retry_is_given_up(world: World) -> None:
    """A closed guard's policies are not asked any more, and it retries no load."""
    guard = world.guard()
    world.loader.fails = True
    with pytest.raises(LoadFailed):
        guard.load()
    guard.close()
    world.tick(3600)
    assert (False, 1) == (guard.check(), world.loader.calls)


class TestContextManager:
    def test_closes_when_the_block_fails(self, world: World) -> None:
        """The model is released however the block ends."""
        guard = world.guard()
        with pytest.raises(ValueError, match="port in use"), guard:
            raise ValueError("port in use")
        assert "closed" == guard.status().state
