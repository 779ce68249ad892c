"""Regressions of the pool: each fault stays fixed."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.lifecycle.pools import Sizes, loaded, use
from tests.unit.lifecycle.world import MB, TIMEOUT, Model, World, outcome, own_context, until

from modelguard import TTL, batched, replicas
from modelguard.errors import GuardClosed, LoadFailed, Overloaded

COROUTINES = 1000


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main(), TIMEOUT)

    return asyncio.run(bounded())


class TestEvictionOnAnEventLoop:
    """A plain call in a coroutine blocks the loop, but it works: models are evicted, unloaded and loaded."""

    def test_makes_room_and_unloads(self, world: World) -> None:
        """The evicted model's hook is called, and the pool goes on."""
        unloaded: list[Any] = []
        pool = world.pool(Sizes(world, a=60, b=60, c=60), unload=lambda model: unloaded.append(model.key))

        async def main() -> list[Any]:
            return use(pool, "a", "b", "c", "a")

        assert ["a", "b", "c", "a"] == run(main)
        assert ["a", "b", "c"] == unloaded
        assert ["b"] == use(pool, "b")

    def test_by_a_decorated_function(self, world: World) -> None:
        """The same holds for a pooled function."""
        pool = world.pool(Sizes(world, a=60, b=60))

        @pool(key="wanted")
        def key_of(model: Any, wanted: str) -> Any:
            return model.key, wanted

        async def main() -> list[Any]:
            return [key_of(key) for key in ("a", "b", "a")]

        assert [("a", "a"), ("b", "b"), ("a", "a")] == run(main)

    def test_an_unload_that_raises_leaves_the_pool_usable(self, world: World) -> None:
        """No error of an eviction keeps the lock under which models are loaded."""

        def unload(_model: Any) -> None:
            raise OSError("disk full")

        pool = world.pool(Sizes(world, a=60, b=60), unload=unload)

        async def main() -> list[Any]:
            return use(pool, "a", "b", "a")

        assert ["a", "b", "a"] == run(main)
        assert ["b"] == use(pool, "b")

    def test_a_load_that_fails_leaves_the_pool_usable(self, world: World) -> None:
        """Nor does the error of a load."""
        pool = world.pool()
        world.loader.fails = world.loader.recovers_after_this = True

        async def main() -> list[Any]:
            with pytest.raises(LoadFailed):
                use(pool, "a")
            return use(pool, "b", "c")

        assert ["b", "c"] == run(main)


class TestTheBudget:
    """Models are counted by what allocators have handed out, since a load may reuse what an earlier one has freed."""

    @pytest.mark.parametrize("objects", [False, True], ids=["blocks", "objects"])
    def test_counts_a_load_that_reuses_free_memory(self, world: World, *, objects: bool) -> None:
        """Private memory does not grow at all: what malloc, or Python's own allocator, has in use still does."""
        world.in_use = world.python_in_use = 0

        def load(key: Any) -> Any:
            assert world.in_use is not None
            assert world.python_in_use is not None
            if objects:
                world.python_in_use += 40 * MB
            else:
                world.in_use += 40 * MB
            return Sizes(world, a=0, b=0, c=0)(key)

        pool = world.pool(load)
        use(pool, "a", "b", "c")
        assert {"b": 40, "c": 40} == loaded(pool)

    def test_keeps_the_largest_size_of_a_key(self, world: World) -> None:
        """A model that measured 60 MB once is not counted as 0 later."""
        sizes = Sizes(world, a=60, b=60)
        pool = world.pool(sizes)
        use(pool, "a", "b")
        sizes.sizes.update(a=0, b=0)
        use(pool, "a", "b")
        assert {"b": 60} == loaded(pool)


