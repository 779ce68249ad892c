"""A lease is one use of the model: taken once, returned once, however its block ends."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
from tests.unit.interrupts import interrupted_everywhere, met_everywhere, traces_instructions
from tests.unit.lifecycle.world import World, outcome

from modelguard import ModelGuard, Swap, Uses, guard
from modelguard.lifecycle._lease import Lease
from modelguard.telemetry import ReloadDue

INTERRUPTS = [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit]


def counts(guard: ModelGuard[Any]) -> tuple[int, int]:
    """In flight and uses."""
    status = guard.status()
    return status.in_flight, status.uses


def errors(guard: ModelGuard[Any]) -> int:
    assert guard.engine.state.current is not None
    return guard.engine.state.current.errors


def taken(guard: ModelGuard[Any]) -> object:
    """A lease that somebody holds."""
    return Lease.take(guard.engine)


def streamed(guard: ModelGuard[Any]) -> object:
    """A generator that stopped half way."""

    @guard
    def numbers(model: Any) -> Iterator[int]:
        yield from (model.number, model.number)

    stream = numbers()
    next(stream)
    return stream


def awaited(guard: ModelGuard[Any]) -> object:
    """A coroutine that waits for something that never comes."""

    @guard
    async def waits(model: Any) -> Any:
        return await asyncio.Future[Any](loop=loop)

    loop = asyncio.new_event_loop()
    coroutine = waits()
    coroutine.send(None)
    loop.close()
    return coroutine


class TestABlock:
    def test_holds_the_model(self, world: World) -> None:
        """``with guard.lease() as model:`` is in flight until the block ends, and then counts as one use."""
        guard = world.guard()
        with guard.lease() as model:
            assert (1, (1, 0)) == (model.number, counts(guard))
        assert (0, 1) == counts(guard)

    def test_holds_the_model_asynchronously(self, world: World) -> None:
        """``async with`` is the same without blocking the event loop."""
        guard = world.guard()

        async def main() -> tuple[int, int]:
            async with guard.lease() as model:
                assert (1, (1, 0)) == (model.number, counts(guard))
            return counts(guard)

        assert (0, 1) == asyncio.run(main())

    @pytest.mark.parametrize("error", INTERRUPTS)
    def test_gives_it_back_however_it_ends(self, world: World, error: type[BaseException]) -> None:
        """A block that raises returns its lease; only an ``Exception`` counts as the model's error."""
        guard = world.guard()

        async def asynchronously() -> None:
            async with guard.lease():
                raise error

        with pytest.raises(error), guard.lease():
            raise error
        assert ((0, 1), issubclass(error, Exception)) == (counts(guard), errors(guard))
        with pytest.raises(error):
            asynchronously().send(None)
        assert ((0, 2), 2 * issubclass(error, Exception)) == (counts(guard), errors(guard))

    def test_that_goes_well_ends_a_row_of_errors(self, world: World) -> None:
        """Errors count in a row."""
        guard = world.guard()
        for _ in range(2):
            with pytest.raises(ValueError, match="bad"), guard.lease():
                raise ValueError("bad")
        assert 2 == errors(guard)
        with guard.lease():
            pass
        assert 0 == errors(guard)

    def test_is_where_guarded_functions_run_on_its_generation(self, world: World) -> None:
        """Guarded functions that are called inside the block run on its generation, whatever was loaded since."""
        guard = world.guard()
        number = guard(lambda model: model.number)
        with guard.lease() as model:
            outcome(world.spawn(guard.reload))
            with guard.lease() as inner:
                assert inner is model
            assert (1, 2) == (number(), outcome(world.spawn(number)))
        assert 2 == number()

    def test_may_be_one_of_many(self, world: World) -> None:
        """Leases may overlap in any way; each ends by itself."""
        guard = world.guard()
        first, second = guard.lease(), guard.lease()
        with ExitStack() as stack:
            stack.enter_context(first)
            stack.enter_context(second)
            assert 2 == counts(guard)[0]
        assert (0, 2) == counts(guard)


