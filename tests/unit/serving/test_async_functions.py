"""Batch functions that are ``async``: on an event loop of their own, or on that of their callers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, next_turn, until

from modelguard import Batched, Breaker, Execution, batched, guard
from modelguard.errors import BatchFailed, DeadlineExceeded, NotSupported, WrongResults
from modelguard.runtime import event_loops
from modelguard.runtime.call_context import inline
from modelguard.runtime.event_loops import OwnLoop
from modelguard.serving import BatchedStream, _batcher


async def double(items: list[int], *, by: int = 2) -> list[int]:
    await next_turn()
    return [item * by for item in items]


def test_every_kind_of_call_works() -> None:
    """Threads and event loops call it as they call other batched functions."""
    f = batched(max_size=4)(double)
    assert isinstance(f, Batched)
    assert 6 == f(3) == f.submit(3).result(TIMEOUT) == asyncio.run(f.aio(3))
    assert [0, 3, 6, 9, 12] == list(f.map(range(5), by=3))


def where(_items: list[Any]) -> list[Any]:
    return [(threading.current_thread().name, asyncio.get_running_loop()) for _ in _items]


async def where_async(items: list[Any]) -> list[Any]:
    return where(items)


def test_it_runs_on_a_loop_of_its_own_which_stays() -> None:
    """What it keeps between its calls, such as a client with open connections, belongs to one event loop."""
    f = batched(max_size=4, name="f")(where_async)
    found = [f(1), asyncio.run(f.aio(1)), f.submit(1).result(TIMEOUT)]
    assert {("modelguard-loop-f", found[0][1])} == {*found}


def test_the_loop_ends_with_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that nobody refers to any more leaves no thread."""
    monkeypatch.setattr(_batcher, "LINGER", 0.01)
    f = batched(max_size=4, name="short-lived")(where_async)
    loop = f(1)[1]
    gone = weakref.ref(f)
    del f

    def collected() -> bool:
        gc.collect()
        return gone() is None and loop.is_closed()

    until(collected)


def test_what_runs_on_the_loop_ends_with_it() -> None:
    """Tasks that a function has left behind are cancelled, and not destroyed while they wait."""
    own = OwnLoop("f")
    loop = own.get()
    task = asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), loop)
    del own
    gc.collect()
    until(task.cancelled)
    until(loop.is_closed)


class Service:
    @batched(max_size=4)
    async def where(self, items: list[Any]) -> list[Any]:
        return where(items)


def test_instances_share_the_loop_of_their_method() -> None:
    """Many instances do not start many threads."""
    assert 1 == len({Service().where(1)[1] for _ in range(3)})


def test_on_the_callers_loop() -> None:
    """With loop="caller" it may use what belongs to the application's loop."""
    f = batched(max_size=4, execution=Execution(loop="caller"))(where_async)

    async def call() -> bool:
        return all(found[1] is asyncio.get_running_loop() for found in await asyncio.gather(f.aio(1), f.aio(2)))

    assert asyncio.run(call())
    assert asyncio.run(call()), "the next event loop is used as well"


def test_the_callers_loop_for_submitted_items() -> None:
    """Submitted on a running loop, it runs there."""
    f = batched(max_size=4, execution=Execution(loop="caller"))(where_async)

    async def call() -> bool:
        return (await asyncio.wrap_future(f.submit(1)))[1] is asyncio.get_running_loop()

    assert asyncio.run(call())


@pytest.mark.parametrize("door", ["__call__", "submit"])
def test_the_callers_loop_needs_one(door: str) -> None:
    """A thread has none."""
    f = batched(max_size=4, execution=Execution(loop="caller"))(where_async)
    with pytest.raises(NotSupported, match="await it there, or leave out loop="):
        getattr(f, door)(1)


def test_the_callers_loop_ends_in_the_middle() -> None:
    """Its batch is cancelled with it, and the function serves on."""
    begun = threading.Event()

    @batched(max_size=4, execution=Execution(loop="caller"))
    async def f(items: list[Any]) -> list[Any]:
        begun.set()
        if "forever" in items:
            await asyncio.Event().wait()
        return items

    async def leave() -> None:
        task = asyncio.create_task(f.aio("forever"))
        await asyncio.to_thread(begun.wait, TIMEOUT)
        del task

    asyncio.run(leave())
    until(lambda: f.status().running == 0)
    assert 1 == asyncio.run(f.aio(1))


