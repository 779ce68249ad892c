"""Many models, one memory budget."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.unit.lifecycle.pools import Sizes, in_use, loaded, use
from tests.unit.lifecycle.world import MB, TIMEOUT, Model, World, outcome, until

from modelguard import TTL, Backoff, Loading
from modelguard.errors import LoadFailed, ModelTooLarge, Overloaded
from modelguard.telemetry import GenerationReleased, LoadFinished

CROWD = 16


class TestModels:
    def test_are_loaded_by_key_on_first_use(self, world: World) -> None:
        """Each key's model is loaded once, at its first use, and shared from then on."""
        pool = world.pool(Sizes(world, a=10, b=20))
        assert {} == loaded(pool)
        assert ["a", "b", "a", "b"] == use(pool, "a", "b", "a", "b")
        assert ({"a": 10, "b": 20}, 30 * MB, 2) == (loaded(pool), pool.status().used, pool.status().loads)

    def test_may_be_made_by_an_async_loader(self, world: World) -> None:
        """The loader of a pool may be a coroutine function."""

        async def load(key: str) -> Model:
            return Model(world, 1, key)

        assert ["a"] == use(world.pool(load), "a")

    def test_are_proved_and_warmed_up(self, world: World) -> None:
        """``validate``, ``warmup`` and ``unload`` are called with each model, as a guard does."""
        steps: list[str] = []

        def note(step: str) -> Any:
            return lambda model: steps.append(f"{step} {model.key}")

        with world.pool(validate=note("validate"), warmup=note("warmup"), unload=note("unload")) as pool:
            use(pool, "a", "b")
        assert ["validate a", "warmup a", "validate b", "warmup b", "unload a", "unload b"] == steps

    def test_bear_their_key_in_events(self, world: World) -> None:
        """Events name the pool and the key."""
        use(world.pool(name="voices"), "anna")
        assert "voices['anna']" == world.last(LoadFinished).guard


class TestRoom:
    def test_is_made_by_releasing_the_least_recently_used(self, world: World) -> None:
        """When the budget is spent, the model that was not used for the longest time goes, and its memory with it."""
        pool = world.pool(Sizes(world, a=40, b=40, c=40))
        use(pool, "a", "b", "a", "c")
        assert ({"a": 40, "c": 40}, 1) == (loaded(pool), pool.status().evictions)
        assert (180 * MB, False) == (world.memory, world.last(GenerationReleased).alive)

    def test_is_made_before_the_load(self, world: World) -> None:
        """The models in memory never exceed the budget: room is made beforehand, by what is known of the sizes."""
        most: list[int] = []
        sizes = Sizes(world, a=40, b=40, c=40)
        pool = world.pool(sizes, validate=lambda _model: most.append(world.memory - 100 * MB))
        use(pool, *"abcabcabc")
        assert max(most) <= 100 * MB

    def test_is_made_for_what_is_known_of_the_model(self, world: World) -> None:
        """A model that was loaded before needs its own size; one that never was needs as much as the largest known."""
        pool = world.pool(Sizes(world, small=10, large=60, other=10))
        use(pool, "small", "large", "other")
        assert {"other": 10} == loaded(pool)
        use(pool, "small", "large")
        assert {"small": 10, "other": 10, "large": 60} == loaded(pool)

    def test_is_not_made_where_there_is_enough(self, world: World) -> None:
        """A model that turns out a little larger than before evicts no model that fits beside it."""
        sizes = Sizes(world, idle=40, grows=30)
        pool = world.pool(sizes, reload_on=TTL("1h"))
        use(pool, "grows")
        world.tick(3000)
        use(pool, "idle")
        world.tick(600)
        sizes.sizes["grows"] = 31
        use(pool, "grows")
        assert {"idle": 40, "grows": 31} == loaded(pool)

    def test_is_never_made_at_the_cost_of_a_model_in_use(self, world: World) -> None:
        """A leased model is never evicted: the next idle one goes, however recently it was used."""
        pool = world.pool(Sizes(world, a=40, b=40, c=40))
        use(pool, "a", "b")
        with pool.lease("a") as model:
            use(pool, "b", "c")
            assert ({"a": 40, "c": 40}, ["fine"]) == (loaded(pool), model.words("fine"))

    def test_is_bounded_in_models_too(self, world: World) -> None:
        """``max_models`` bounds their number, whatever their sizes."""
        pool = world.pool(Sizes(world, a=1, b=1, c=1), max_models=2)
        use(pool, "a", "b", "c")
        assert {"b": 1, "c": 1} == loaded(pool)


