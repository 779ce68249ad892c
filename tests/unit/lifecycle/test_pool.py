"""Many models, one memory budget."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, TIMEOUT, Model, World, outcome, until

from modelguard import Backoff, ModelPool
from modelguard.errors import (
    GuardClosed,
    InvalidOption,
    LoadFailed,
    ModelTooLarge,
    Overloaded,
    UnhashableKey,
    WouldDeadlock,
)
from modelguard.lifecycle.shelf import Entry
from modelguard.telemetry import GenerationReleased, LoadFinished

CROWD = 16


class Sizes:
    """A loader whose models are as large as told; counts its loads."""

    def __init__(self, world: World, **sizes: int) -> None:
        self._world = world
        self.sizes = sizes
        self.loads: list[Any] = []

    def __call__(self, key: Any) -> Model:
        self.loads.append(key)
        self._world.model_size = self.sizes[key] * MB
        return Model(self._world, len(self.loads), key)


def use(pool: ModelPool[Any, Any], *keys: Hashable) -> list[Any]:
    """Use the models one after the other; their keys as the models know them."""
    used = []
    for key in keys:
        with pool.lease(key) as model:
            used.append(model.key)
    return used


def loaded(pool: ModelPool[Any, Any]) -> dict[Any, int]:
    """Each loaded model and its size in MB."""
    return {key: size // MB for key, size in pool.status().models.items()}


@contextmanager
def in_use(world: World, pool: ModelPool[Any, Any], *keys: Hashable) -> Iterator[None]:
    """Have other threads use models for the length of a block."""
    done = threading.Event()

    def hold(key: Hashable, held: threading.Event) -> None:
        with pool.lease(key):
            held.set()
            assert done.wait(TIMEOUT)

    holders = []
    for key in keys:
        held = threading.Event()
        holders.append(world.spawn(hold, key, held))
        assert held.wait(TIMEOUT)
    try:
        yield
    finally:
        done.set()
        for holder in holders:
            outcome(holder)


class TestModels:
    def test_are_loaded_by_key_on_first_use(self, world: World) -> None:
        """Each key's model is loaded when it is first asked for, once, and lent from then on."""
        pool = world.pool(Sizes(world, a=10, b=20))
        assert {} == loaded(pool)
        assert ["a", "b", "a", "b"] == use(pool, "a", "b", "a", "b")
        assert ({"a": 10, "b": 20}, 30 * MB, 2) == (loaded(pool), pool.status().used, pool.status().loads)

    def test_are_loaded_in_one_flight_per_key(self, world: World) -> None:
        """Sixteen threads that ask for one key at once share one load."""
        pool = world.pool()
        world.loader.hold()
        calls = [world.spawn(use, pool, "a") for _ in range(CROWD)]
        world.loader.reached()
        world.loader.open.set()
        assert [["a"]] * CROWD == [outcome(call) for call in calls]
        assert (1, 1) == (world.loader.calls, pool.status().loads)

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
        """A model that turns out a little larger than before drives nobody out who fits beside it."""
        sizes = Sizes(world, idle=40, grows=30)
        pool = world.pool(sizes, ttl="1h")
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
            until(lambda: bool(pool._changed._waiters))  # type: ignore[attr-defined]
            assert {"a": 60} == loaded(pool)
        assert ["b"] == outcome(waiting)
        assert {"b": 60} == loaded(pool)

    def test_is_found_out_after_the_load_of_an_unknown_model(self, world: World) -> None:
        """A model that turns out larger than the room that was made is released again, and then waits for room."""
        pool = world.pool(Sizes(world, small=10, large=95), wait_timeout=0)
        with pool.lease("small"):
            with pytest.raises(Overloaded, match="no room for key 'large'"):
                use(pool, "large")
            assert ({"small": 10}, 110 * MB) == (loaded(pool), world.memory)
        assert (["large"], {"large": 95}) == (use(pool, "large"), loaded(pool))

    def test_loses_no_model_that_is_in_use(self, world: World) -> None:
        """A model that does not fit beside those in use leaves them in the pool, whichever was used last."""
        sizes = Sizes(world, a=60, grows=30)
        begun, go_on = threading.Event(), threading.Event()

        def hold(_model: object) -> None:
            if sizes.sizes["grows"] == 50:
                begun.set()
                assert go_on.wait(TIMEOUT)

        pool = world.pool(sizes, validate=hold, ttl="1h", wait_timeout=0)
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
        """A model that alone exceeds the budget is released and refused with both figures and the fix."""
        pool = world.pool(Sizes(world, huge=150, a=10))
        with pytest.raises(ModelTooLarge, match="takes 150 MB and the pool's budget is 100 MB; raise max_memory") as e:
            use(pool, "huge")
        assert ("'huge'", 150 * MB, 100 * MB) == (e.value.key, e.value.model_bytes, e.value.max_memory)
        assert ({}, 100 * MB) == (loaded(pool), world.memory)

    def test_is_not_loaded_again(self, world: World) -> None:
        """Its size is known from then on, so it is refused without another load; others are served."""
        sizes = Sizes(world, huge=150, a=10)
        pool = world.pool(sizes)
        for _ in range(3):
            with pytest.raises(ModelTooLarge):
                use(pool, "huge")
        assert (["a"], ["huge", "a"]) == (use(pool, "a"), sizes.loads)

    def test_is_told_to_all_who_waited(self, world: World) -> None:
        """Each thread that waited for it gets an error of its own."""
        world.model_size = 150 * MB
        pool = world.pool()
        world.loader.hold()
        calls = [world.spawn(use, pool, "huge") for _ in range(4)]
        world.loader.reached()
        until(lambda: len(pool._changed._waiters) == 3)  # type: ignore[attr-defined]
        world.loader.open.set()
        errors = [call.exception(TIMEOUT) for call in calls]
        assert ({ModelTooLarge}, 4) == ({type(error) for error in errors}, len({id(error) for error in errors}))