class OnLoops:
    """Calls of one function from several event loops. The first one keeps it busy until the others wait."""

    def __init__(self, **options: Any) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.f = batched(max_size=8, execution=Execution(loop="caller"), **options)(self.compute)
        self.parts = batched(max_size=8, execution=Execution(loop="caller"), **options)(self.steps)
        self.batches: list[list[Any]] = []

    async def compute(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        self.begun.set()
        while "first" in items and not self.gate.is_set():
            await next_turn()
        return [ValueError() if item == "bad" else asyncio.get_running_loop() for item in items]

    async def steps(self, items: list[Any]) -> AsyncIterator[list[Any]]:
        for _ in range(2):
            yield await self.compute(items)

    async def stay(self, item: Any) -> bool:
        return await self.f.aio(item) is asyncio.get_running_loop()

    async def stay_in_parts(self, item: Any) -> bool:
        return {True} == {part is asyncio.get_running_loop() async for part in self.parts.stream(item)}

    def behind_the_first(
        self, call: Callable[[Any], Any], queued: Callable[[], int], *items: Any
    ) -> list[bool | BaseException]:
        """Whether each of these calls, on a loop of its own, was computed there; or what it raised."""
        with ThreadPoolExecutor(len(items) + 1) as pool:
            calls = [pool.submit(lambda: asyncio.run(call("first")))]
            assert self.begun.wait(TIMEOUT)
            calls += [pool.submit(lambda item=item: asyncio.run(call(item))) for item in items]
            until(lambda: queued() == len(items))
            self.gate.set()
            return [one.exception(TIMEOUT) or one.result() for one in calls]


def test_callers_on_several_loops() -> None:
    """What each of them waits for runs on its own loop, not on that of whoever came first."""
    case = OnLoops()
    found = case.behind_the_first(case.stay, lambda: case.f.status().waiting, 1, 2, 3, 4)
    assert [True] * 5 == found
    assert [["first"], [1], [2], [3], [4]] == [case.batches[0], *sorted(case.batches[1:])]


def test_streams_on_several_loops() -> None:
    """Each step runs on the loop of its consumer."""
    case = OnLoops()
    assert [True] * 4 == case.behind_the_first(case.stay_in_parts, lambda: case.parts.status().waiting, 1, 2, 3)


def test_an_error_on_one_of_several_loops() -> None:
    """It belongs to its own item."""
    case = OnLoops()
    *others, failed = case.behind_the_first(case.stay, lambda: case.f.status().waiting, 1, "bad")
    assert [True, True] == others
    assert isinstance(failed, ValueError)
    assert (1, 0) == (case.f.status().failed, case.f.status().failed_batches)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "stopped"])
@pytest.mark.parametrize("door", ["aio", "stream"])
def test_a_loop_that_ends_while_others_wait(door: str, monkeypatch: pytest.MonkeyPatch, *, closed: bool) -> None:
    """Callers on other loops get their results, and the breaker does not take it for a fault of the model."""
    monkeypatch.setattr(event_loops, "_LOOK", 0.01)
    case = OnLoops(breaker=Breaker(failures=1))
    f, call = (case.f, case.stay) if door == "aio" else (case.parts, case.stay_in_parts)
    loop = asyncio.new_event_loop()
    left = []

    def with_one_that_ends() -> int:
        if not left:
            left.append(loop.create_task(call("left")))
            loop.run_until_complete(next_turn())
            if closed:
                loop.close()
        return f.status().waiting - 1

    found = case.behind_the_first(call, with_one_that_ends, 1, 2)
    assert ([True, True, True], "open") == (found, f.status().state)
    if not closed:
        left[0].cancel()
        finish(loop)


def test_a_submitted_item_whose_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its future says so: somebody elsewhere may wait for it."""
    monkeypatch.setattr(event_loops, "_LOOK", 0.01)
    case = OnLoops()

    async def submit() -> Future[Any]:
        future = case.f.submit("first")
        await asyncio.to_thread(case.begun.wait, TIMEOUT)
        return future

    future = asyncio.run(submit())
    with pytest.raises(RuntimeError, match="the event loop on which it runs has ended"):
        future.result(TIMEOUT)


def test_a_batch_on_a_loop_that_was_closed_ends_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coroutine that its closed loop never runs again raises nothing when it is dropped."""
    monkeypatch.setattr(event_loops, "_LOOK", 0.01)
    seen: list[object] = []
    gc.collect()  # what other tests have left
    monkeypatch.setattr("sys.unraisablehook", lambda found: seen.append(found.exc_value))
    case = OnLoops()

    async def call() -> None:
        left = asyncio.create_task(case.stay("first"))
        await asyncio.to_thread(case.begun.wait, TIMEOUT)
        assert not left.done()

    def on_a_loop() -> None:
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(call())

    on_a_loop()
    until(lambda: case.f.status().running == 0)
    gc.collect()
    assert [] == seen


