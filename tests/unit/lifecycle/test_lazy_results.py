"""Work that goes on after the call has returned keeps its lease until it ends, is closed, or is dropped."""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from tests.unit.lifecycle.world import World, outcome

from modelguard import ModelGuard
from modelguard.telemetry import GenerationReleased

TEXT = "a b c"


class Countdown:
    """An iterator that is not a generator."""

    def __init__(self, words: list[str]) -> None:
        self.left = words

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class ACountdown:
    """The same, asynchronous, and with a way to close it."""

    def __init__(self, words: list[str]) -> None:
        self.left = words
        self.closed = False

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        if not self.left:
            raise StopAsyncIteration
        return self.left.pop(0)

    async def aclose(self) -> None:
        self.closed = True


def generator(model: Any) -> Iterator[str]:
    yield from model.words(TEXT)


def returns_generator(model: Any) -> Iterator[str]:
    return (word for word in model.words(TEXT))


def returns_map(model: Any) -> Iterator[str]:
    return map(str, model.words(TEXT))


def returns_slice(model: Any) -> Iterator[str]:
    return itertools.islice(generator(model), 3)


def returns_iterator(model: Any) -> Iterator[str]:
    return Countdown(model.words(TEXT))


def returns_file(model: Any) -> Any:
    return io.TextIOWrapper(io.BytesIO("\n".join(model.words(TEXT)).encode()))


async def async_generator(model: Any) -> AsyncIterator[str]:
    for word in model.words(TEXT):
        yield word


def returns_async_generator(model: Any) -> AsyncIterator[str]:
    return async_generator(model)


def returns_async_iterator(model: Any) -> AsyncIterator[str]:
    return ACountdown(model.words(TEXT))


SYNC = [generator, returns_generator, returns_map, returns_slice, returns_iterator, returns_file]
ASYNC = [async_generator, returns_async_generator, returns_async_iterator]


@pytest.fixture
def guard(world: World) -> ModelGuard[Any]:
    made = world.guard()
    made.load()
    return made


def in_flight(guard: ModelGuard[Any]) -> int:
    return guard.status().in_flight


@pytest.mark.parametrize("function", SYNC)
class TestIterators:
    def test_keep_their_lease_to_the_end(self, guard: ModelGuard[Any], function: Callable[[Any], Any]) -> None:
        """While there is more to come the model is in use; after the last item it is not, and one use is counted."""
        words = guard(function)()
        found = [next(words).strip()]
        assert 1 == in_flight(guard)
        found += [word.strip() for word in words]
        assert (["a", "b", "c"], 0) == (found, in_flight(guard))
        assert 1 == guard.status().uses
        with pytest.raises(StopIteration):
            next(words)

    def test_keep_their_generation(self, world: World, guard: ModelGuard[Any], function: Callable[[Any], Any]) -> None:
        """A reload half way does not touch them: the old model is released after their last item."""
        words = guard(function)()
        next(words)
        outcome(world.spawn(guard.reload))
        assert (2, [], 2) == (
            guard.status().generation,
            world.seen(GenerationReleased),
            len([word for word in words]),  # noqa: C416 - files are iterators, too
        )
        del words
        world.join()
        assert [1] == [event.generation for event in world.seen(GenerationReleased)]

    def test_give_it_back_when_they_are_closed(self, guard: ModelGuard[Any], function: Callable[[Any], Any]) -> None:
        """Closing one half way, as servers do when a client disconnects, returns its lease."""
        words = guard(function)()
        next(words)
        words.close()
        assert 0 == in_flight(guard)

    def test_may_be_closed_before_they_begin(self, guard: ModelGuard[Any], function: Callable[[Any], Any]) -> None:
        """Closing one that was never started returns its lease as well."""
        words = guard(function)()
        words.close()
        assert 0 == in_flight(guard)

    def test_give_it_back_when_they_are_dropped(self, guard: ModelGuard[Any], function: Callable[[Any], Any]) -> None:
        """One that is abandoned half way, or before it began, returns its lease when nothing refers to it."""
        words, unstarted = guard(function)(), guard(function)()
        next(words)
        del words, unstarted
        gc.collect()
        assert 0 == in_flight(guard)