def test_a_lease_serves_once(world: World) -> None:
    """A lease cannot be used twice; the error says what to do instead, and the guard works on."""
    guard = world.guard()
    lease = guard.lease()
    with lease:
        pass

    async def again() -> None:
        async with lease:
            pytest.fail("it served twice")

    for use in (lease.__enter__, lambda: asyncio.run(again())):
        with pytest.raises(RuntimeError, match=r"can be used once; call lease\(\) again for another"):
            use()
    assert (0, 1) == counts(guard)


def test_a_lease_inside_itself_is_refused(world: World) -> None:
    """A lease cannot be entered inside its own block either; the block goes on."""
    guard = world.guard()
    lease = guard.lease()
    with lease as model:
        with pytest.raises(RuntimeError, match="can be used once"):
            lease.__enter__()
        assert ["fine"] == model.words("fine")
    assert (0, 1) == counts(guard)


@traces_instructions
def test_a_lease_may_be_entered_again_after_an_exception_of_a_signal_handler() -> None:
    """Wherever in its entry or its end that came: it counts once, or not at all."""

    def made() -> tuple[ModelGuard[Any], Any]:
        nlp = guard(dict, reload_on=None, name="nlp")
        nlp.load()
        return nlp, nlp.lease()

    def use(made: tuple[ModelGuard[Any], Any]) -> None:
        with made[1]:
            pass

    for (nlp, lease), where in interrupted_everywhere(made, use):
        with suppress(RuntimeError), lease:  # it was used up
            assert 1 == nlp.status().in_flight, where
        assert 0 == nlp.status().in_flight or lease.generation is not None, where
        del lease


@traces_instructions
@pytest.mark.parametrize("kind", ["function", "block"])
def test_a_call_keeps_its_model_wherever_a_reload_meets_it(kind: str) -> None:
    """At whichever point of a call another thread reloads: no model is unloaded while the call runs on it."""
    number = itertools.count(1)

    def made() -> tuple[ModelGuard[Any], Callable[[], bool]]:
        unloaded: set[int] = set()
        nlp = guard(lambda: next(number), reload_on=None, unload=unloaded.add, swap=Swap(drain_timeout=0), name="nlp")
        nlp.load()

        def in_block() -> bool:
            with nlp.lease() as model:
                return model not in unloaded

        return nlp, in_block if kind == "block" else nlp(lambda model: model not in unloaded)

    def use(made: tuple[ModelGuard[Any], Callable[[], bool]]) -> None:
        assert made[1]()

    def reload(made: tuple[ModelGuard[Any], Callable[[], bool]]) -> None:
        other = threading.Thread(target=made[0].reload)
        other.start()
        other.join()

    points = set()
    for (nlp, call), where in met_everywhere(made, use, reload):
        points.add(where)
        assert (0, 2) == (nlp.status().in_flight, nlp.status().generation), where
        assert call(), where
    assert any("take_lease" in where for where in points)


