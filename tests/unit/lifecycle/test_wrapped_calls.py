"""A call is counted while it runs, and what it calls runs on its generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from tests.unit.lifecycle.world import World, outcome, run

from modelguard import ModelGuard


class TestCallsAreCounted:
    @pytest.mark.parametrize("kind", ["function", "coroutine", "generator", "async generator"])
    def test_in_flight_while_they_run(self, world: World, kind: str) -> None:
        """Each kind of call is in flight from its start to its end, and then counts as one use."""
        made = world.guard()
        seen: list[int] = []

        def function(_model: object) -> list[str]:
            seen.append(made.status().in_flight)
            return []

        async def coroutine(_model: object) -> list[str]:
            seen.append(made.status().in_flight)
            return []

        def generator(_model: object) -> Iterator[str]:
            seen.append(made.status().in_flight)
            yield ""

        async def async_generator(_model: object) -> AsyncIterator[str]:
            seen.append(made.status().in_flight)
            yield ""

        kinds: dict[str, Any] = {
            "function": function,
            "coroutine": coroutine,
            "generator": generator,
            "async generator": async_generator,
        }
        run(made(kinds[kind])())
        assert ([1], 0, 1) == (seen, made.status().in_flight, made.status().uses)

    @pytest.mark.parametrize(
        ("error", "counts"),
        [(ValueError, 1), (StopIteration, 1), (KeyboardInterrupt, 0), (SystemExit, 0), (asyncio.CancelledError, 0)],
    )
    def test_whatever_they_raise(self, world: World, error: type[BaseException], counts: int) -> None:
        """A call that raises returns its lease; interrupts and cancellations are not the model's errors."""
        made = world.guard()

        @made
        def fail(_model: object) -> None:
            raise error

        @made
        async def afail(_model: object) -> None:
            raise error

        def errors() -> int:
            assert made.engine.state.current is not None
            return made.engine.state.current.errors

        with pytest.raises(error):
            fail()
        assert (0, 1, counts) == (made.status().in_flight, made.status().uses, errors())
        if error is not StopIteration:  # which coroutines cannot raise
            call = afail()
            with pytest.raises(error):
                call.send(None)
            assert (0, 2, 2 * counts) == (made.status().in_flight, made.status().uses, errors())

    def test_even_where_the_arguments_are_wrong(self, world: World) -> None:
        """A call with wrong arguments holds no lease, however long its error is kept."""
        made = world.guard()

        async def coroutine(_model: object) -> None: ...

        async def async_generator(_model: object) -> AsyncIterator[str]:
            yield ""

        def generator(_model: object) -> Iterator[str]:
            yield ""

        kept = []
        for function in (lambda _model: None, coroutine, generator, async_generator):
            with pytest.raises(TypeError) as error:
                run(made(function)("too", "many"))
            kept.append(error.value)
        assert (4, 0) == (len(kept), made.status().in_flight)

    def test_a_cancelled_task_gives_its_lease_back(self, world: World) -> None:
        """Cancelling a task ends its call, and its lease with it."""
        made = world.guard()
        started: list[int] = []

        @made
        async def forever(_model: object) -> None:
            started.append(made.status().in_flight)
            await asyncio.get_running_loop().create_future()

        async def main() -> int:
            task = asyncio.create_task(forever())
            while not started:
                await asyncio.wait_for(asyncio.to_thread(world.join), 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return made.status().in_flight

        assert (0, [1]) == (asyncio.run(main()), started)


def number_of(made: ModelGuard[Any]) -> Callable[[], int]:
    return made(lambda model: int(model.number))


class TestNestedCalls:
    def test_run_on_the_outer_call_s_generation(self, world: World) -> None:
        """A reload in the middle of a call does not change that call's model."""
        made = world.guard()
        inner = number_of(made)

        @made
        def outer(model: Any) -> list[int]:
            before = inner()
            outcome(world.spawn(made.reload))
            return [model.number, before, inner(), outcome(world.spawn(inner))]

        assert [1, 1, 1, 2] == outer()
        assert 2 == inner()

    def test_in_coroutines_and_their_tasks(self, world: World) -> None:
        """Tasks that a call starts run on its generation too."""
        made = world.guard()
        inner = number_of(made)

        async def ainner() -> int:
            return inner()

        @made
        async def outer(model: Any) -> list[int]:
            await asyncio.to_thread(outcome, world.spawn(made.reload))
            return [model.number, inner(), *await asyncio.gather(ainner(), asyncio.to_thread(inner))]

        assert [1, 1, 1, 1] == asyncio.run(outer())

    def test_a_task_that_outlives_its_call_moves_on(self, world: World) -> None:
        """Work that a call left behind runs on the serving generation once the old one is gone."""
        made = world.guard()
        inner = number_of(made)

        async def left_behind(gone: asyncio.Event) -> int:
            await gone.wait()
            return inner()

        @made
        async def outer(_model: Any, gone: asyncio.Event) -> asyncio.Task[int]:
            return asyncio.create_task(left_behind(gone))

        async def main() -> int:
            gone = asyncio.Event()
            task = await outer(gone)
            await made.areload()
            await asyncio.to_thread(world.join)
            gone.set()
            return await task

        assert (2, 0) == (asyncio.run(main()), made.status().in_flight)

    def test_go_as_deep_as_they_like(self, world: World) -> None:
        """Recursion through a guard takes a lease at each level and returns each one."""
        made = world.guard()

        @made
        def depth(_model: object, left: int) -> int:
            return depth(left - 1) if left else made.status().in_flight

        assert (6, 0, 6) == (depth(5), made.status().in_flight, made.status().uses)