@pytest.mark.parametrize("function", ASYNC)
class TestAsyncIterators:
    def test_keep_their_lease_to_the_end(self, guard: ModelGuard[Any], function: Callable[[Any], Any]) -> None:
        """While there is more to come the model is in use; after the last item it is not."""

        async def main() -> tuple[list[str], list[int]]:
            words, seen = [], []
            async for word in guard(function)():
                words.append(word)
                seen.append(in_flight(guard))
            return words, [*seen, in_flight(guard)]

        assert (["a", "b", "c"], [1, 1, 1, 0]) == asyncio.run(main())

    @pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
    def test_give_it_back_when_they_are_closed(
        self,
        guard: ModelGuard[Any],
        function: Callable[[Any], Any],
        begun: bool,  # noqa: FBT001
    ) -> None:
        """Closing one returns its lease, whether it has begun or not."""

        async def main() -> int:
            words = guard(function)()
            if begun:
                await anext(words)
            await words.aclose()
            return in_flight(guard)

        assert 0 == asyncio.run(main())

    def test_give_it_back_when_they_are_dropped(self, guard: ModelGuard[Any], function: Callable[[Any], Any]) -> None:
        """One that is abandoned half way returns its lease, at the latest when its event loop ends."""

        async def main() -> None:
            async for _ in guard(function)():
                break

        asyncio.run(main())
        gc.collect()
        assert 0 == in_flight(guard)