class TestALoaderWithACache:
    """``unload`` closes a model that is evicted: the same object must not serve again."""

    @pytest.mark.parametrize(
        ("options", "keys"),
        [({"max_models": 1}, ["a", "b"]), ({"reload_on": TTL("1h")}, ["a"]), ({}, ["a"])],
        ids=["evicted", "too old", "closed"],
    )
    def test_is_refused_when_it_returns_a_model_that_was_closed(
        self, world: World, options: dict[str, Any], keys: list[str]
    ) -> None:
        """The load fails, and says why; no call gets the closed model."""
        pool = world.pool(functools.cache(world.loader.load), unload=lambda model: model.unload(), **options)
        use(pool, *keys)
        world.tick(7200)
        if not options:
            pool.close()
        with pool, pytest.raises(LoadFailed, match="returned a model that it has returned before"), pool.lease("a"):
            pass

    def test_is_refused_when_two_keys_get_one_model(self, world: World) -> None:
        """The eviction of one key would close the model that serves the other; the first one goes on."""
        one = Model(world, 1, "a")
        pool = world.pool(lambda _key: one, unload=lambda model: model.unload())
        use(pool, "a")
        with pytest.raises(LoadFailed, match="returned a model that it has returned before"):
            use(pool, "b")
        assert ["a"] == use(pool, "a")
        assert not one.unloaded

    def test_may_be_used_without_unload(self, world: World) -> None:
        """Nothing closes the model then, and two keys may be names of one."""
        one = Model(world, 1, "one")
        pool = world.pool(lambda _key: one, max_models=1)
        assert ["one"] * 3 == use(pool, "a", "b", "a")

    @pytest.mark.parametrize("value", ["model", dict], ids=["text", "type"])
    def test_of_plain_values_is_none(self, world: World, value: Any) -> None:
        """Texts and classes hold nothing that could be closed."""
        pool = world.pool(lambda _key: value, max_models=1, unload=lambda _model: None)
        for key in "aba":
            with pool.lease(key) as model:
                assert value is model

    def test_models_that_are_gone_are_forgotten(self, world: World) -> None:
        """A new model may get the address of one that was freed."""
        pool = world.pool(max_models=1, unload=lambda model: model.unload())
        assert ["a", "b"] * 50 == use(pool, *(["a", "b"] * 50))


