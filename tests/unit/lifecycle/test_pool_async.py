"""A pool under an event loop: what may block happens elsewhere."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, TIMEOUT, World, until

from modelguard import Loading, ModelPool
from modelguard.errors import LoadFailed, LoadTimeout, Overloaded

TASKS = 50


async def key_of(pool: ModelPool[Any, Any], key: Any, timeout: Any = None) -> Any:
    async with pool.lease(key, timeout) as model:
        return model.key


async def elsewhere(wait: Callable[[], object]) -> None:
    """Wait for something without blocking the loop."""
    await asyncio.wait_for(asyncio.to_thread(wait), TIMEOUT)


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main(), TIMEOUT)

    return asyncio.run(bounded())


def test_a_loaded_model_is_lent_at_once(world: World) -> None:
    """What is loaded already needs no thread."""
    pool = world.pool()

    async def main() -> tuple[Any, Any]:
        first = await key_of(pool, "a")
        await elsewhere(world.join)
        object.__setattr__(world.system, "start_thread", lambda _work, _name: pytest.fail("a thread was started"))
        return first, await key_of(pool, "a")

    assert ("a", "a") == run(main)


def test_the_end_of_the_time_is_told(world: World) -> None:
    """A task that finds no room until its deadline gets ``Overloaded``."""
    world.model_size = 60 * MB
    pool = world.pool()

    async def main() -> None:
        async with pool.lease("a"):
            await key_of(pool, "b", 0)

    with pytest.raises(Overloaded, match="no room for key 'b'"):
        run(main)


@pytest.mark.parametrize("kind", [LoadFailed, LoadTimeout])
def test_a_failed_load_fails_for_all_that_wait(world: World, kind: type[LoadFailed]) -> None:
    """One load and one thread, and an error object of its own for each task: tracebacks do not mix."""
    world.loader.fails = kind is LoadFailed
    pool = world.pool(loading=Loading("500ms") if kind is LoadTimeout else None)
    world.loader.hold()
    threads: list[str] = []
    start = world.start

    def count(work: Callable[[], None], name: str) -> None:
        threads.append(name)
        start(work, name)

    object.__setattr__(world.system, "start_thread", count)

    async def main() -> list[Any]:
        calls = [asyncio.create_task(key_of(pool, "a")) for _ in range(TASKS)]
        await elsewhere(world.loader.reached)
        if kind is LoadFailed:
            world.loader.open.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    errors = run(main)
    world.loader.open.set()
    assert ({kind}, TASKS) == ({type(error) for error in errors}, len({id(error) for error in errors}))
    assert 1 == sum(name == f"modelguard-{pool.status().name}" for name in threads)


class TestACancelledTask:
    def test_leaves_its_load_to_others(self, world: World) -> None:
        """The load goes on, the unwanted lease is returned, and the model is there for the next call."""
        pool = world.pool()
        world.loader.hold()

        async def main() -> tuple[int, Any]:
            call = asyncio.create_task(key_of(pool, "a"))
            await elsewhere(world.loader.reached)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            world.loader.open.set()
            await elsewhere(world.join)
            return pool.status().in_flight, await key_of(pool, "a")

        assert ((0, "a"), 1) == (run(main), world.loader.calls)

    def test_leaves_a_load_that_fails_to_nobody(self, world: World) -> None:
        """If that load fails, no caller gets the error."""
        pool = world.pool()
        world.loader.hold()
        world.loader.fails = True

        async def main() -> None:
            call = asyncio.create_task(key_of(pool, "a"))
            await elsewhere(world.loader.reached)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            world.loader.open.set()
            await elsewhere(world.join)

        run(main)
        assert 0 == pool.status().in_flight

    def test_behind_another_load_ends_no_pause_after_a_failure(self, world: World) -> None:
        """The next call is told when the next attempt is due, as before."""
        pool = world.pool()
        world.loader.fails = True

        async def main() -> None:
            with pytest.raises(LoadFailed):
                await key_of(pool, "a")
            world.loader.hold()
            world.loader.fails = False
            other = asyncio.create_task(key_of(pool, "b"))
            await elsewhere(world.loader.reached)
            call = asyncio.create_task(key_of(pool, "a"))
            await elsewhere(lambda: until(lambda: "a" in pool._engine._models))
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            world.loader.open.set()
            await other
            await elsewhere(world.join)
            with pytest.raises(LoadFailed, match="attempt 1, next in"):
                await key_of(pool, "a")

        run(main)

    def test_that_waits_for_anothers_load_that_fails(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        """Nobody has to look at its error, so asyncio does not log one that was "never retrieved"."""
        pool = world.pool()
        world.loader.hold()
        world.loader.fails = True

        async def main() -> None:
            first, second = asyncio.create_task(key_of(pool, "a")), asyncio.create_task(key_of(pool, "a"))
            await elsewhere(world.loader.reached)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            world.loader.open.set()
            with pytest.raises(LoadFailed):
                await first

        run(main)
        gc.collect()
        assert [] == [record.message for record in caplog.records if record.name == "asyncio"]

    def test_inside_its_block_gives_its_lease_back(self, world: World) -> None:
        """Cancelling the work on a model frees the model."""
        pool = world.pool()

        async def work(entered: asyncio.Event) -> None:
            async with pool.lease("a"):
                entered.set()
                await asyncio.get_running_loop().create_future()

        async def main() -> None:
            entered = asyncio.Event()
            call = asyncio.create_task(work(entered))
            await entered.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

        run(main)
        assert 0 == pool.status().in_flight


def test_a_coroutine_that_is_dropped_waits_for_no_lock(world: World) -> None:
    """The garbage collector ends it, in a thread that may have a lock for which the owner of this one waits."""
    pool = world.pool()
    world.loader.hold()

    async def main() -> bool:
        call = key_of(pool, "a")
        call.send(None)
        await elsewhere(world.loader.reached)
        dropping = threading.Thread(target=call.close, daemon=True)
        with pool._engine._lock:
            dropping.start()
            dropping.join(10)
            return not dropping.is_alive()

    assert run(main)
    world.loader.open.set()
    world.join()
    assert 0 == pool.status().in_flight
    assert pool._engine._models["a"].unused


def test_a_lease_serves_once(world: World) -> None:
    """``async with`` rejects a used lease, as ``with`` does."""
    pool = world.pool()
    lease = pool.lease("a")

    async def main() -> None:
        async with lease:
            pass
        async with lease:
            pytest.fail("it served twice")

    with pytest.raises(RuntimeError, match=r"can be used once; call lease\(key\) again for another"):
        run(main)


def test_plain_calls_on_a_loop_are_served(world: World) -> None:
    """A plain function of a pool works inside a coroutine as a guard's does: it loads, and the loop waits."""
    pool = world.pool()

    @pool(key="key")
    def plain(model: Any, key: str) -> Any:
        return model.key

    async def main() -> tuple[Any, Any]:
        with pool.lease("b") as model:
            return plain("a"), model.key

    assert ("a", "b") == run(main)
