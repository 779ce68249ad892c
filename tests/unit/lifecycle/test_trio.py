"""Guards, pools and replicas on trio, and in coroutines that no event loop runs: those are driven by hand here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.lifecycle.world import MB, TIMEOUT

from modelguard import replicas
from modelguard.errors import GuardClosed, LoadFailed, NotSupported, Overloaded

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import World

trio: Any = pytest.importorskip("trio", reason="needs trio")


def test_every_wait_says_what_to_do(world: World) -> None:
    """Guards, pools and replicas alike: none fails with an error from the inside of asyncio."""
    nlp, models, pair = world.guard(), world.pool(), replicas(world.guard(name="pair"), 2)
    waits: list[Callable[[], Any]] = [
        *(getattr(nlp, name) for name in ("aload", "areload", "aunload", "aclose")),
        nlp.lease().__aenter__,
        nlp.__aenter__,
        models.lease("a").__aenter__,
        models.aclose,
        *(getattr(pair, name) for name in ("aload", "areload", "aunload", "aclose")),
        pair.lease().__aenter__,
        pair.__aenter__,
    ]
    for wait in waits:
        with pytest.raises(NotSupported, match=r"no asyncio event loop runs here.*none of trio"):
            wait().send(None)
    assert 0 == world.loader.calls, "no load has begun"


def test_a_reload_that_cannot_be_awaited_does_not_begin(world: World) -> None:
    """The model that serves stays, and its policies are not disturbed."""
    nlp = world.guard()
    nlp.load()
    with pytest.raises(NotSupported):
        nlp.areload().send(None)
    nlp.reload()
    assert (2, 2) == (world.loader.calls, nlp.status().generation)


def test_a_closed_guard_says_that_it_is_closed(world: World) -> None:
    """The loop does not matter then."""
    nlp = world.guard()
    nlp.close()
    with pytest.raises(GuardClosed):
        nlp.lease().__aenter__().send(None)


def test_what_is_loaded_needs_no_loop(world: World) -> None:
    """A lease that need not wait works on any event loop."""
    nlp, models, pair = world.guard(), world.pool(), replicas(world.guard(name="pair"), 2)
    nlp.load()
    pair.load()
    with models.lease("a"):
        pass
    for lease in (nlp.lease(), models.lease("a"), pair.lease()):
        with pytest.raises(StopIteration):
            lease.__aenter__().send(None)
        lease.__exit__(None, None, None)


# On trio


def on_trio(main: Callable[[], Any]) -> Any:
    async def bounded() -> Any:
        with trio.fail_after(TIMEOUT):
            return await main()

    return trio.run(bounded)


def test_every_verb_can_be_awaited_on_trio(world: World) -> None:
    """As under asyncio: load, reload, unload, lease and close, of guards, replicas and pools."""
    nlp, models, pair = world.guard(), world.pool(), replicas(world.guard(name="pair"), 2)

    async def main() -> list[int]:
        for handle in (nlp, pair):
            await handle.aload()
            await handle.areload()
            async with handle.lease():
                pass
            await handle.aunload()
        async with models.lease("a"):
            pass
        await models.aunload()
        found = [len(models.status().models), nlp.status().generation]
        for one in (nlp, pair, models):
            await one.aclose()
        return found

    assert [0, 0] == on_trio(main)


def test_tasks_of_trio_share_one_load(world: World) -> None:
    """And each gets an error of its own if it fails."""
    models = world.pool()
    world.loader.fails = world.loader.recovers_after_this = True
    errors: list[BaseException] = []

    async def use() -> None:
        try:
            async with models.lease("a"):
                pass
        except LoadFailed as error:
            errors.append(error)

    async def main() -> None:
        world.loader.hold()
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(use)
            await trio.to_thread.run_sync(world.loader.reached)
            while len(models._engine.line) < 19:
                await trio.sleep(0.001)
            world.loader.open.set()

    on_trio(main)
    assert (1, 20, 20) == (world.loader.calls, len(errors), len({id(error) for error in errors}))


def test_a_task_of_trio_waits_for_room_and_for_a_free_replica(world: World) -> None:
    """It is woken when a lease ends in another thread, and gives up in time; cancelled, it takes nothing."""
    world.model_size = 60 * MB
    models, pair = world.pool(), replicas(world.guard(name="pair"), 2)

    async def main() -> list[Any]:
        for held, other in ((models.lease("a"), lambda timeout: models.lease("b", timeout)), (None, pair.lease)):
            leases = [held] if held is not None else [pair.lease(), pair.lease()]
            for lease in leases:
                await trio.to_thread.run_sync(lease.__enter__)  # a nested call would use the same one
            with pytest.raises(Overloaded):
                await other(0.01).__aenter__()
            with trio.move_on_after(0.01) as scope:
                await other(TIMEOUT).__aenter__()
            assert scope.cancelled_caught
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.to_thread.run_sync, lambda leases=leases: leases[0].__exit__(None, None, None))
                async with other(TIMEOUT):
                    pass
            for lease in leases[1:]:
                lease.__exit__(None, None, None)
        return [
            models.status().in_flight,
            sum(one.in_flight for one in pair.status()),
            len(models._engine.line),
            len(pair._free.line),
        ]

    assert [0, 0, 0, 0] == on_trio(main)
