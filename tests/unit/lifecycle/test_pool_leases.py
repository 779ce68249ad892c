"""A pool's leases, and the ends of its models."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any

import pytest
from tests.unit.interrupts import interrupted_everywhere, traces_instructions
from tests.unit.lifecycle.pools import Sizes, in_use, loaded, use
from tests.unit.lifecycle.world import MB, TIMEOUT, Model, World, outcome, until
from tests.unit.serving.gated import Incomparable, OnlyWithItself

from modelguard import TTL, ModelPool, pool
from modelguard.errors import GuardClosed, InvalidOption, LoadFailed, Overloaded, UnhashableKey, WouldDeadlock
from modelguard.lifecycle._pool_models import PooledModel


class TestTTL:
    def test_an_old_model_is_loaded_anew(self, world: World) -> None:
        """A model older than ``ttl`` is released and loaded again when it is next asked for."""
        pool = world.pool(reload_on=TTL("1h"))
        use(pool, "a")
        world.tick(3599)
        use(pool, "a")
        assert 1 == world.loader.calls
        world.tick(1)
        use(pool, "a")
        assert (2, 1) == (world.loader.calls, pool.status().evictions)

    def test_an_old_model_in_use_is_not_lent_again(self, world: World) -> None:
        """While it is in use others wait for it to end, up to their deadline."""
        pool = world.pool(reload_on=TTL("1h"), wait_timeout=0)
        with in_use(world, pool, "a"):
            world.tick(3600)
            with pytest.raises(Overloaded, match="the model of key 'a' is still being replaced"):
                use(pool, "a")
        assert (["a"], 2) == (use(pool, "a"), world.loader.calls)

    def test_an_old_model_is_lent_to_those_inside(self, world: World) -> None:
        """A call that is on an old model already may use it again: it would wait for itself otherwise."""
        pool = world.pool(reload_on=TTL("1h"), wait_timeout=0)
        with pool.lease("a") as outer:
            world.tick(3600)
            with pool.lease("a") as inner:
                assert inner is outer
        assert (["a"], 2) == (use(pool, "a"), world.loader.calls)

    @pytest.mark.parametrize(("draw", "lives"), [(0.0, 99.9), (0.5, 94.9)])
    def test_is_jittered(self, world: World, draw: float, lives: float) -> None:
        """Each model's time is shortened by up to a tenth, at random, so that workers do not reload together."""
        world.draw = draw
        pool = world.pool(reload_on=TTL("100s"))
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
            until(lambda: pool._engine.closed)
            assert ["fine"] == model.words("fine")
        assert outcome(closing) is None

    def test_tells_who_waits(self, world: World) -> None:
        """Callers that wait for a load or for room when the pool is closed get an error, and nothing is left behind."""
        world.model_size = 60 * MB
        pool = world.pool()
        world.loader.hold()
        calls = [world.spawn(use, pool, key) for key in ("a", "a")]
        world.loader.reached()
        until(lambda: len(pool._engine.line) == 1)
        pool.close()
        assert [GuardClosed, GuardClosed] == [type(call.exception(TIMEOUT)) for call in calls]
        world.end()
        assert 100 * MB == world.memory

    def test_on_a_running_loop_is_refused(self, world: World) -> None:
        """``close()`` would block an event loop: the error says what to write there."""
        pool = world.pool()

        async def main() -> None:
            pool.close()

        with pytest.raises(WouldDeadlock, match=r"await pool.aclose\(\)"):
            asyncio.run(main())
        assert ["a"] == use(pool, "a")

    def test_inside_a_lease_is_refused(self, world: World) -> None:
        """A pool cannot be closed inside one of its leases: that would wait for the lease. Nothing is closed then."""
        pool = world.pool()
        use(pool, "b")
        with pool.lease("a"), pytest.raises(WouldDeadlock, match="close"):
            pool.close()
        assert (["a", "b"], ["a", "b"]) == (sorted(loaded(pool)), use(pool, "a", "b"))

    def test_counts_down_the_calls_that_outlast_it(self, world: World) -> None:
        """They keep their models; of the pool that is opened again they are part as well."""
        pool = world.pool()
        with pool.lease("a"):
            with pool.lease("b"):
                outcome(world.spawn(pool.close, 0))
                assert (2, {}) == (pool.status().in_flight, pool.status().models)
            with pool:
                assert 1 == pool.status().in_flight
        world.join()
        assert 0 == pool.status().in_flight

    def test_a_call_inside_one_that_outlasts_it_runs_on_the_same_model(self, world: World) -> None:
        """It is neither refused nor, in the pool that is opened again, given another model."""
        pool = world.pool()
        with pool.lease("a") as model:
            outcome(world.spawn(pool.close, 0))
            with pool.lease("a") as inner:
                assert model is inner
            with pytest.raises(GuardClosed), pool.lease("b"):
                pass
            with pool, pool.lease("a") as inner:
                assert model is inner

    def test_a_warm_up_that_outlasts_it_runs_on_its_own_model(self, world: World) -> None:
        """Not on that of the pool that is opened again."""
        warming, go_on, ran_on = threading.Event(), threading.Event(), []

        def warm_up(model: Model) -> None:
            warming.set()
            assert go_on.wait(TIMEOUT)
            with pool.lease("a") as inner:
                ran_on.append(inner is model)

        pool = world.pool(warmup=warm_up)
        loading = world.spawn(use, pool, "a")
        assert warming.wait(TIMEOUT)
        pool.close()
        with pool:
            go_on.set()
            world.join()
        assert [True] == ran_on
        assert isinstance(loading.exception(TIMEOUT), GuardClosed)