class TestNoRoom:
    @pytest.mark.parametrize("timeout", [0, "1ms"])
    def test_is_told_when_the_time_is_over(self, world: World, timeout: Any) -> None:
        """If the models in use leave no room until the deadline, ``Overloaded`` says which, and what takes the room."""
        pool = world.pool(Sizes(world, a=60, b=60), wait_timeout=timeout)
        with (
            pool.lease("a"),
            pytest.raises(Overloaded, match="no room for key 'b'; 1 models with 60 MB of 100 MB are in use") as full,
        ):
            use(pool, "b")
        assert 1.0 == full.value.retry_after
        assert ["b"] == use(pool, "b")

    def test_a_lease_may_have_a_deadline_of_its_own(self, world: World) -> None:
        """``lease(key, timeout)`` goes before ``wait_timeout``."""
        pool = world.pool(Sizes(world, a=60, b=60), wait_timeout="1h")
        with pool.lease("a"), pytest.raises(Overloaded), pool.lease("b", timeout=0):
            pass

    def test_is_waited_for(self, world: World) -> None:
        """Before the deadline a lease gets its model as soon as another one ends."""
        pool = world.pool(Sizes(world, a=60, b=60), wait_timeout=TIMEOUT)
        with pool.lease("a"):
            waiting = world.spawn(use, pool, "b")
            until(lambda: bool(pool._engine.line))
            assert {"a": 60} == loaded(pool)
        assert ["b"] == outcome(waiting)
        assert {"b": 60} == loaded(pool)

    def test_is_made_at_the_cost_of_steady_traffic(self, world: World) -> None:
        """For a key that waited a while, the least used model gets no new calls, except nested ones."""
        pool = world.pool(Sizes(world, a=60, b=60))
        with pool.lease("a"):
            rare = world.spawn(use, pool, "b")
            until(lambda: len(pool._engine.line) == 1)
            assert ["a"] == outcome(world.spawn(use, pool, "a"))  # a newcomer is served meanwhile
            world.tick(1)
            until(lambda: pool._engine._models["a"].overdue(world.now, paused=False) >= 0)
            with pool.lease("a") as inner:  # this one must not wait for its own end
                assert "a" == inner.key
            with pytest.raises(Overloaded, match="still being replaced"):
                outcome(world.spawn(lambda: pool.lease("a", timeout=0).__enter__()))
        assert ["b"] == outcome(rare)

    def test_is_given_in_order(self, world: World) -> None:
        """The first waiter is served first, even if a later key would fit earlier."""
        pool = world.pool(Sizes(world, a=60, b=60, c=30))
        use(pool, "b", "c", "a")
        with pool.lease("a"):
            first = world.spawn(use, pool, "b")
            until(lambda: len(pool._engine.line) == 1)
            with pytest.raises(Overloaded, match="no room for key 'c'"):
                outcome(world.spawn(lambda: pool.lease("c", timeout=0).__enter__()))
        assert ["b"] == outcome(first)
        assert 0 == len(pool._engine.line)

    def test_is_found_out_after_the_load_of_an_unknown_model(self, world: World) -> None:
        """A model that turns out larger than the room that was made is released again, and then waits for room."""
        pool = world.pool(Sizes(world, small=10, large=95), wait_timeout=0)
        with pool.lease("small"):
            with pytest.raises(Overloaded, match="no room for key 'large'"):
                use(pool, "large")
            assert ({"small": 10}, 110 * MB) == (loaded(pool), world.memory)
        assert (["large"], {"large": 95}) == (use(pool, "large"), loaded(pool))

    def test_is_found_out_while_others_wait_for_the_same_model(self, world: World) -> None:
        """They look for room themselves, and do not wait for a model that has left the pool."""
        pool = world.pool(Sizes(world, small=10, large=95), wait_timeout=TIMEOUT)
        with pool.lease("small"):
            waiting = [world.spawn(use, pool, "large") for _ in range(3)]
            until(lambda: len(pool._engine.line) == 3)
        assert [["large"]] * 3 == [outcome(one) for one in waiting]

    def test_loses_no_model_that_is_in_use(self, world: World) -> None:
        """A model that does not fit beside those in use leaves them in the pool, whichever was used last."""
        sizes = Sizes(world, a=60, grows=30)
        begun, go_on = threading.Event(), threading.Event()

        def hold(_model: object) -> None:
            if sizes.sizes["grows"] == 50:
                begun.set()
                assert go_on.wait(TIMEOUT)

        pool = world.pool(sizes, validate=hold, reload_on=TTL("1h"), wait_timeout=0)
        use(pool, "grows")
        world.tick(3000)
        use(pool, "a")
        world.tick(600)
        sizes.sizes["grows"] = 50
        late = world.spawn(use, pool, "grows")
        assert begun.wait(TIMEOUT)
        with in_use(world, pool, "a"):
            go_on.set()
            assert Overloaded is type(late.exception(TIMEOUT))
            assert {"a": 60} == loaded(pool)
        assert 1 == sizes.loads.count("a")


