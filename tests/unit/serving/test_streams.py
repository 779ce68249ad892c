"""``streams``: the parts of an item, as its consumer gets them from threads and event loops."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, ends_beside, next_turn, until

from modelguard import Breaker, Buffer, Execution, batched, deadline, guard, telemetry
from modelguard.errors import (
    BatchFailed,
    CallerGone,
    CircuitOpen,
    ConsumerTooSlow,
    DeadlineExceeded,
    GuardClosed,
    InvalidOption,
    ItemRefused,
    QueueFull,
    WouldDeadlock,
)
from modelguard.runtime.call_context import inline
from modelguard.serving import BatchedStream, Stream
from modelguard.serving.deadlines import WebRequest, on_behalf_of


class Steps:
    """A batch function that yields one step for each release of its gate."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.batches: list[list[Any]] = []
        self.waiting: list[Any] = []
        self.closed = threading.Event()

    def __call__(self, items: list[Any]) -> Iterator[list[Any]]:
        self.batches.append(items)
        number = 0
        try:
            while True:
                self.entered.release()
                assert self.gate.acquire(timeout=TIMEOUT)
                self.waiting.append((yield [f"{item}{number}" for item in items]))
                number += 1
        finally:
            self.closed.set()

    def busy(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.gate.release()


@pytest.fixture
def steps() -> Iterator[Steps]:
    made = Steps()
    yield made
    made.step(1000)


def together(f: Any, steps: Steps, *items: Any, **options: Any) -> list[Stream[Any]]:
    """Streams whose items share a batch: they queue while another batch runs, which then ends."""
    first = f.stream("first")
    steps.busy()
    streams = [f.stream(item, **options) for item in items]
    first.close()
    steps.step()
    steps.busy()
    return streams


def count_to_three(items: list[int]) -> Iterator[list[int]]:
    for number in range(3):
        yield [item + number for item in items]


def test_parts_come_to_threads_and_event_loops() -> None:
    """``for`` in a thread and ``async for`` on an event loop give the same parts."""
    f = batched(max_size=4)(count_to_three)
    assert isinstance(f, BatchedStream)

    async def consume(item: int) -> list[int]:
        return [part async for part in f.stream(item)]

    async def consume_all() -> list[list[int]]:
        return await asyncio.gather(*map(consume, range(10)))

    assert [[item, item + 1, item + 2] for item in range(10)] == asyncio.run(consume_all())
    assert [5, 6, 7] == list(f.stream(5))
    assert (11, 0) == (f.status().answered, f.status().failed)


def test_parts_come_before_the_end(steps: Steps) -> None:
    """A part is there as soon as it has been yielded."""
    f = batched(max_size=4)(steps)
    stream = f.stream("a")
    for number in range(3):
        steps.step()
        assert f"a{number}" == next(stream)
    stream.close()


def test_items_share_a_batch(steps: Steps) -> None:
    """What waits while a batch runs is in the next one, and each consumer gets its own parts."""
    f = batched(max_size=4)(steps)
    streams = together(f, steps, "a", "b")
    steps.step(2)
    assert [["a0", "a1"], ["b0", "b1"]] == [[next(stream), next(stream)] for stream in streams]
    assert [["first"], ["a", "b"]] == steps.batches


def close(stream: Stream[Any]) -> None:
    stream.close()


def leave_block(stream: Stream[Any]) -> None:
    with stream:
        pass


def close_async(stream: Stream[Any]) -> None:
    asyncio.run(stream.aclose())


async def _leave_block(stream: Stream[Any]) -> None:
    async with stream:
        pass


def leave_async_block(stream: Stream[Any]) -> None:
    asyncio.run(_leave_block(stream))


@pytest.mark.parametrize("leave", [close, leave_block, close_async, leave_async_block])
def test_who_leaves_drops_out_of_the_running_batch(leave: Callable[[Any], None], steps: Steps) -> None:
    """The others' parts are unharmed, the function learns it, and when all have left it is closed."""
    f = batched(max_size=4)(steps)
    leaves, stays = together(f, steps, "a", "b")
    steps.step()
    assert ("a0", "b0") == (next(leaves), next(stays))
    leave(leaves)
    assert [] == list(leaves), "a stream that was left has ended"
    steps.step(2)
    assert ["b1", "b2"] == [next(stays), next(stays)]
    assert [False, True] == steps.waiting[-1]
    steps.closed.clear()
    leave(stays)
    steps.step()
    assert steps.closed.wait(TIMEOUT)
    until(lambda: f.status().running == 0)
    assert 3 == f.status().cancelled, "the first one of all was cancelled as well"


def test_a_dropped_stream_leaves(steps: Steps) -> None:
    """A consumer that breaks out of its loop and forgets the stream has left."""
    f = batched(max_size=4)(steps)
    steps.step()
    for _ in f.stream("a"):
        break
    else:  # pragma: no cover
        raise AssertionError
    gc.collect()
    steps.step()
    assert steps.closed.wait(TIMEOUT)


def test_a_cancelled_task_leaves(steps: Steps) -> None:
    """The item of a task that is cancelled while it waits for a part drops out."""
    f = batched(max_size=4)(steps)

    async def consume() -> None:
        async for _ in f.stream("a"):
            pass

    async def cancel() -> None:
        task = asyncio.create_task(consume())
        await asyncio.to_thread(steps.busy)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert 1 == f.status().cancelled
    steps.step()
    assert steps.closed.wait(TIMEOUT)


def test_an_item_that_waits_is_not_computed_after_its_consumer_left(steps: Steps) -> None:
    """It is taken out of the queue."""
    f = batched(max_size=4)(steps)
    first = f.stream("first")
    steps.busy()
    f.stream("dropped").close()
    assert 0 == f.status().waiting
    first.close()
    steps.step()
    assert steps.closed.wait(TIMEOUT)
    assert [["first"]] == steps.batches


# Deadlines and refusals


@pytest.mark.parametrize("bound", ["option", "timeout", "block"])
def test_the_deadline_ends_the_stream(bound: str, steps: Steps) -> None:
    """It holds for the whole stream, whatever the function is doing."""
    f = batched(max_size=4, deadline="1s" if bound == "option" else None)(steps)
    steps.step()
    if bound == "block":
        with deadline("1s"):
            stream = f.stream("a")
    else:
        stream = f.stream("a", timeout="1s" if bound == "timeout" else None)
    assert "a0" == next(stream)
    with pytest.raises(DeadlineExceeded):
        next(stream)
    assert [] == list(stream), "the error comes once"
    steps.step()
    assert steps.closed.wait(TIMEOUT)


def test_refusals_are_raised_when_the_item_is_queued(steps: Steps) -> None:
    """Not at the first part: a web service answers 503 before the response begins."""
    f = batched(max_size=1, max_queue=1)(steps)
    running = f.stream("a")
    steps.busy()
    waiting = f.stream("b")
    with pytest.raises(QueueFull):
        f.stream("c")
    assert (1, 1) == (f.status().waiting, f.status().refused_full)
    running.close()
    waiting.close()


def test_a_disconnected_client_leaves(steps: Steps) -> None:
    """The middleware's web request cancels the stream, whose handler gets CallerGone."""
    f = batched(max_size=4)(steps)
    web_request = WebRequest()
    with on_behalf_of(web_request):
        stream = f.stream("a")
    steps.step()
    assert "a0" == next(stream)
    web_request.disconnect()
    with pytest.raises(CallerGone):
        next(stream)
    steps.step()
    assert steps.closed.wait(TIMEOUT)


def test_the_breaker_opens() -> None:
    """Batches that raise count as those of other functions do."""

    @batched(max_size=1, breaker=Breaker(failures=2))
    def f(items: list[int]) -> Iterator[list[int]]:
        yield items
        raise OSError("no device")

    for _ in range(2):
        with pytest.raises(OSError, match="no device"):
            list(f.stream(1))
    until(lambda: f.status().state == "circuit open")
    with pytest.raises(CircuitOpen):
        f.stream(1)


@pytest.mark.timeout(60)
def test_a_dropped_stream_waits_for_no_lock(steps: Steps) -> None:
    """The garbage collector may end it in code that holds the very lock for which the function's other callers wait."""
    f = batched(max_size=4)(steps)
    steps.step()
    kept = [f.stream("a")]
    assert "a0" == next(kept[0])
    ended = ends_beside(f, kept.clear)
    steps.step()
    assert ended
    assert 1 == f.status().cancelled
    until(lambda: f.status().running == 0)


def test_a_consumer_that_waits_gets_the_end_when_another_thread_or_task_closes(
    steps: Steps,
) -> None:
    """As when a service closes the answer of a request that it gives up."""
    f = batched(max_size=2)(steps)
    one = f.stream(1)
    consumer = threading.Thread(target=lambda: parts.extend(one), daemon=True)
    parts: list[Any] = []
    consumer.start()
    until(lambda: one._waited_for)
    one.close()
    consumer.join(TIMEOUT)
    assert (False, []) == (consumer.is_alive(), parts)

    async def consume(stream: Stream[Any]) -> list[Any]:
        return [part async for part in stream]

    async def close_beside() -> None:
        other = f.stream(2)
        consumer = asyncio.create_task(consume(other))
        await next_turn()
        await other.aclose()
        assert [] == await asyncio.wait_for(consumer, TIMEOUT)

    asyncio.run(close_beside())


@pytest.mark.parametrize("inlined", [False, True])
def test_a_failure_is_no_end(*, inlined: bool) -> None:
    """A function that raises what ends an ``async for`` has not made all parts."""

    @batched(max_size=2)
    def f(items: list[int]) -> Iterator[list[int]]:
        yield items
        raise StopAsyncIteration

    async def consume() -> None:
        async for _ in f.stream(1):
            pass

    with inline() if inlined else nullcontext(), pytest.raises(BatchFailed, match="StopAsyncIteration"):
        asyncio.run(consume())


def test_a_slow_consumer_is_dropped() -> None:
    """Its neighbour and the queue go on."""

    @batched(max_size=2, buffer=Buffer(parts=2, slow_after=0), max_wait="20s")
    def f(items: list[str]) -> Iterator[list[Any]]:
        yield items
        for _ in range(3):
            yield [0, StopIteration]

    slow, quick = f.stream("slow"), f.stream("quick")
    assert ["quick"] == list(quick)
    until(lambda: f.status().running == 0)
    assert ("slow", 0) == (next(slow), next(slow))
    with pytest.raises(ConsumerTooSlow, match="Buffer"):
        next(slow)


def test_no_consumer_gets_the_error_of_one_that_has_left() -> None:
    """A web service would tell it that its own input is bad."""
    gone = threading.Event()

    @batched(max_size=2, max_wait="20s")
    def f(items: list[str]) -> Iterator[list[str]]:
        yield items
        assert gone.wait(TIMEOUT)
        raise ValueError(f"cannot read {items[0]}")

    bad, good = f.stream("bad"), f.stream("good")
    assert "bad" == next(bad)
    bad.close()
    gone.set()
    assert "good" == next(good)
    with pytest.raises(BatchFailed, match="a batch of 2: ValueError: cannot read bad"):
        next(good)


# Closing and events


def test_closing_waits_for_streams() -> None:
    """What runs goes on to its end; nothing more is admitted."""
    f = batched(max_size=4)(count_to_three)
    stream = f.stream(1)
    f.close()
    assert [1, 2, 3] == list(stream)
    with pytest.raises(GuardClosed):
        f.stream(1)


def test_a_batch_of_streams_emits_events(events: list[telemetry.Event]) -> None:
    """One event for the batch, and one more if it raised."""

    @batched(max_size=4, name="f")
    def f(items: list[int]) -> Iterator[list[int]]:
        yield items
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        list(f.stream(1))
    until(lambda: len(events) == 2)
    finished, errored = events
    assert isinstance(finished, telemetry.BatchFinished)
    assert (1, 1) == (finished.size, finished.failed)
    assert isinstance(errored, telemetry.BatchErrored)
    assert "OSError: no device" == errored.error


# Guards


def test_the_lease_lasts_as_long_as_the_stream() -> None:
    """A reload in the middle waits for the stream, which keeps its model to the end."""
    loads = iter(range(10))
    model = guard(lambda: [next(loads)], reload_on=None)
    gate = threading.Semaphore(1)

    @batched(max_size=4)
    @model
    def f(loaded: list[int], items: list[int]) -> Iterator[list[int]]:
        for _ in range(2):
            assert gate.acquire(timeout=TIMEOUT)
            yield [loaded[0] for _ in items]

    stream = f.stream(1)
    assert 0 == next(stream)
    assert 1 == model.status().in_flight
    model.reload()
    gate.release()
    assert [0] == list(stream)
    until(lambda: model.status().in_flight == 0)
    gate.release()
    assert 1 == next(f.stream(1))


def test_leaving_ends_the_lease(steps: Steps) -> None:
    """A consumer that leaves in the middle holds no generation."""
    model = guard(dict, reload_on=None)

    @batched(max_size=4)
    @model
    def f(_model: dict[Any, Any], items: list[Any]) -> Iterator[list[Any]]:
        yield from steps(items)

    stream = f.stream("a")
    steps.step()
    assert "a0" == next(stream)
    stream.close()
    steps.step()
    assert steps.closed.wait(TIMEOUT)
    until(lambda: model.status().in_flight == 0)


# Methods, pickling, inline


class Service:
    def __init__(self, start: int) -> None:
        self.start = start

    @batched(max_size=4)
    def count(self, items: list[int]) -> Iterator[list[int]]:
        for number in range(2):
            yield [self.start + item + number for item in items]


def test_in_a_class_it_is_a_method() -> None:
    """Each instance has a queue of its own."""
    one, two = Service(10), Service(20)
    assert ([11, 12], [21, 22]) == (list(one.count.stream(1)), list(two.count.stream(1)))
    assert one.count is one.count is not two.count
    with pytest.raises(TypeError, match="call it on an instance"):
        Service.count.stream(1)


@batched(max_size=4)
def at_the_top(items: list[int]) -> Iterator[list[int]]:
    yield items


def test_it_is_pickled_by_reference() -> None:
    """As functions are, by module and name."""
    assert at_the_top is pickle.loads(pickle.dumps(at_the_top))


def test_inline_each_part_is_made_when_it_is_asked_for() -> None:
    """In tests a stream runs in its consumer's thread, so an endless one is no problem."""
    me = threading.current_thread()
    seen: list[Any] = []

    @batched(max_size=4)
    def f(items: list[int]) -> Iterator[list[int]]:
        try:
            while True:
                seen.append(threading.current_thread())
                yield items
        finally:
            seen.append("closed")

    with inline():
        stream = f.stream(7)
        assert [] == seen
        assert (7, 7) == (next(stream), next(stream))
        stream.close()
    assert [me, me, "closed"] == seen
    assert 0 == f.status().batches


def test_inline_a_stream_may_be_closed_during_a_step() -> None:
    """By another thread, as by a server that notices a disconnect: whoever waits for the part gets the end."""
    begun, goes_on = threading.Event(), threading.Event()
    seen: list[Any] = []

    @batched(max_size=4)
    def f(items: list[int]) -> Iterator[list[int]]:
        try:
            begun.set()
            assert goes_on.wait(10)
            yield items
        finally:
            seen.append("closed")

    with inline():
        stream = f.stream(7)
        reader = threading.Thread(target=lambda: seen.append(list(stream)))
        reader.start()
        assert begun.wait(10)
        stream.close()
        goes_on.set()
        reader.join(10)
    assert ["closed", []] == seen


@pytest.mark.parametrize(
    ("part", "error"),
    [(StopIteration, None), (ValueError("bad"), ValueError), (None, BatchFailed)],
)
def test_inline_streams_end_as_others_do(part: Any, error: type[Exception] | None) -> None:
    """With the end or with the item's error; what is yielded is checked."""

    @batched(max_size=4)
    def f(items: list[int]) -> Iterator[Any]:
        yield items
        yield None if part is None else [part]
        raise AssertionError("not reached")

    with inline():
        stream = f.stream(1)
        assert 1 == next(stream)
        if error is None:
            assert [] == list(stream)
        else:
            with pytest.raises(error):
                next(stream)


def test_inline_each_step_runs_in_the_context_of_the_call() -> None:
    """So the mistake of a function that streams from itself is found, wherever its parts are asked for."""

    @batched(max_size=4)
    def f(items: list[int]) -> Iterator[list[int]]:
        yield [next(f.stream(item)) for item in items]

    with inline():
        stream = f.stream(1)
        with pytest.raises(WouldDeadlock, match="its batch function calls it"):
            next(stream)


def test_inline_async_streams() -> None:
    """An asynchronous generator is stepped through from a thread and from a running event loop."""

    @batched(max_size=4)
    async def f(items: list[int]) -> AsyncIterator[list[int]]:
        for number in range(3):
            await next_turn()
            yield [item + number for item in items]

    async def consume() -> list[int]:
        return [part async for part in f.stream(1)]

    with inline():
        assert [1, 2, 3] == list(f.stream(1)) == asyncio.run(consume())


# Mistakes


def test_a_thread_cannot_wait_on_an_event_loop() -> None:
    """``for`` on a running event loop would block it."""
    f = batched(max_size=4)(count_to_three)

    async def consume() -> list[int]:
        stream = f.stream(1)
        with pytest.raises(WouldDeadlock, match="async for part in"):
            next(stream)
        with pytest.raises(TypeError, match="async for part in"):  # what takes either kind of iterator takes the other
            iter(stream)
        return [part async for part in stream]

    assert [1, 2, 3] == asyncio.run(consume())


def test_a_stream_has_one_consumer_at_a_time(steps: Steps) -> None:
    """Two that wait for the same part would each miss some; the second gets an error, and the first is unharmed."""
    f = batched(max_size=4)(steps)
    stream = f.stream("a")

    async def both() -> Any:
        first = asyncio.create_task(anext(stream))
        await next_turn()
        with pytest.raises(RuntimeError, match="somebody else waits for the next part"):
            await anext(stream)
        steps.step()
        return await first

    assert "a0" == asyncio.run(both())


def test_the_batch_function_cannot_stream_from_itself() -> None:
    """It would wait for the thread that it occupies."""

    @batched(max_size=4)
    def f(items: list[int]) -> Iterator[list[Any]]:
        yield [next(f.stream(item)) for item in items]

    with pytest.raises(WouldDeadlock, match="its batch function calls it"):
        list(f.stream(1))


@pytest.mark.parametrize("door", ["__call__", "aio", "submit", "map"])
def test_there_is_no_single_result(door: str) -> None:
    """The error says how to get the parts."""
    f = batched(max_size=4)(count_to_three)
    with pytest.raises(TypeError, match=r"for part in f\.stream\(item\)"):
        getattr(type(f), door)(f, 1)


def test_a_function_of_results_has_no_stream() -> None:
    """The error says how to get the result."""
    f = batched(max_size=4)(lambda items: items)
    with pytest.raises(TypeError, match=r"Write: f\(item\)"):
        f.stream(1)  # type: ignore[attr-defined]


def test_wrong_arguments() -> None:
    """They are refused when the item is queued, as for other functions."""
    f = batched(max_size=4)(count_to_three)
    with pytest.raises(TypeError, match="takes one item by position"):
        f.stream(1, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        f.stream(1, colour="red")
    with pytest.raises(ItemRefused, match="not a list"):
        f.stream([1, 2])  # type: ignore[arg-type]
    gc.collect()
    assert (0, 0) == (f.status().cancelled, f.status().waiting), "what was not queued is not cancelled either"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"buffer": 0}, "whole number of at least 1"),
        ({"execution": Execution(loop="own")}, "only an async function runs on an event loop"),
    ],
)
def test_wrong_options(options: dict[str, Any], says: str) -> None:
    """At the definition."""
    with pytest.raises(InvalidOption, match=says):
        batched(max_size=4, **options)(count_to_three)


@pytest.mark.parametrize("option", [{"buffer": 4}, {"buffer": Buffer(slow_after=1)}])
def test_options_of_streams_are_for_streams(option: dict[str, Any]) -> None:
    """Given for a function of results, they would do nothing."""
    with pytest.raises(InvalidOption, match="only a generator function has a stream"):
        batched(max_size=4, **option)(lambda items: items)