class TestGenerators:
    def test_take_their_lease_at_the_first_step(self, world: World) -> None:
        """A generator that is never started uses no model and loads none."""
        guard = world.guard()
        words = guard(generator)()
        assert (0, 0) == (world.loader.calls, in_flight(guard))
        assert (["a", "b", "c"], 1) == (list(words), guard.status().uses)

    @pytest.mark.parametrize("returned", [False, True], ids=["written", "returned"])
    def test_receive_and_return_values(self, guard: ModelGuard[Any], returned: bool) -> None:  # noqa: FBT001
        """``send``, ``throw`` and the return value work as without a guard."""

        def talk(_model: Any) -> Any:
            heard = []
            while len(heard) < 3:
                try:
                    heard.append((yield len(heard)))
                except KeyError as error:
                    heard.append(repr(error))
            return heard

        function = guard((lambda model: talk(model)) if returned else talk)  # noqa: PLW0108 - not a generator function

        def delegate() -> Any:
            return (yield from function())

        conversation = delegate()
        assert [0, 1, 2] == [next(conversation), conversation.send("hello"), conversation.throw(KeyError("k"))]
        with pytest.raises(StopIteration) as end:
            conversation.send("bye")
        assert (["hello", "KeyError('k')", "bye"], 0) == (end.value.value, in_flight(guard))

    @pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
    def test_that_end_before_they_begin_give_their_lease_back(
        self, guard: ModelGuard[Any], error: BaseException
    ) -> None:
        """One that is closed before its first step, or ended by an error, runs no step."""
        words: Any = guard(returns_generator)
        closed, failed = words(), words()
        assert 2 == in_flight(guard)
        closed.close()
        with pytest.raises(type(error)):
            failed.throw(error)
        assert (0, [], []) == (in_flight(guard), list(closed), list(failed))

    def test_refuse_a_value_before_their_first_step(self, guard: ModelGuard[Any]) -> None:
        """What is sent into one that has not begun is refused, as without a guard."""
        words: Any = guard(returns_generator)()
        with pytest.raises(TypeError, match="just-started generator"):
            words.send("a")
        assert 0 == in_flight(guard)

    def test_async_ones_receive_values(self, guard: ModelGuard[Any]) -> None:
        """``asend`` and ``athrow`` work as well."""

        @guard
        async def talk(_model: Any) -> AsyncIterator[Any]:
            heard = None
            while heard != "bye":
                try:
                    heard = yield heard
                except KeyError as error:
                    heard = repr(error)

        async def main() -> list[Any]:
            words: Any = talk()
            said = [await anext(words), await words.asend("hello"), await words.athrow(KeyError("k"))]
            with pytest.raises(StopAsyncIteration):
                await words.asend("bye")
            return said

        assert ([None, "hello", "KeyError('k')"], 0) == (asyncio.run(main()), in_flight(guard))

    def test_finish_what_they_began_on_their_model(self, world: World, guard: ModelGuard[Any]) -> None:
        """When a generator is closed or dropped its ``finally`` still runs on a loaded model, nested calls included."""
        unloaded: list[int] = []
        object.__setattr__(
            guard.engine.options, "unload", lambda model: (unloaded.append(model.number), model.unload())
        )
        words_of = guard(lambda model, text: model.words(text))
        ends: list[Any] = []

        def stream(model: Any) -> Iterator[str]:
            try:
                yield "first"
            finally:
                ends.append((model.words("last"), words_of("nested"), list(unloaded)))

        for function in (stream, lambda model: stream(model)):  # noqa: PLW0108 - not a generator function
            written, dropped = guard(function)(), guard(function)()
            assert ["first", "first"] == [next(written), next(dropped)]
            outcome(world.spawn(guard.reload))
            written.close()
            del dropped
            world.join()
        assert ([(["last"], ["nested"], [])] * 2, [1, 2]) == (ends[:2], unloaded)
        assert [(["last"], ["nested"], [1])] * 2 == ends[2:]

    def test_leave_their_caller_s_context_alone(self, world: World, guard: ModelGuard[Any]) -> None:
        """Between two items of a generator its caller's own calls run on the serving generation."""
        number = guard(lambda model: model.number)

        @guard
        def numbers(model: Any) -> Iterator[tuple[int, int]]:
            while True:
                yield model.number, number()

        stream = numbers()
        next(stream)
        outcome(world.spawn(guard.reload))
        assert ((1, 1), 2, (1, 1)) == (next(stream), number(), next(stream))

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("function", ["generator", "iterator"])
    def test_that_raise_give_their_lease_back(
        self, guard: ModelGuard[Any], function: str, error: type[BaseException]
    ) -> None:
        """An error half way ends the lease; an exception counts as the model's error, an interrupt does not."""

        def stream(_model: Any) -> Iterator[str]:
            yield "first"
            raise error

        words = guard(stream if function == "generator" else lambda model: map(str, stream(model)))()
        next(words)
        with pytest.raises(error):
            next(words)
        assert guard.engine.state.current is not None
        assert (0, int(error is ValueError)) == (in_flight(guard), guard.engine.state.current.errors)

    def test_async_ones_that_raise_give_their_lease_back(self, guard: ModelGuard[Any]) -> None:
        """The same holds for asynchronous generators and iterators."""

        class Broken(ACountdown):
            async def __anext__(self) -> str:
                raise ValueError("bad")

        async def stream(_model: Any) -> AsyncIterator[str]:
            yield "first"
            raise ValueError("bad")

        async def read(function: Callable[[Any], Any]) -> None:
            async for _ in guard(function)():
                pass

        for function in (stream, lambda model: stream(model), lambda _model: Broken([])):  # noqa: PLW0108
            with pytest.raises(ValueError, match="bad"):
                asyncio.run(read(function))
        assert guard.engine.state.current is not None
        assert (0, 3) == (in_flight(guard), guard.engine.state.current.errors)


class TestCoroutines:
    def test_returned_by_plain_functions_keep_their_lease(self, guard: ModelGuard[Any]) -> None:
        """A plain function may return a coroutine: the model is in use until that is over."""

        async def work(model: Any) -> tuple[list[str], int]:
            return model.words(TEXT), in_flight(guard)

        coroutine = guard(lambda model: work(model))()  # noqa: PLW0108 - not a coroutine function
        assert (True, 1) == (inspect.iscoroutine(coroutine), in_flight(guard))
        assert ((["a", "b", "c"], 1), 0) == (asyncio.run(coroutine), in_flight(guard))

    @pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
    def test_that_are_never_awaited_give_it_back(self, guard: ModelGuard[Any]) -> None:
        """One that is dropped without being awaited returns its lease."""

        async def work(model: Any) -> Any:
            return model

        coroutine = guard(lambda model: work(model))()  # noqa: PLW0108 - not a coroutine function
        del coroutine
        gc.collect()
        assert 0 == in_flight(guard)


