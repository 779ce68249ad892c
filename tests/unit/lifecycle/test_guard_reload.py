"""A reload replaces the model, and one that fails changes nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lifecycle.world import TIMEOUT, Loader, World, number, outcome, until

from modelguard import Backoff, Loading, ModelGuard
from modelguard.errors import LoadFailed, WouldDeadlock
from modelguard.runtime.host_lock import HostLock
from modelguard.telemetry import LoadDiscarded, LoadErrored, LoadFinished, SwapChosen


@pytest.fixture
def guard(world: World) -> ModelGuard[Any]:
    """A guard whose first generation serves."""
    made = world.guard(loading=Loading(backoff=Backoff("8s")))
    made.load()
    return made


class TestReload:
    def test_of_a_guard_that_never_loaded(self, world: World) -> None:
        """It is then the first load, and replaces nothing."""
        guard = world.guard()
        guard.reload()
        assert (1, 0) == (guard.status().generation, guard.status().reloads)

    def test_does_not_wait_for_the_backoff(self, world: World, guard: ModelGuard[Any]) -> None:
        """An explicit request for a reload starts an attempt at once."""
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.reload()
        world.loader.fails = False
        guard.reload()
        assert (2, "ready") == (guard.status().generation, guard.status().state)

    def test_reads_the_memory_once_before_its_load(self, world: World) -> None:
        """A reading takes CPU time that calls want: of an isolated function, 50 ms for two workers of 500 MB."""
        readings: list[int] = []
        seen: list[int] = []

        def private() -> int:
            readings.append(world.memory)
            return world.memory

        def load() -> Any:
            seen.append(len(readings))
            return world.loader()

        guard = world.guard(load, replace(world.system, private=private))
        guard.load()
        readings.clear()
        guard.reload()
        assert [1, 1] == seen

    def test_is_refused_where_it_would_wait_for_itself(self, guard: ModelGuard[Any]) -> None:
        """Inside a call on the same guard, or on a running loop, waiting raises, with what to do instead."""

        async def on_the_loop() -> None:
            guard.reload()

        async def inside() -> None:
            async with guard.lease():
                await guard.areload()

        with guard.lease(), pytest.raises(WouldDeadlock, match=r"reload\(wait=False\)"):
            guard.reload()
        with pytest.raises(WouldDeadlock, match=r"await guard.areload\(\)"):
            asyncio.run(on_the_loop())
        with pytest.raises(WouldDeadlock, match="inside a call on the same guard"):
            asyncio.run(inside())
        assert 1 == number(guard)

    def test_may_be_ordered_inside_a_call(self, world: World, guard: ModelGuard[Any]) -> None:
        """Without waiting for it, a call may request the reload of the model that it runs on."""
        with guard.lease() as model:
            guard.reload(wait=False)
            assert (1, 1) == (model.number, number(guard))
        world.join()
        assert 2 == number(guard)


class TestAFailedReload:
    def test_is_retried_with_backoff(self, world: World, guard: ModelGuard[Any]) -> None:
        """It is tried again when its backoff has passed, not before, and then the guard is ready again."""
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.reload()
        world.tick(3.9)
        assert not guard.check()
        world.tick(0.2)
        assert guard.check()
        world.join()
        assert (2, 8.0) == (guard.status().failures, world.last(LoadErrored).retry_after)
        world.loader.fails = False
        world.tick(8)
        assert guard.check()
        world.join()
        assert ("ready", 2, 0) == (guard.status().state, guard.status().generation, guard.status().failures)

    def test_may_be_followed_by_another_at_once(self, world: World) -> None:
        """A request that follows a failure is not lost, however long the failed reload takes to finish."""
        wind_up = threading.Event()

        class Slow(HostLock):
            @contextmanager
            def held(self, **_how: Any) -> Iterator[str]:
                last = world.loader.fails
                yield "process"
                assert not last or wind_up.wait(TIMEOUT)

        object.__setattr__(world.system, "slot", Slow(Path))
        guard = world.guard()
        guard.load()
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            guard.reload()
        world.loader.fails = False
        guard.reload(timeout=TIMEOUT)
        wind_up.set()
        assert (2, "ready") == (guard.status().generation, guard.status().state)

    @pytest.mark.parametrize("swap", ["load_first", "auto"])
    def test_of_a_model_that_is_refused(self, world: World, swap: str) -> None:
        """A new model that ``validate`` rejects does not replace the old one."""
        guard = world.guard(swap=swap, validate=lambda model: model.number == 1)
        guard.load()
        with pytest.raises(LoadFailed, match="validate returned False"):
            guard.reload()
        assert ("degraded", 1) == (guard.status().state, number(guard))


class TestRequestsDuringALoad:
    def test_make_it_stale(self, world: World, guard: ModelGuard[Any]) -> None:
        """A newer request discards a model that began to load before it, and a new one is loaded."""
        world.loader.hold()
        first = world.spawn(guard.reload)
        world.loader.reached()
        second = world.spawn(guard.reload)
        until(lambda: len(guard.engine.state.waiting) == 2)
        world.loader.open.set()
        assert [None, None] == [outcome(first), outcome(second)]
        world.join()
        assert ["stale"] == [event.cause for event in world.seen(LoadDiscarded)]
        assert (3, 2, 1) == (number(guard), guard.status().generation, guard.status().reloads)

    def test_cannot_keep_a_guard_from_ever_being_reloaded(self, world: World) -> None:
        """A model is discarded once; the next one serves, and requests that came meanwhile get another load."""

        def load() -> Any:
            model = world.loader()
            if model.number in {2, 3, 4}:  # each of these loads is overtaken by the next request
                guard.reload(wait=False)
            return model

        guard = world.guard(load)
        guard.load()
        guard.reload()
        world.join()
        outcomes = [type(event) for event in world.events if isinstance(event, LoadFinished | LoadDiscarded)]
        assert [LoadFinished, LoadDiscarded, LoadFinished, LoadDiscarded, LoadFinished] == outcomes
        assert (5, "ready") == (number(guard), guard.status().state)

    def test_of_the_first_model_wait_for_a_second(self, world: World) -> None:
        """The first model is not discarded: it serves, and a request that came during its load gets another."""
        guard = world.guard()
        world.loader.hold()
        guard.reload(wait=False)
        world.loader.reached()
        reload = world.spawn(guard.reload)
        until(lambda: len(guard.engine.state.waiting) == 2)
        world.loader.open.set()
        assert outcome(reload) is None
        world.join()
        assert [1, 2] == [event.generation for event in world.seen(LoadFinished)]
        assert 2 == number(guard)

    def test_have_a_load_of_their_own(self, world: World, guard: ModelGuard[Any]) -> None:
        """A reload that was requested after a load had begun is not answered by that load's failure."""
        world.loader.hold()
        world.loader.fails = True
        calls = [world.spawn(guard.reload)]
        world.loader.reached()
        calls.append(world.spawn(guard.reload))
        until(lambda: len(guard.engine.state.waiting) == 2)
        world.loader.open.set()
        assert [LoadFailed, LoadFailed] == [type(call.exception(TIMEOUT)) for call in calls]
        world.join()
        assert 3 == world.loader.calls

    def test_succeed_after_a_failure_that_began_before(self, world: World, guard: ModelGuard[Any]) -> None:
        """The later request gets the model of its own load, and the earlier one the failure."""
        world.loader.hold()
        world.loader.fails = True
        first = world.spawn(guard.reload)
        world.loader.reached()
        world.loader.running.clear()
        second = world.spawn(guard.reload)
        until(lambda: len(guard.engine.state.waiting) == 2)
        world.loader.recovers_after_this = True
        world.loader.open.set()
        assert isinstance(first.exception(TIMEOUT), LoadFailed)
        assert second.result(TIMEOUT) is None
        assert ("ready", 3) == (guard.status().state, number(guard))


def test_two_guards_keep_out_of_each_other_s_way(world: World) -> None:
    """One guard's failing reload does not affect other guards."""
    failing, sound = Loader(world), Loader(world)
    first, second = world.guard(failing, name="first"), world.guard(sound, name="second")
    first.load()
    second.load()
    failing.fails = True
    with pytest.raises(LoadFailed):
        first.reload()
    second.reload()
    assert ("degraded", "ready") == (first.status().state, second.status().state)
    assert ["first", "second"] == [event.guard for event in world.seen(SwapChosen)]
