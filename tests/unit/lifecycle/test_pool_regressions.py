"""Regressions of the pool: each fault stays fixed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.unit.lifecycle.pools import Sizes, loaded, use
from tests.unit.lifecycle.world import MB, TIMEOUT, World

from modelguard.errors import LoadFailed

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
    """Models are counted by what malloc has handed out, since a load may reuse what an earlier one has freed."""

    def test_counts_a_load_that_reuses_free_memory(self, world: World) -> None:
        """Private memory does not grow at all: what malloc has in use still does."""
        world.in_use = 0

        def load(key: Any) -> Any:
            assert world.in_use is not None
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


def test_a_coroutine_inside_a_lease_gets_its_model_although_its_time_is_over(world: World) -> None:
    """A nested lease goes to the model that the outer one uses; a fresh one would wait for the outer lease's end."""
    pool = world.pool(ttl="1h")

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
    start = world.runtime.start_thread

    def count(work: Callable[[], None], name: str) -> None:
        started.append(name)
        start(work, name)

    object.__setattr__(world.runtime, "start_thread", count)

    async def main() -> list[Any]:
        return await asyncio.gather(*(_key_of(pool, "a") for _ in range(COROUTINES)))

    assert ["a"] * COROUTINES == run(main)
    assert 5 > len(started)
    assert threading.active_count() < 50


async def _key_of(pool: Any, key: Any) -> Any:
    async with pool.lease(key) as model:
        return model.key