def test_nobody_waits_on_a_loop_that_has_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then its thread is free again, also if the loop is never closed."""
    monkeypatch.setattr(event_loops, "_LOOK", 0.01)
    case = OnLoops()
    loop = asyncio.new_event_loop()

    async def submit() -> Future[Any]:
        future = case.f.submit("first")
        await asyncio.to_thread(case.begun.wait, TIMEOUT)
        return future

    assert loop.run_until_complete(submit()).cancel()
    until(lambda: case.f.status().running == 0)
    finish(loop)


def finish(loop: asyncio.AbstractEventLoop) -> None:
    """Run what is left on a loop that has stopped, and close it."""

    async def rest() -> None:
        await next_turn()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    loop.run_until_complete(rest())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


# Blocking, deadlines, cancellation


def test_a_function_that_blocks_its_loop() -> None:
    """It blocks nobody else: deadlines hold, and another function is computed meanwhile."""
    gate = threading.Event()
    began = threading.Event()

    @batched(max_size=4, deadline="50ms")
    async def blocks(items: list[int]) -> list[int]:
        began.set()
        gate.wait(TIMEOUT)
        return items

    other = batched(max_size=4)(double)

    async def call() -> int:
        while not began.is_set():  # on a busy machine the time may be over before it begins
            with pytest.raises(DeadlineExceeded):
                await blocks.aio(1)
        return await other.aio(3)

    assert 6 == asyncio.run(call())
    gate.set()
    until(lambda: blocks.status().running == 0)


def test_it_is_cancelled_when_all_callers_have_left() -> None:
    """A coroutine can be stopped, so nothing is computed for nobody."""
    cancelled = threading.Event()
    batches: list[list[int]] = []

    @batched(max_size=4)
    async def f(items: list[int]) -> list[int]:
        batches.append(items)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return items

    futures = [f.submit(0)]
    until(lambda: len(batches) == 1)
    futures += [f.submit(1), f.submit(2)]
    futures[0].cancel()
    assert cancelled.wait(TIMEOUT)
    cancelled.clear()
    until(lambda: len(batches) == 2)
    futures[1].cancel()
    until(lambda: f.status().cancelled == 2)
    assert not cancelled.is_set()
    futures[2].cancel()
    assert cancelled.wait(TIMEOUT)
    until(lambda: f.status().running == 0)
    assert ([[0], [1, 2]], 0, 0) == (batches, f.status().failed_batches, f.status().run.max)


def test_the_deadline_cancels_it() -> None:
    """Once nobody waits any more."""
    steps: list[str] = []

    @batched(max_size=4, deadline="20ms")
    async def f(items: list[int]) -> list[int]:
        steps.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("ended")
        return items

    with pytest.raises(DeadlineExceeded):
        f(1)
    until(lambda: f.status().running == 0)
    assert steps in ([], ["began", "ended"]), "on a busy machine the time may be over before it begins"


def test_a_function_that_ignores_its_cancellation() -> None:
    """It keeps its batch until it ends, as a plain function does, and then serves on."""
    gate, began = threading.Event(), threading.Event()

    @batched(max_size=4)
    async def f(items: list[int]) -> list[int]:
        began.set()
        while not gate.is_set():
            try:
                await next_turn()
            except asyncio.CancelledError:
                continue
        return items

    future = f.submit(1)
    assert began.wait(TIMEOUT)
    future.cancel()
    assert 1 == f.status().running
    gate.set()
    assert 2 == f(2)


# Errors


def test_items_at_fault_are_found() -> None:
    """A batch that raised is run again in parts, on the loop."""

    @batched(max_size=4, max_wait="20s")
    async def f(items: list[Any]) -> list[Any]:
        await next_turn()
        return [item + 1 for item in items]

    futures = [f.submit(item) for item in (1, "bad", 3, 4)]
    assert [2, 4, 5] == [futures[at].result(TIMEOUT) for at in (0, 2, 3)]
    with pytest.raises(TypeError):
        futures[1].result(TIMEOUT)


@pytest.mark.parametrize("stops", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_not_even_an_exit_ends_the_loop(stops: type[BaseException]) -> None:
    """It fails its batch alone."""

    @batched(max_size=4)
    async def f(items: list[int]) -> list[int]:
        if items == [0]:
            raise stops
        return items

    with pytest.raises(BatchFailed):
        f(0)
    assert 1 == f(1)


def test_results_are_checked() -> None:
    """One for each item, as for other functions."""

    @batched(max_size=4)
    async def f(items: list[int]) -> list[int]:
        return [*items, 0]

    with pytest.raises(WrongResults, match="it returned a list of 2 instead of 1 result"):
        f(1)


def test_an_object_with_an_async_call() -> None:
    """The kind of an object is that of its ``__call__``."""

    class Model:
        async def __call__(self, items: list[int]) -> list[int]:
            return items

    assert 3 == batched(max_size=4)(Model())(3)


# Streams, guards, forks, inline


def test_async_streams() -> None:
    """An asynchronous generator function yields parts, as a plain one does."""

    @batched(max_size=4)
    async def f(items: list[int]) -> AsyncIterator[list[Any]]:
        for number in range(3):
            await next_turn()
            yield [item + number if number < 2 or item else StopIteration for item in items]

    assert isinstance(f, BatchedStream)

    async def consume(item: int) -> list[int]:
        return [part async for part in f.stream(item)]

    async def consume_all() -> list[list[int]]:
        return await asyncio.gather(*map(consume, range(3)))

    assert [[0, 1], [1, 2, 3], [2, 3, 4]] == asyncio.run(consume_all())
    assert [5, 6, 7] == list(f.stream(5))


def test_an_async_stream_that_everybody_left_is_closed_at_once() -> None:
    """Also in the middle of a step: what it awaits is cancelled."""
    closed = threading.Event()

    @batched(max_size=4)
    async def f(items: list[int]) -> AsyncIterator[list[int]]:
        try:
            yield items
            await asyncio.Event().wait()
        finally:
            await next_turn()  # it may await while it is closed
            closed.set()

    stream = f.stream(1)
    assert 1 == next(stream)
    stream.close()
    assert closed.wait(TIMEOUT)
    until(lambda: f.status().running == 0)
    assert 0 == f.status().failed_batches


async def _aborted(items: list[str]) -> list[str]:
    if items != ["stay"]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("the request was aborted") from None
    return items


def _unclosable(items: list[str]) -> Iterator[list[str]]:
    try:
        while items != ["stay"]:
            yield items
    except GeneratorExit:
        raise ConnectionError("cannot end the session") from None
    yield items


async def _aunclosable(items: list[str]) -> AsyncIterator[list[str]]:
    yield items
    await _aborted(items)


@pytest.mark.parametrize("function", [_aborted, _unclosable, _aunclosable])
def test_what_it_makes_of_its_end_says_nothing_about_the_model(function: Any) -> None:
    """Callers that leave open no circuit, also where the function turns its cancellation into an error."""
    f: Any = batched(max_size=4, breaker=Breaker(failures=1))(function)
    for _ in range(2):
        if function is _aborted:
            future = f.submit("leave")
            until(lambda: f.status().running == 1)
            future.cancel()
        else:
            stream = f.stream("leave")
            assert "leave" == next(stream)
            stream.close()
        until(lambda: f.status().running == 0)
    assert ("open", 0, 0) == (f.status().state, f.status().failed, f.status().failed_batches)
    assert "stay" == (f("stay") if function is _aborted else next(f.stream("stay")))


def test_async_streams_on_the_callers_loop() -> None:
    """With loop="caller" each step runs there."""

    @batched(max_size=4, execution=Execution(loop="caller"))
    async def f(items: list[int]) -> AsyncIterator[list[Any]]:
        for _ in range(2):
            yield [asyncio.get_running_loop() for _ in items]

    async def consume() -> set[Any]:
        return {part is asyncio.get_running_loop() async for part in f.stream(1)}

    assert {True} == asyncio.run(consume())


def test_on_a_guarded_function() -> None:
    """Each batch is one call of the guard, which lends its model for as long as the coroutine runs."""
    model = guard(lambda: {"by": 3}, reload_on=None)
    leased: list[int] = []

    @batched(max_size=4)
    @model
    async def f(loaded: dict[str, int], items: list[int]) -> list[int]:
        await next_turn()
        leased.append(model.status().in_flight)
        return [item * loaded["by"] for item in items]

    assert 6 == f(2)
    assert [1] == leased
    until(lambda: model.status().in_flight == 0)


def test_inline_it_runs_at_once() -> None:
    """In a thread and on a running event loop: the result is there when the call returns."""
    f = batched(max_size=4)(double)

    async def call() -> int:
        return await f.aio(4)

    with inline():
        assert (6, 8) == (f(3), asyncio.run(call()))
        with pytest.raises(TypeError):
            f(object())  # type: ignore[arg-type]


def test_a_forked_child_has_a_loop_of_its_own() -> None:
    """The thread of the parent's loop is not in the child."""
    own = OwnLoop("f")
    loop = own.get()
    own.after_fork_in_child()
    try:
        assert own.get() is not loop
    finally:
        loop.call_soon_threadsafe(loop.stop)


def test_a_task_that_exits_ends_its_batch_alone() -> None:
    """sys.exit() in a task is a failure of its batch, and not the end of the event loop for all others."""

    async def leave() -> None:
        sys.exit(3)

    @batched(max_size=1)
    async def double(items: list[int]) -> list[int]:
        if items == [0]:
            task = asyncio.create_task(leave())
            await asyncio.gather(task)
        return [2 * item for item in items]

    with pytest.raises(BatchFailed, match="SystemExit"):
        double(0)
    assert 4 == double(2)
    double.close()