class TestAModelTooLarge:
    def test_is_refused_by_name(self, world: World) -> None:
        """A model that alone exceeds the budget is released and rejected with both figures and the fix."""
        pool = world.pool(Sizes(world, huge=150, a=10))
        with pytest.raises(ModelTooLarge, match="takes 150 MB and the pool's budget is 100 MB; raise max_memory") as e:
            use(pool, "huge")
        assert ("'huge'", 150 * MB, 100 * MB) == (e.value.key, e.value.model_bytes, e.value.max_memory)
        assert ({}, 100 * MB) == (loaded(pool), world.memory)

    def test_is_not_loaded_again(self, world: World) -> None:
        """Its size is known from then on, so it is rejected without another load; others are served."""
        sizes = Sizes(world, huge=150, a=10)
        pool = world.pool(sizes)
        for _ in range(3):
            with pytest.raises(ModelTooLarge):
                use(pool, "huge")
        assert (["a"], ["huge", "a"]) == (use(pool, "a"), sizes.loads)

    def test_is_told_to_all_who_waited(self, world: World) -> None:
        """Each thread that waited for it gets its own error."""
        world.model_size = 150 * MB
        pool = world.pool()
        world.loader.hold()
        calls = [world.spawn(use, pool, "huge") for _ in range(4)]
        world.loader.reached()
        until(lambda: len(pool._engine.line) == 3)
        world.loader.open.set()
        errors = [call.exception(TIMEOUT) for call in calls]
        assert ({ModelTooLarge}, 4) == ({type(error) for error in errors}, len({id(error) for error in errors}))


class TestAFailedLoad:
    def test_is_told_at_once_until_its_backoff_has_passed(self, world: World) -> None:
        """A key whose load failed fails at once until its backoff has passed; then it is tried again."""
        pool = world.pool(loading=Loading(backoff=Backoff("8s")))
        world.loader.fails = True
        for attempt in (1, 1, 1):
            with pytest.raises(LoadFailed, match="no weights") as failure:
                use(pool, "a")
            assert attempt == failure.value.attempt
        assert 1 == world.loader.calls
        world.tick(failure.value.retry_after)
        world.loader.fails = False
        assert ["a"] == use(pool, "a")

    def test_is_no_other_key_s_business(self, world: World) -> None:
        """A model that cannot be loaded takes no room, and others are served."""
        pool = world.pool()
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            use(pool, "a")
        world.loader.fails = False
        assert (["b"], ["b"]) == (use(pool, "b"), list(loaded(pool)))

    def test_by_interrupt_is_not_taken_for_the_model_s(self, world: World) -> None:
        """An interrupt reaches the caller whose load it stopped, and the next call loads again."""
        pool = world.pool()

        def interrupt(_work: object, _name: str) -> None:
            raise KeyboardInterrupt

        object.__setattr__(world.system, "start_thread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            use(pool, "a")
        object.__setattr__(world.system, "start_thread", world.start)
        assert ["a"] == use(pool, "a")