class TestAFailedLoad:
    def test_is_told_at_once_until_its_backoff_has_passed(self, world: World) -> None:
        """A key whose load failed fails at once until its backoff has passed; then it is tried again."""
        pool = world.pool(backoff=Backoff("8s"))
        world.loader.fails = True
        for attempt in (1, 1, 1):
            with pytest.raises(LoadFailed, match="no weights") as failure:
                use(pool, "a")
            assert attempt == failure.value.attempt
        assert 1 == world.loader.calls
        world.tick(failure.value.retry_after)
        world.loader.fails = False
        assert ["a"] == use(pool, "a")

    def test_is_told_to_all_who_waited(self, world: World) -> None:
        """Everyone who waited for the load gets an error of their own."""
        pool = world.pool()
        world.loader.fails = True
        world.loader.hold()
        calls = [world.spawn(use, pool, "a") for _ in range(4)]
        world.loader.reached()
        until(lambda: len(pool._changed._waiters) == 3)  # type: ignore[attr-defined]
        world.loader.open.set()
        errors = [call.exception(TIMEOUT) for call in calls]
        assert ({LoadFailed}, 4) == ({type(error) for error in errors}, len({id(error) for error in errors}))

    def test_is_no_other_key_s_business(self, world: World) -> None:
        """A model that cannot be loaded takes no room, and others are served."""
        pool = world.pool()
        world.loader.fails = True
        with pytest.raises(LoadFailed):
            use(pool, "a")
        world.loader.fails = False
        assert (["b"], ["b"]) == (use(pool, "b"), list(loaded(pool)))

    def test_by_interrupt_is_not_taken_for_the_model_s(self, world: World) -> None:
        """Who waited for a load that was interrupted is told to try again; the interrupt goes where it belongs."""
        pool = world.pool()

        def interrupt(_work: object, _name: str) -> None:
            raise KeyboardInterrupt

        object.__setattr__(world.runtime, "start_thread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            use(pool, "a")
        object.__setattr__(world.runtime, "start_thread", world.start)
        assert ["a"] == use(pool, "a")


class TestTTL:
    def test_an_old_model_is_loaded_anew(self, world: World) -> None:
        """A model older than ``ttl`` is released and loaded again when it is next asked for."""
        pool = world.pool(ttl="1h")
        use(pool, "a")
        world.tick(3599)
        use(pool, "a")
        assert 1 == world.loader.calls
        world.tick(1)
        use(pool, "a")
        assert (2, 1) == (world.loader.calls, pool.status().evictions)

    def test_an_old_model_in_use_is_not_lent_again(self, world: World) -> None:
        """While it is in use others wait for it to end, up to their deadline."""
        pool = world.pool(ttl="1h", wait_timeout=0)
        with in_use(world, pool, "a"):
            world.tick(3600)
            with pytest.raises(Overloaded, match="the model of key 'a' is still being replaced"):
                use(pool, "a")
        assert (["a"], 2) == (use(pool, "a"), world.loader.calls)

    @pytest.mark.parametrize(("draw", "lives"), [(0.0, 99.9), (0.5, 94.9)])
    def test_is_jittered(self, world: World, draw: float, lives: float) -> None:
        """Each model's time is shortened by up to a tenth, at random, so that workers do not reload in step."""
        world.draw = draw
        pool = world.pool(ttl="100s")
        use(pool, "a")
        world.tick(lives)
        use(pool, "a")
        assert 1 == world.loader.calls
        world.tick(0.2)
        use(pool, "a")
        assert 2 == world.loader.calls


class TestClose:
    def test_releases_every_model(self, world: World) -> None:
        """After ``close()`` no model is in memory, and every use raises ``GuardClosed`` with the pool's name."""
        pool = world.pool(Sizes(world, a=10, b=20), name="voices")
        use(pool, "a", "b")
        pool.close()
        pool.close()
        assert (100 * MB, {}) == (world.memory, loaded(pool))
        with pytest.raises(GuardClosed) as refusal:
            use(pool, "a")
        assert "voices" == refusal.value.guard

    def test_waits_for_those_under_way(self, world: World) -> None:
        """Leases under way end on a whole model."""
        pool = world.pool()
        with pool.lease("a") as model:
            closing = world.spawn(pool.close)
            until(lambda: pool._closed)
            assert ["fine"] == model.words("fine")
        assert outcome(closing) is None

    def test_tells_who_waits(self, world: World) -> None:
        """Who waits for a load or for room when the pool is closed is told so, and nothing is left behind."""
        world.model_size = 60 * MB
        pool = world.pool()
        world.loader.hold()
        calls = [world.spawn(use, pool, key) for key in ("a", "a")]
        world.loader.reached()
        until(lambda: len(pool._changed._waiters) == 1)  # type: ignore[attr-defined]
        pool.close()
        assert [GuardClosed, GuardClosed] == [type(call.exception(TIMEOUT)) for call in calls]
        world.end()
        assert 100 * MB == world.memory

    def test_inside_a_lease_is_refused(self, world: World) -> None:
        """A pool cannot be closed inside one of its leases: that would wait for the lease. Nothing is closed then."""
        pool = world.pool()
        use(pool, "b")
        with pool.lease("a"), pytest.raises(WouldDeadlock, match="close"):
            pool.close()
        assert (["a", "b"], ["a", "b"]) == (sorted(loaded(pool)), use(pool, "a", "b"))


class TestLease:
    @pytest.mark.parametrize("key", [[], {}, {1}, ({},)], ids=repr)
    def test_of_an_unhashable_key_is_refused_at_once(self, world: World, key: Any) -> None:
        """A key that cannot be hashed is refused where the lease is asked for, with what to use instead."""
        with pytest.raises(UnhashableKey, match="cannot be hashed; use a string, a number or a tuple") as refusal:
            world.pool().lease(key)
        assert repr(key) == refusal.value.key
        assert isinstance(refusal.value, TypeError)

    def test_serves_once(self, world: World) -> None:
        """A lease that has been used is refused, with what to do instead."""
        pool = world.pool()
        lease = pool.lease("a")
        with lease:
            pass
        with pytest.raises(RuntimeError, match=r"serves once; call lease\(key\) for another"):
            lease.__enter__()
        assert 0 == pool.status().in_flight

    def test_is_given_back_however_its_block_ends(self, world: World) -> None:
        """A block that raises gives its lease back."""
        pool = world.pool()
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error), pool.lease("a"):
                raise error
        assert 0 == pool.status().in_flight

    def test_whose_entry_failed_has_nothing_to_give_back(self, world: World) -> None:
        """Leaving a lease that was never entered does nothing."""
        pool = world.pool()
        world.loader.fails = True
        lease = pool.lease("a")
        with pytest.raises(LoadFailed):
            lease.__enter__()
        lease.__exit__(None, None, None)
        assert 0 == pool.status().in_flight

    @pytest.mark.parametrize("timeout", [-1, "soon"])
    def test_deadlines_that_cannot_be_meant_are_refused(self, world: World, timeout: Any) -> None:
        """A deadline is a duration, and may be zero."""
        with pytest.raises(InvalidOption):
            world.pool().lease("a", timeout)


class TestInAForkedChild:
    def test_models_are_carried_over(self, world: World) -> None:
        """What was loaded serves in the child; what was being loaded, by a thread that is not there, is forgotten."""
        pool = world.pool(Sizes(world, a=10, b=10))
        use(pool, "a")
        pool._models["a"].pins = 3
        pool._models["b"] = Entry(10 * MB)
        pool._before_fork()
        pool._after_fork_in_child()
        assert ({"a": 10}, 10 * MB, ["a", "b"]) == (loaded(pool), pool.status().used, use(pool, "a", "b"))
        assert pool._models["a"].idle