@dataclass(frozen=True, repr=False)
class Nameless:
    number: int

    def __repr__(self) -> str:
        raise LookupError("no name")


class TestLease:
    @pytest.mark.parametrize("key", [[], {}, {1}, ({},)], ids=repr)
    def test_of_an_unhashable_key_is_refused_at_once(self, world: World, key: Any) -> None:
        """A key that cannot be hashed is rejected when the lease is requested, with what to use instead."""
        with pytest.raises(UnhashableKey, match="cannot be hashed; use a string, a number or a tuple") as refusal:
            world.pool().lease(key)
        assert repr(key) == refusal.value.key
        assert isinstance(refusal.value, TypeError)

    def test_of_a_key_that_cannot_be_compared_is_refused(self, world: World) -> None:
        """By whatever it would be used, at once, and with what it has raised."""
        pool = world.pool()

        @pool(key="key")
        def used(model: Any, key: object) -> object:
            return model.number

        for use_it in (pool.lease, used, pool.reload, pool.unload):
            with pytest.raises(UnhashableKey, match=r"compared \(ValueError: neither true nor false\)"):
                use_it(Incomparable())
        with pytest.raises(UnhashableKey, match="cannot be hashed"):
            pool.reload(["a"])
        assert 0 == world.loader.calls

    def test_of_a_key_that_cannot_be_compared_with_others_is_refused(self, world: World) -> None:
        """The other one is not affected."""
        pool, key = world.pool(), OnlyWithItself()
        for _ in range(2):
            with pool.lease(key) as model:
                assert 1 == model.number
        with (
            pytest.raises(UnhashableKey, match=r"compared \(RuntimeError: another one\)"),
            pool.lease(OnlyWithItself()),
        ):
            pass

    @pytest.mark.parametrize("kind", [Nameless, lambda number: 10 ** (5000 + number)], ids=["raises", "too long"])
    def test_of_a_key_that_cannot_be_written_is_one_like_others(self, world: World, kind: Any) -> None:
        """Its model is loaded, and gives way to that of the next key."""
        pool = world.pool(max_models=1)
        for number in (1, 1, 2):
            with pool.lease(kind(number)) as model:
                assert ["fine"] == model.words("fine")
        assert ["a"] == use(pool, "a")
        assert ["a"] == list(loaded(pool))

    def test_serves_once(self, world: World) -> None:
        """A lease cannot be used twice; the error says what to do instead."""
        pool = world.pool()
        lease = pool.lease("a")
        with lease:
            pass
        with pytest.raises(RuntimeError, match=r"can be used once; call lease\(key\) again for another"):
            lease.__enter__()
        assert 0 == pool.status().in_flight

    def test_that_was_refused_may_be_tried_again(self, world: World) -> None:
        """What got no room has not been used, as with a guard's lease that got no model."""
        pool = world.pool(Sizes(world, a=60, b=60))
        lease = pool.lease("b", timeout=0)
        with pool.lease("a"), pytest.raises(Overloaded):
            lease.__enter__()
        with lease as model:
            assert "b" == model.key

    def test_is_given_back_however_its_block_ends(self, world: World) -> None:
        """A block that raises returns its lease."""
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
        pool._engine._models["a"].pins = 3
        pool._engine._models["b"] = PooledModel(10 * MB)
        pool._engine.before_fork()
        pool._engine.after_fork_in_child()
        assert ({"a": 10}, 10 * MB, ["a", "b"]) == (loaded(pool), pool.status().used, use(pool, "a", "b"))
        assert pool._engine._models["a"].unused


@traces_instructions
def test_an_exception_of_a_signal_handler_costs_no_key_its_model() -> None:
    """Wherever in the call that loads it that comes: the next call loads or uses it, and it is in use no longer."""

    def made() -> ModelPool[str, Any]:
        return pool(dict.fromkeys, max_memory="100 MB", wait_timeout=TIMEOUT, name="voices")

    def call(voices: ModelPool[str, Any]) -> None:
        with voices.lease("ja"):
            pass

    for voices, where in interrupted_everywhere(made, call, step=7):  # of 550, in some seconds
        call(voices)
        assert 0 == voices.status().in_flight, where
        voices.unload("ja", timeout=TIMEOUT)
        assert {} == loaded(voices), where
