"""``reload()``, ``unload()``, ``pause()`` and ``resume()`` of pools."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.lifecycle.pools import Sizes, in_use, loaded, use
from tests.unit.lifecycle.test_pool_idle import pass_time
from tests.unit.lifecycle.world import MB, World, outcome, until

from modelguard import TTL, Changed, Idle, telemetry
from modelguard.errors import WouldDeadlock
from modelguard.telemetry import Event, GenerationReleased, GuardPaused, GuardResumed, LoadStarted, UnloadStarted


class TestUnload:
    def test_releases_until_the_next_use(self, world: World) -> None:
        """All models, with their memory, when it returns; the next call loads."""
        pool = world.pool(Sizes(world, a=40, b=30))
        use(pool, "a", "b")
        pool.unload()
        status = pool.status()
        assert ({}, ("a", "b"), 2, 0, 100 * MB) == (
            status.models,
            status.idle,
            status.unloads,
            status.evictions,
            world.memory,
        )
        assert [("requested",)] * 2 == [tuple(map(str, event.reasons)) for event in world.seen(UnloadStarted)]
        assert (["a"], ("next use",)) == (use(pool, "a"), world.reasons(LoadStarted))

    def test_some_keys(self, world: World) -> None:
        """The others stay; a key without a model is none."""
        pool = world.pool(Sizes(world, a=40, b=30))
        use(pool, "a", "b")
        pool.unload("b", "c")
        assert ({"a": 40}, ("b",)) == (loaded(pool), pool.status().idle)

    def test_waits_for_the_calls_that_run(self, world: World) -> None:
        """Calls that come meanwhile get the next model."""
        pool = world.pool()
        with in_use(world, pool, "a"):
            unloading = world.spawn(pool.unload)
            until(lambda: pool._engine._models["a"].until_next_use is not None)
            caller = world.spawn(use, pool, "a")
            assert (1, False) == (world.loader.calls, unloading.done())
        outcome(unloading)
        assert (["a"], 2) == (outcome(caller), world.loader.calls)

    def test_waits_for_a_load_under_way(self, world: World) -> None:
        """And releases what it has loaded, after the call that needed it."""
        pool = world.pool()
        world.loader.hold()
        caller = world.spawn(use, pool, "a")
        world.loader.reached()
        unloading = world.spawn(pool.unload)
        until(lambda: pool._engine._models["a"].until_next_use is not None)
        world.loader.open.set()
        assert ["a"] == outcome(caller)
        outcome(unloading)
        assert ({}, 1) == (pool.status().models, world.loader.calls)

    def test_inside_a_lease_is_refused(self, world: World) -> None:
        """It would wait for its own end. Other keys may be unloaded there."""
        pool = world.pool()
        use(pool, "b")
        with pool.lease("a"):
            with pytest.raises(WouldDeadlock, match="unload"):
                pool.unload()
            pool.unload("b")
        assert ["a"] == list(pool.status().models)

    def test_by_a_loader_is_refused(self, world: World) -> None:
        """It would wait for its own end."""
        errors: list[BaseException] = []

        def load(key: str) -> Any:
            try:
                pool.unload()
            except WouldDeadlock as error:
                errors.append(error)
            return world.loader.load(key)

        pool = world.pool(load)
        assert (["a"], 1) == (use(pool, "a"), len(errors))

    @pytest.mark.parametrize("where", ["unload", "async unload", "hook"])
    def test_by_the_release_of_a_model_is_refused(self, world: World, where: str) -> None:
        """Its ``unload``, or a hook that hears of it, would wait for itself for ever."""
        told: list[str] = []

        def again(heard: object) -> None:
            if not isinstance(heard, Event) or isinstance(heard, GenerationReleased):
                with pytest.raises(WouldDeadlock) as refusal:
                    pool.unload()
                told.append(refusal.value.guard)

        async def async_again(_: object) -> None:
            with pytest.raises(WouldDeadlock) as refusal:
                await pool.aunload()
            told.append(refusal.value.guard)

        remove = telemetry.add_hook(again) if where == "hook" else lambda: None
        pool = world.pool(unload={"unload": again, "async unload": async_again, "hook": None}[where])
        use(pool, "a")
        outcome(world.spawn(pool.unload))
        remove()
        assert (["pool"], ["a"]) == (told, use(pool, "a"))

    def test_beside_calls_at_every_moment(self, world: World) -> None:
        """Each call has the model of its key, which is not unloaded meanwhile."""
        pool = world.pool(unload=lambda model: model.unload())

        def call(key: str) -> None:
            for _ in range(200):
                with pool.lease(key) as model:
                    assert ([key], key) == (model.words(key), model.key)

        calls = [world.spawn(call, key) for key in "abab"]
        while not all(one.done() for one in calls):
            pool.unload()
        for one in calls:
            outcome(one)
        pool.unload()
        assert {} == pool.status().models


class TestReload:
    def test_each_model_is_loaded_anew_at_its_next_use(self, world: World) -> None:
        """It returns at once; what nobody uses is released meanwhile."""
        pool = world.pool()
        use(pool, "a", "b")
        pool.reload()
        world.join()
        assert (2, ("a", "b"), 2) == (world.loader.calls, pool.status().idle, len(world.seen(GenerationReleased)))
        with pool.lease("a") as model:
            assert 3 == model.number

    def test_a_load_under_way_began_too_early(self, world: World) -> None:
        """Its caller gets that model; the next call one whose load begins after the request."""
        pool = world.pool()
        world.loader.hold()
        caller = world.spawn(use, pool, "a")
        world.loader.reached()
        pool.reload()
        world.loader.open.set()
        outcome(caller)
        with pool.lease("a") as model:
            assert 2 == model.number


class TestPause:
    def test_holds_back_age_sources_and_idleness(self, world: World) -> None:
        """What is due happens after ``resume()``."""
        value = [1]
        pool = world.pool(reload_on=TTL("20s") | Idle("10s") | Changed(lambda key: value[0]))
        use(pool, "a", "b")
        pool.pause()
        value[0] = 2
        pass_time(world, pool, 200)
        assert ([("a", 1), ("b", 2)], True) == ([number(pool, key) for key in "ab"], pool.status().paused)
        pool.resume()
        assert ([("a", 3)], False) == ([number(pool, "a")], pool.status().paused)
        pass_time(world, pool, 11)
        assert {"a", "b"} == set(pool.status().idle)

    def test_room_is_made_all_the_same(self, world: World) -> None:
        """A call asks for it, and no policy; also where steady traffic is on a model whose age is over."""
        pool = world.pool(Sizes(world, a=60, b=60), reload_on=TTL("5s"))
        use(pool, "a")
        pool.pause()
        world.tick(100)
        assert (["b"], {"b": 60}) == (use(pool, "b"), loaded(pool))

    def test_is_a_switch(self, world: World) -> None:
        """Twice is the same as once; events say when it begins and ends; it outlasts a reopening and a fork."""
        pool = world.pool()
        pool.pause()
        pool.pause()
        with pool:
            pool._engine.after_fork_in_child()
            assert pool.status().paused
        pool.resume()
        pool.resume()
        assert (["pool"], ["pool"]) == (
            [event.guard for event in world.seen(GuardPaused)],
            [event.guard for event in world.seen(GuardResumed)],
        )


def number(pool: Any, key: str) -> tuple[str, int]:
    """The key and the number of its model."""
    with pool.lease(key) as model:
        return model.key, model.number