class TestALeaseThatIsTaken:
    def test_ends_once(self, world: World) -> None:
        """Ending twice is ending once."""
        guard = world.guard()
        lease = Lease.take(guard.engine)
        lease.end(failed=False)
        lease.end(failed=True)
        assert ((0, 1), 0) == (counts(guard), errors(guard))

    def test_ends_when_it_is_dropped(self, world: World) -> None:
        """A lease that nothing refers to any more has ended."""
        guard = world.guard()
        lease = Lease.take(guard.engine)
        assert (1, 0) == counts(guard)
        del lease
        assert (0, 1) == counts(guard)

    def test_ends_when_the_collector_finds_it_dropped(self, world: World) -> None:
        """That holds where it was part of a cycle, too."""
        guard = world.guard()
        cycle: list[Any] = [Lease.take(guard.engine)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert (0, 1) == counts(guard)

    @pytest.mark.parametrize("hold", [taken, streamed, awaited])
    def test_asks_no_policy_when_the_collector_ends_it(
        self, world: World, hold: Callable[[ModelGuard[Any]], object]
    ) -> None:
        """The collector may interrupt code that holds any lock, also one that a policy or a hook waits for."""
        guard = world.guard(reload_on=Uses(1, jitter=0))
        guard.load()
        cycle: list[Any] = [hold(guard)]
        cycle.append(cycle)
        assert 1 == counts(guard)[0]
        del cycle
        gc.collect()
        assert ((0, 1), []) == (counts(guard), world.seen(ReloadDue))
        with guard.lease():
            pass
        assert 1 == len(world.seen(ReloadDue)), "the next call asks"

    def test_that_never_began_has_nothing_to_end(self, world: World) -> None:
        """A lease that is never entered has no effect."""
        guard = world.guard()
        guard.load()
        lease = guard.lease()
        del lease
        assert (0, 0) == counts(guard)

    def test_steps_run_outside_once_it_has_ended(self, world: World) -> None:
        """Work that goes on after its lease has ended runs without it."""
        guard = world.guard()
        lease = Lease.take(guard.engine)
        lease.end(failed=False)

        async def work() -> int:
            return 7

        assert (7, 7) == (lease.step(lambda: 7), asyncio.run(lease.astep(work())))
        assert (0, 1) == counts(guard)


class TestContexts:
    def test_a_lease_may_end_in_another_context_than_it_began_in(self, world: World) -> None:
        """Dependency injectors enter and leave in different contexts: the lease still ends."""
        guard = world.guard()
        lease = guard.lease()
        contextvars.copy_context().run(lease.__enter__)
        assert (1, 0) == counts(guard)
        lease.__exit__(None, None, None)
        assert (0, 1) == counts(guard)

    def test_a_lease_may_end_in_another_task(self, world: World) -> None:
        """The same across tasks, as frameworks run startup and teardown of a dependency."""
        guard = world.guard()

        async def main() -> tuple[int, int]:
            stack = AsyncExitStack()
            await asyncio.create_task(stack.enter_async_context(guard.lease()))  # type: ignore[arg-type]
            assert (1, 0) == counts(guard)
            await asyncio.create_task(stack.aclose())
            return counts(guard)

        assert (0, 1) == asyncio.run(main())

    def test_tasks_do_not_mix_up_their_generations(self, world: World) -> None:
        """Each of many tasks on one loop runs on the generation that it began with."""
        guard = world.guard()
        number = guard(lambda model: model.number)

        async def call(inside: asyncio.Event, reloaded: asyncio.Event) -> list[int]:
            async with guard.lease() as model:
                inside.set()
                await reloaded.wait()
                return [model.number, number()]

        async def main() -> list[list[int]]:
            began, reloaded = [asyncio.Event() for _ in range(5)], asyncio.Event()
            old = [asyncio.create_task(call(inside, reloaded)) for inside in began]
            for inside in began:
                await inside.wait()
            await guard.areload()
            new = [asyncio.create_task(call(inside, reloaded)) for inside in began]
            reloaded.set()
            return [*await asyncio.gather(*old), *await asyncio.gather(*new)]

        guard.load()
        assert [[1, 1]] * 5 + [[2, 2]] * 5 == asyncio.run(main())

    def test_a_cancelled_block_gives_its_lease_back(self, world: World) -> None:
        """A task that is cancelled inside ``async with`` returns its lease at once."""
        guard = world.guard()

        @asynccontextmanager
        async def endpoint(entered: asyncio.Event) -> AsyncIterator[None]:
            async with guard.lease():
                entered.set()
                yield

        async def request(entered: asyncio.Event) -> None:
            async with endpoint(entered):
                await asyncio.get_running_loop().create_future()

        async def main() -> tuple[int, int]:
            entered = asyncio.Event()
            task = asyncio.create_task(request(entered))
            await entered.wait()
            assert (1, 0) == counts(guard)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return counts(guard)

        assert (0, 1) == asyncio.run(main())
        assert 0 == errors(guard)