class TestSeveralAtOnce:
    """An iterator may be an asynchronous one and an awaitable as well: each way works, on one lease."""

    class Cursor(Countdown, ACountdown):
        def __await__(self) -> Any:
            yield  # the next turn of the loop
            return self if self.left else self.number()

        number: Any = None

    def test_each_way_works(self, world: World, guard: ModelGuard[Any]) -> None:
        """Awaiting gives the result, or the iterator itself with its lease, and what it calls runs on its model."""
        number = guard(lambda model: model.number)

        def cursor(model: Any) -> Any:
            made = self.Cursor(model.words(TEXT))
            made.number = number
            return made

        async def main() -> list[Any]:
            words = guard(cursor)()
            same = await words
            found = [same is words, next(words), in_flight(guard), [word async for word in same], in_flight(guard)]
            other = guard(cursor)()
            other.left.clear()
            outcome(world.spawn(guard.reload))
            found += [await other, in_flight(guard)]
            await other.aclose()
            return [*found, in_flight(guard)]

        assert [True, "a", 1, ["b", "c"], 0, 1, 1, 0] == asyncio.run(main())

    def test_an_error_ends_it(self, guard: ModelGuard[Any]) -> None:
        """It counts as the model's."""
        cursor = guard(lambda _model: self.Cursor([]))()

        async def main() -> None:
            await cursor

        with pytest.raises(TypeError):
            asyncio.run(main())
        assert guard.engine.state.current is not None
        assert (0, 1) == (in_flight(guard), guard.engine.state.current.errors)

    def test_no_way_is_added(self, guard: ModelGuard[Any]) -> None:
        """What is an iterator alone stays one."""
        words = guard(returns_iterator)()
        assert (False, False) == (inspect.isawaitable(words), hasattr(words, "__anext__"))


class TestFutures:
    def test_keep_their_lease_until_they_are_done(self, guard: ModelGuard[Any]) -> None:
        """A future that a guarded function returns is returned as it is, and the model is in use until it is done."""
        future: Future[int] = Future()
        assert guard(lambda _model: future)() is future
        assert 1 == in_flight(guard)
        future.set_result(7)
        assert 0 == in_flight(guard)

    def test_of_an_event_loop_do_too(self, guard: ModelGuard[Any]) -> None:
        """The same for tasks, cancelled ones included."""

        async def work(model: Any) -> list[str]:
            return list(model.words(TEXT))

        async def main() -> list[Any]:
            task, other = (guard(lambda model: asyncio.ensure_future(work(model)))() for _ in range(2))
            before = in_flight(guard)
            other.cancel()
            await asyncio.wait([task, other])
            return [before, await task, other.cancelled(), in_flight(guard)]

        assert [2, ["a", "b", "c"], True, 0] == asyncio.run(main())


class TestFiles:
    def test_may_be_used_in_with(self, guard: ModelGuard[Any]) -> None:
        """A file that a guarded function returns is in use until its ``with`` block ends."""
        with guard(returns_file)() as file:
            assert ("a\n", 1) == (file.readline(), in_flight(guard))
        assert (True, 0) == (file.closed, in_flight(guard))

    def test_of_another_kind_may_enter_as_somebody_else(self, guard: ModelGuard[Any]) -> None:
        """If ``with`` returns another object than the iterator, that object is passed on."""

        class Cursor(Countdown):
            def __enter__(self) -> str:
                return "entered"

            def __exit__(self, *_error: object) -> bool:
                return True

        with guard(lambda model: Cursor(model.words(TEXT)))() as entered:
            assert ("entered", 1) == (entered, in_flight(guard))
            raise ValueError("swallowed")
        assert 0 == in_flight(guard)

    def test_keep_their_own_face(self, guard: ModelGuard[Any]) -> None:
        """What is returned is otherwise what it was: its type, its methods, its attributes."""
        file = guard(returns_file)()
        assert (True, "a\nb\nc", False) == (isinstance(file, io.TextIOWrapper), file.read(), file.closed)
        file.close()
        assert file.closed


@pytest.mark.parametrize(
    "value", [[1], (1,), {1: 2}, "text", 7, None, range(3), {1}.__iter__, io.BytesIO, io.BytesIO(b"a")]
)
def test_what_is_not_lazy_is_returned_as_it_is(guard: ModelGuard[Any], value: Any) -> None:
    """Lists, texts and other finished results keep no lease and are not wrapped."""
    assert (True, 0) == (guard(lambda _model: value)() is value, in_flight(guard))