class TestClosing:
    def test_ends_loads_that_wait_for_their_turn(self, world: World) -> None:
        """They are refused, and their loaders are not called after the one that runs."""
        loading, go_on, loads = threading.Event(), threading.Event(), []

        def load(key: str) -> Model:
            loads.append(key)
            loading.set()
            assert go_on.wait(TIMEOUT)
            return Model(world, 1, key)

        pool = world.pool(load)
        callers = [world.spawn(use, pool, "a")]
        assert loading.wait(TIMEOUT)
        callers += [world.spawn(use, pool, key) for key in "bc"]
        until(lambda: 3 == len(pool._engine._models))
        pool.close()
        go_on.set()
        for caller in callers:
            with pytest.raises(GuardClosed):
                outcome(caller)
        assert ["a"] == loads
        with pool:
            assert ["c"] == use(pool, "c")

    def test_refuses_who_was_about_to_load(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing would release what is loaded into a pool that has been closed."""
        pool = world.pool(Sizes(world, a=1))
        check, checks, closing = pool._engine._raise_if_closed, [], []

        def close_after_the_check() -> None:
            check()
            checks.append(None)
            if len(checks) == 2:  # the first one is made under the lock
                closing.append(world.spawn(pool.close))
                until(lambda: pool._engine.closed)

        monkeypatch.setattr(pool._engine, "_raise_if_closed", close_after_the_check)
        with pytest.raises(GuardClosed):
            use(pool, "a")
        outcome(closing[0])
        assert {} == loaded(pool)


class TestWarmups:
    """A warm-up runs on the new model, also where it calls the service's own functions."""

    def test_may_call_a_function_of_the_pool(self, world: World) -> None:
        """It does not wait for the load that waits for it."""
        pool = world.pool(warmup=lambda model: warmed.append((model.key, key_of(model.key))), wait_timeout=0)
        warmed: list[Any] = []

        @pool(key="key")
        def key_of(model: Any, key: str) -> Any:
            return model.key, key

        assert ["a", "b"] == use(pool, "a", "b")
        assert [("a", ("a", "a")), ("b", ("b", "b"))] == warmed

    def test_may_call_a_batched_function_of_the_pool(self, world: World) -> None:
        """The batch is computed at once, on the model that is warmed up."""
        pool = world.pool(warmup=lambda _: warmed.append((predict("x"), list(predict.map(["y", "z"])))), wait_timeout=0)
        warmed: list[Any] = []

        @batched(max_size=4)
        @pool(key=lambda _texts: "a")
        def predict(model: Any, texts: list[str]) -> list[Any]:
            return [(model.number, text) for text in texts]

        assert ["a"] == use(pool, "a")
        assert [((1, "x"), [(1, "y"), (1, "z")])] == warmed
        predict.close()

    def test_may_await_them(self, world: World) -> None:
        """An ``async`` warm-up does the same on its own loop."""

        async def warm(_model: Any) -> None:
            warmed.append(await key_of("a"))

        pool = world.pool(warmup=warm, wait_timeout=0)
        warmed: list[Any] = []

        @pool(key="key")
        async def key_of(model: Any, key: str) -> Any:
            return model.key, key

        assert ["a"] == use(pool, "a")
        assert [("a", "a")] == warmed

    @pytest.mark.parametrize("wanted", ["a", "b"], ids=["the same key", "another key"])
    @own_context
    def test_that_wait_for_themselves_through_an_executor_are_refused(self, world: World, wanted: str) -> None:
        """The call in the executor waits for the load whose warm-up waits for the call: an error, and soon."""

        def warm(_model: Any) -> None:
            with ThreadPoolExecutor(1) as executor:
                executor.submit(key_of, wanted).result()

        pool = world.pool(warmup=warm, wait_timeout=10 * TIMEOUT)

        @pool(key="key")
        def key_of(model: Any, key: str) -> Any:
            return model.key, key

        failure = world.spawn(use, pool, "a").exception(TIMEOUT)
        assert isinstance(failure, LoadFailed)
        assert "the warm-up in it, waits for this thread" in str(failure)

    @own_context
    def test_that_await_themselves_through_an_executor_are_refused(self, world: World) -> None:
        """The same for a coroutine."""

        async def warm(_model: Any) -> None:
            await asyncio.get_running_loop().run_in_executor(None, key_of, "b")

        pool = world.pool(warmup=warm, wait_timeout=10 * TIMEOUT)

        @pool(key="key")
        def key_of(model: Any, key: str) -> Any:
            return model.key, key

        assert isinstance(world.spawn(use, pool, "a").exception(TIMEOUT), LoadFailed)

    @pytest.mark.parametrize("first", ["load", "call"])
    @own_context
    def test_of_replicas_that_wait_for_themselves_are_refused(self, world: World, first: str) -> None:
        """Each replica's warm-up waits for a call that no replica can take."""

        def warm(_model: Any) -> None:
            with ThreadPoolExecutor(1) as executor:
                executor.submit(number).result()

        pair = replicas(world.guard(warmup=warm, wait_timeout=10 * TIMEOUT), 2)
        number = pair(lambda model: model.number)
        failure = world.spawn(pair.load if first == "load" else number).exception(TIMEOUT)
        assert isinstance(failure, LoadFailed)
        assert "the warm-up in it, waits for this thread" in str(failure)


def test_a_loop_over_a_pooled_generator_whose_time_is_over_may_call_its_pool(world: World) -> None:
    """The calls between two steps run on the generator's model: neither waits for the other."""
    pool = world.pool(reload_on=TTL(10), wait_timeout=TIMEOUT)

    @pool(key="key")
    def numbers(model: Any, key: str) -> Iterator[int]:
        for _ in range(3):
            yield model.number

    @pool(key="key")
    def number(model: Any, key: str) -> int:
        return int(model.number)

    def loop() -> list[tuple[int, int]]:
        seen = []
        for step in numbers("a"):
            world.tick(10 if not seen else 0)
            seen.append((step, number("a")))
        return seen

    assert [(1, 1)] * 3 == world.spawn(loop).result(TIMEOUT / 2)
    assert 2 == number("a"), "after the loop the model is replaced"


def test_overlapping_streams_do_not_keep_a_model_whose_time_is_over(world: World) -> None:
    """Another thread waits for the new model, and after half of ``wait_timeout`` the stream's thread does too."""
    pool = world.pool(reload_on=TTL(10), wait_timeout=0.1)

    @pool(key="key")
    def numbers(model: Any, key: str) -> Iterator[int]:
        yield model.number
        yield model.number

    stream = numbers("a")
    assert 1 == next(stream)
    world.tick(10)
    assert isinstance(world.spawn(use, pool, "a").exception(TIMEOUT), Overloaded)
    world.tick(1)
    with pytest.raises(Overloaded):
        use(pool, "a")
    stream.close()
    assert ["a"] == use(pool, "a")
    assert 2 == world.loader.calls


class TestReopening:
    """An application that has a pool in its lifespan can be started several times in one process."""

    def test_by_entering_it_again(self, world: World) -> None:
        """Between two blocks it is closed; each block has models of its own."""
        pool = world.pool()
        for loads in (1, 2):
            with pool:
                assert ["a"] == use(pool, "a")
            assert loads == world.loader.calls
            with pytest.raises(GuardClosed):
                use(pool, "a")

        async def once() -> Any:
            async with pool:
                return await _key_of(pool, "a")

        assert ["a", "a"] == [run(once), run(once)]

    def test_a_load_from_before_stays_out(self, world: World) -> None:
        """A model that was being loaded when the pool was closed does not take the place of a newer one."""
        world.loader.hold()
        pool = world.pool()
        before = world.spawn(use, pool, "a")
        world.loader.reached()
        pool.close()
        with pool:
            world.loader.open.set()
            assert ["a"] == use(pool, "a")
            assert isinstance(before.exception(TIMEOUT), GuardClosed)
            assert ["a"] == use(pool, "a")
            assert ["a"] == list(loaded(pool))


def test_a_coroutine_inside_a_lease_gets_its_model_although_its_time_is_over(world: World) -> None:
    """A nested lease goes to the model that the outer one uses; a fresh one would wait for the outer lease's end."""
    pool = world.pool(reload_on=TTL("1h"))

    async def main() -> tuple[Any, Any, int]:
        async with pool.lease("a") as outer:
            world.tick(7200)
            async with pool.lease("a") as inner, pool.lease("b") as other:
                return outer is inner, other.key, world.loader.calls

    assert (True, "b", 2) == run(main)


def test_a_coroutine_inside_a_lease_goes_before_those_that_wait_for_room(world: World) -> None:
    """Otherwise both would wait: the others for its lease, and it behind them."""
    pool = world.pool(Sizes(world, a=40, b=40, c=80))
    use(pool, "c", "b", "a")  # sizes are known now

    async def main() -> list[Any]:
        async with pool.lease("a"):
            other = asyncio.create_task(_key_of(pool, "c"))
            await asyncio.wait([other], timeout=0)
            async with pool.lease("b") as inner:
                found = inner.key
            assert not other.done()
        return [found, await other]

    assert ["b", "c"] == run(main)


def test_a_thousand_coroutines_on_a_cold_key_start_few_threads(world: World) -> None:
    """They wait for one fetch; each then takes a lease of its own."""
    pool = world.pool()
    started: list[str] = []
    start = world.system.start_thread

    def count(work: Callable[[], None], name: str) -> None:
        started.append(name)
        start(work, name)

    object.__setattr__(world.system, "start_thread", count)

    async def main() -> list[Any]:
        return await asyncio.gather(*(_key_of(pool, "a") for _ in range(COROUTINES)))

    assert ["a"] * COROUTINES == run(main)
    assert 5 > len(started)
    assert threading.active_count() < 50


async def _key_of(pool: Any, key: Any) -> Any:
    async with pool.lease(key) as model:
        return model.key


def test_a_coroutine_that_gives_up_reads_the_pool_under_its_lock(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads move its key meanwhile, so that it could get a KeyError instead of Overloaded."""
    world.loader.hold()
    pool = world.pool()
    loading = world.spawn(use, pool, "a")
    world.loader.reached()
    locked = []

    class Watched(OrderedDict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            locked.append(pool._engine._lock._is_owned())
            return super().get(key, default)

    async def main() -> None:
        async with pool.lease("a"):
            pass

    monkeypatch.setattr(pool._engine, "options", pool._engine.options._replace(wait_timeout=0.0))
    monkeypatch.setattr(pool._engine, "_models", Watched(pool._engine._models))
    with pytest.raises(Overloaded, match="still being loaded"):
        run(main)
    assert all(locked)
    world.loader.open.set()
    assert ["a"] == outcome(loading)
