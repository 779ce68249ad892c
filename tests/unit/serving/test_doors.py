"""``doors`` and ``batcher``: three doors to one queue, with real threads that wait for gates and not for time."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest

from modelguard import Breaker, batched, deadline, guard, telemetry
from modelguard.errors import (
    BatchFailed,
    CallerGone,
    CircuitOpen,
    DeadlineExceeded,
    GuardClosed,
    InvalidOption,
    ItemRefused,
    ItemTooHeavy,
    Overloaded,
    QueueFull,
    WouldDeadlock,
    WrongResults,
)
from modelguard.serving.scope import Hangup, hangup, left

TIMEOUT = 20.0


class Gated:
    """A batch function that computes when it is let, and remembers its batches and their threads."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[Any]] = []
        self.threads: set[str] = set()

    def __call__(self, items: list[Any], *, by: int = 1) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        self.batches.append(list(items))
        self.entered.release()
        assert self.gate.wait(TIMEOUT)
        if "bad" in items:
            raise ValueError("bad item")
        return [item * by for item in items]

    def busy(self) -> None:
        """Wait until a batch is being computed."""
        assert self.entered.acquire(timeout=TIMEOUT)


@pytest.fixture
def model() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


@pytest.fixture
def events() -> Iterator[list[telemetry.Event]]:
    heard: list[telemetry.Event] = []
    telemetry.set_hooks([heard.append])
    yield heard
    telemetry.set_hooks(None)


def queued(f: Any, model: Gated, *items: Any, **options: Any) -> list[Future[Any]]:
    """One item is being computed, and these wait behind it."""
    f.submit("first")
    model.busy()
    return [f.submit(item, **options) for item in items]


def until(told: Callable[[], bool]) -> None:
    """Spin until it is so; for what another thread does next."""
    end = time.monotonic() + TIMEOUT
    while not told():
        assert time.monotonic() < end
        os.sched_yield()


# Three doors


def test_all_doors_lead_into_the_same_batch(model: Gated) -> None:
    """A thread, a task and a future share a run of the function."""
    f = batched(max_size=8)(model)
    queued(f, model)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(f("thread")))
    thread.start()
    until(lambda: f.status().waiting == 1)

    async def task() -> Any:
        mine = asyncio.create_task(f.aio("task"))
        await asyncio.to_thread(until, lambda: f.status().waiting == 2)
        future = f.submit("future")
        model.gate.set()
        return await mine, await asyncio.wrap_future(future)

    assert ("task", "future") == asyncio.run(task())
    thread.join(TIMEOUT)
    assert ["thread"] == results
    assert [["first"], ["thread", "task", "future"]] == model.batches


def test_the_function_runs_on_a_thread_of_its_own(model: Gated) -> None:
    """Neither the caller's nor the loop's; one unless more are asked for."""
    model.gate.set()
    f = batched(max_size=2, name="f")(model)

    async def main() -> list[Any]:
        return await asyncio.gather(*(f.aio(n) for n in range(10)))

    assert list(range(10)) == asyncio.run(main())
    assert {"modelguard-batch-f"} == model.threads


def test_workers_compute_side_by_side(model: Gated) -> None:
    """As many batches at once as there are workers, and no more."""
    f = batched(max_size=1, workers=2)(model)
    futures = [f.submit(n) for n in range(4)]
    model.busy()
    model.busy()
    assert 2 == f.status().running
    assert 2 == f.status().waiting
    model.gate.set()
    assert [0, 1, 2, 3] == [future.result(TIMEOUT) for future in futures]


def test_extra_keyword_arguments_reach_the_function(model: Gated) -> None:
    """Items with other arguments have a batch of their own; True is not 1."""
    f = batched(max_size=8)(model)
    futures = [*queued(f, model, 1, 2, by=2), *(f.submit(n, by=3) for n in (1, 2)), f.submit(1, by=True)]
    model.gate.set()
    assert [2, 4, 3, 6, 1] == [future.result(TIMEOUT) for future in futures]
    assert [["first"], [1, 2], [1, 2], [1]] == model.batches


def test_map_yields_in_order_and_takes_no_more_than_it_needs(model: Gated) -> None:
    """It may be given an endless iterator."""
    model.gate.set()
    f = batched(max_size=4)(model)
    numbers = iter(range(10**9))
    found = f.map(numbers)
    assert [0, 1, 2] == [next(found) for _ in range(3)]
    assert next(numbers) <= 12
    found.close()
    assert list(range(100)) == list(f.map(range(100)))
    assert [] == list(f.map([]))


def test_map_waits_for_its_own_items_when_the_queue_is_full(model: Gated) -> None:
    """Others may have filled it; only if none of its own are there does it fail."""
    f = batched(max_size=2, max_queue=2)(model)
    futures = queued(f, model, "a", "b")
    with pytest.raises(QueueFull):
        list(f.map([1, 2]))
    model.gate.set()
    assert ["a", "b"] == [future.result(TIMEOUT) for future in futures]
    assert list(range(20)) == list(f.map(range(20)))


def test_map_raises_in_the_items_place(model: Gated) -> None:
    """What came before has been yielded, and what is queued is dropped."""
    model.gate.set()
    f = batched(max_size=2)(model)
    found = f.map(["a", "b", "bad", "c"])
    assert ["a", "b"] == [next(found), next(found)]
    with pytest.raises(ValueError, match="bad item"):
        next(found)


class Service:
    """Batches as a method."""

    def __init__(self, by: int) -> None:
        self.by = by

    @batched(max_size=4)
    def times(self, items: list[int], *, plus: int = 0) -> list[int]:
        """Multiplies."""
        return [item * self.by + plus for item in items]


class Derived(Service):
    @batched(max_size=4)
    def times(self, items: list[int], *, plus: int = 0) -> list[int]:
        return [1000 + super().times(items[0])]


class TestMethods:
    def test_each_instance_has_a_queue_of_its_own(self) -> None:
        """And its own counts."""
        two, three = Service(2), Service(3)
        assert (10, 15, 16) == (two.times(5), three.times(5), three.times(5, plus=1))
        assert (1, 2) == (two.times.status().answered, three.times.status().answered)
        assert two.times is two.times
        assert "Multiplies." == two.times.__doc__

    def test_the_class_alone_cannot_be_called(self) -> None:
        """There is no instance to run on."""
        with pytest.raises(TypeError, match="a method of Service: call it on an instance"):
            Service.times(5)  # type: ignore[arg-type, call-arg, operator]

    def test_copies_have_queues_of_their_own(self) -> None:
        """Pickled and copied instances work, and share nothing with the original."""
        one = Service(2)
        assert 10 == one.times(5)
        for other in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
            other.by = 7
            assert 35 == other.times(5)
            assert other.times is not one.times

    def test_an_instance_without_a_place_for_it_is_told_so(self) -> None:
        """With the fix."""

        class Slotted:
            __slots__ = ()

            @batched(max_size=4)
            def f(self, items: list[int]) -> list[int]:
                return items

        with pytest.raises(InvalidOption, match="__slots__"):
            Slotted().f(1)

    def test_an_instance_can_be_collected(self) -> None:
        """Its queue does not keep it, once its thread has ended."""
        one = Service(2)
        one.times(1)
        one.times.close()
        gone = weakref.ref(one)
        until(lambda: not any("Service.times" in thread.name for thread in threading.enumerate()))
        del one
        gc.collect()
        assert gone() is None


# Bounds and deadlines


def test_a_full_queue_refuses_at_once(model: Gated) -> None:
    """All doors alike."""
    f = batched(max_size=2, max_queue=2)(model)
    queued(f, model, 1, 2)
    with pytest.raises(QueueFull):
        f(3)
    with pytest.raises(QueueFull):
        f.submit(3)
    with pytest.raises(QueueFull):
        asyncio.run(f.aio(3))
    assert 3 == f.status().refused_full


@pytest.mark.parametrize("door", ["call", "aio", "submit"])
@pytest.mark.parametrize("how", ["timeout", "context", "option"])
def test_a_deadline_is_told_although_the_model_is_stuck(model: Gated, door: str, how: str) -> None:
    """At the deadline, and not when the model has ended; in the queue as in the batch."""
    f = batched(max_size=1, deadline=0.05 if how == "option" else None)(model)
    timeout = 0.05 if how == "timeout" else None

    def ask() -> Any:
        if door == "call":
            return f(1, timeout=timeout)
        if door == "submit":
            return f.submit(1, timeout=timeout).result(TIMEOUT)
        return asyncio.run(f.aio(1, timeout=timeout))

    with deadline(0.05) if how == "context" else contextlib.nullcontext():
        for _ in range(2):  # one that is being computed, and one that waits
            with pytest.raises(DeadlineExceeded):
                ask()
    assert (2, 1) == (f.status().expired, len(model.batches))


def test_deadlines_nest_and_only_shorten() -> None:
    """An inner block cannot give itself more time."""
    assert left() is None
    with deadline("1h"):
        outer = left()
        with deadline("2h"):
            assert left() <= outer  # type: ignore[operator]
        with deadline("1m"):
            assert left() <= 60  # type: ignore[operator]
        assert 3500 < left() <= 3600  # type: ignore[operator]
    assert left() is None


def test_no_time_at_all_lets_nothing_through(model: Gated) -> None:
    """Whoever has no time left is told at once."""
    f = batched(max_size=1)(model)
    with deadline(0), pytest.raises(DeadlineExceeded):
        f(1)
    assert [] == model.batches


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True, object()])
def test_a_timeout_that_cannot_be_meant_is_that_callers_alone(model: Gated, timeout: Any) -> None:
    """It is refused at the door, and the queue is as it was."""
    model.gate.set()
    f = batched(max_size=1)(model)
    with pytest.raises(InvalidOption, match="timeout"):
        f(1, timeout=timeout)
    with pytest.raises(InvalidOption, match="timeout"), deadline(timeout):
        pass
    assert 1 == f(1)


# Neighbours


def test_a_bad_item_fails_alone(model: Gated, events: list[telemetry.Event]) -> None:
    """Its batch-mates have their results, and an event tells."""
    f = batched(max_size=8)(model)
    futures = queued(f, model, "a", "bad", "c")
    model.gate.set()
    assert ["a", "c"] == [futures[0].result(TIMEOUT), futures[2].result(TIMEOUT)]
    with pytest.raises(ValueError, match="bad item"):
        futures[1].result(TIMEOUT)
    until(lambda: any(isinstance(event, telemetry.BatchErrored) for event in events))
    (told,) = [event for event in events if isinstance(event, telemetry.BatchErrored)]
    assert (3, 1, "ValueError: bad item") == (told.size, told.failed, told.error)
    assert 1 == f.status().bisected


def test_a_cancelled_task_harms_nobody(model: Gated) -> None:
    """Cancelled in the queue it is not computed, cancelled in the batch its result is dropped."""
    f = batched(max_size=2)(model)

    async def main() -> None:
        tasks = [asyncio.create_task(f.aio(n)) for n in range(4)]
        await asyncio.to_thread(model.busy)
        tasks[0].cancel()
        tasks[3].cancel()
        await asyncio.gather(tasks[0], tasks[3], return_exceptions=True)
        model.gate.set()
        assert [1, 2] == [await tasks[1], await tasks[2]]

    asyncio.run(main())
    assert 4 not in [len(batch) for batch in model.batches]
    assert all(3 not in batch for batch in model.batches)
    assert 2 == f.status().cancelled


def test_a_cancelled_future_gives_its_place_away(model: Gated) -> None:
    """Until it has its answer a future can be cancelled."""
    f = batched(max_size=1, max_queue=1)(model)
    (waiting,) = queued(f, model, 1)
    assert waiting.cancel()
    second = f.submit(2)
    model.gate.set()
    assert 2 == second.result(TIMEOUT)
    assert not second.cancel()
    with pytest.raises(CancelledError):
        waiting.result()
    assert [["first"], [2]] == model.batches


def test_a_callback_that_raises_harms_nobody(model: Gated, caplog: pytest.LogCaptureFixture) -> None:
    """The loop goes on, and so do the batch-mates."""
    f = batched(max_size=4)(model)
    futures = queued(f, model, 1, 2)

    def leave(_future: object) -> None:
        raise SystemExit("callback")

    futures[0].add_done_callback(leave)
    model.gate.set()
    assert [1, 2, 3] == [futures[0].result(TIMEOUT), futures[1].result(TIMEOUT), f(3)]


def test_a_hook_that_raises_harms_nobody(model: Gated) -> None:
    """Observers are not asked to be careful."""

    def hook(event: telemetry.Event) -> None:
        raise RuntimeError("hook")

    model.gate.set()
    f = batched(max_size=4)(model)
    telemetry.set_hooks([hook])
    try:
        assert [1, 2] == [f(1), f(2)]
    finally:
        telemetry.set_hooks(None)


def test_a_wrong_number_of_results_fails_its_batch_alone() -> None:
    """The next one is computed."""
    answers = iter([[], [1]])
    f = batched(max_size=4)(lambda items: next(answers))
    with pytest.raises(WrongResults, match="returned 0 results"):
        f(1)
    assert 1 == f(1)


# Items


def test_an_item_is_weighed_at_the_door() -> None:
    """What cannot be weighed, or weighs more than a batch may, is that caller's error alone."""
    f = batched(max_size=4, weight=len, max_weight=5)(lambda items: [len(item) for item in items])
    assert 5 == f("abcde")
    with pytest.raises(ItemTooHeavy, match=r"weighs 6, and a whole batch may weigh 5"):
        f("abcdef")
    with pytest.raises(ItemRefused, match="cannot be weighed: TypeError"):
        f(3)
    g = batched(max_size=4, weight=float)(lambda items: items)
    for item in ("nan", "-1", "inf"):
        with pytest.raises(ItemRefused, match="which is no weight"):
            g(item)
    assert 1 == f.status().answered


def test_keyword_arguments_are_checked_at_the_door(model: Gated) -> None:
    """An unknown one, or one that cannot be compared, is that caller's error alone."""
    model.gate.set()
    f = batched(max_size=4)(model)
    with pytest.raises(TypeError, match="unexpected keyword argument 'bye'"):
        f(1, bye=2)
    with pytest.raises(ItemRefused, match="unhashable"):
        f(1, by=[2])
    assert 2 == f(1, by=2)


def test_a_required_keyword_is_asked_for() -> None:
    """As by any function."""

    @batched(max_size=4)
    def f(items: list[int], *, language: str) -> list[str]:
        return [language for _ in items]

    with pytest.raises(TypeError, match="language"):
        f(1)
    assert "ja" == f(1, language="ja")


# Where it may not be called


def test_the_batch_function_cannot_call_itself() -> None:
    """It would wait for the thread that it occupies: refused by name, through every door and every helper thread."""

    @batched(max_size=4, name="f")
    def f(items: list[Any]) -> list[Any]:
        return [item() for item in items]

    def through_a_thread() -> Any:
        return asyncio.run(asyncio.to_thread(lambda: f.submit(dict)))  # type: ignore[arg-type]

    for nested in (
        lambda: f(dict),
        lambda: f.submit(dict),
        lambda: asyncio.run(f.aio(dict)),
        f.close,
        through_a_thread,
    ):
        with pytest.raises(WouldDeadlock, match="'f'"):
            f(nested)
    assert {} == f(dict)


def test_blocking_calls_are_refused_on_a_running_loop(model: Gated) -> None:
    """With the way to write it."""
    f = batched(max_size=4)(model)

    async def main() -> None:
        with pytest.raises(WouldDeadlock, match=r"await f\.aio\(item\)"):
            f(1)
        with pytest.raises(WouldDeadlock, match=r"await f\.aclose\(\)"):
            f.close()

    asyncio.run(main())
    assert [] == model.batches


def test_it_serves_one_loop_after_another(model: Gated) -> None:
    """And several at once."""
    model.gate.set()
    f = batched(max_size=4)(model)
    assert [1, 2] == [asyncio.run(f.aio(1)), asyncio.run(f.aio(2))]
    with ThreadPoolExecutor(4) as pool:
        assert list(range(20)) == list(pool.map(lambda n: asyncio.run(f.aio(n)), range(20)))


def test_without_a_loop_aio_says_so(model: Gated) -> None:
    """Nothing is queued."""
    f = batched(max_size=4)(model)
    with pytest.raises(RuntimeError, match="no running event loop"):
        f.aio(1).send(None)
    assert 0 == f.status().waiting


def test_a_loop_that_was_closed_meanwhile_harms_nobody(model: Gated) -> None:
    """Its items are computed for nobody."""
    f = batched(max_size=1)(model)
    loop = asyncio.new_event_loop()
    task = loop.create_task(f.aio(1))
    loop.call_soon(loop.stop)
    loop.run_forever()
    model.busy()
    loop.close()
    future = f.submit(2)
    model.gate.set()
    assert 2 == future.result(TIMEOUT)
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# The end


def test_closing_computes_what_waits(model: Gated) -> None:
    """And lets nothing in; closing twice does nothing."""
    f = batched(max_size=1)(model)
    futures = queued(f, model, 1, 2)
    closing = threading.Thread(target=f.close)
    closing.start()
    until(lambda: not f.ready)
    with pytest.raises(GuardClosed):
        f(3)
    model.gate.set()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
    assert [1, 2] == [future.result(0) for future in futures]
    f.close()
    assert "closed" == f.status().state


def test_what_still_waits_when_closing_takes_too_long_is_refused(model: Gated) -> None:
    """Nobody waits for a model that is stuck."""
    f = batched(max_size=1)(model)
    (waiting,) = queued(f, model, 1)
    f.close(timeout=0)
    with pytest.raises(GuardClosed):
        waiting.result(TIMEOUT)


def test_it_is_closed_at_the_end_of_a_block(model: Gated) -> None:
    """Of ``with`` and ``async with``."""
    model.gate.set()
    with batched(max_size=1)(model) as f:
        assert 1 == f(1)
    assert not f.ready

    async def main() -> None:
        async with batched(max_size=1)(model) as g:
            assert 1 == await g.aio(1)
        with pytest.raises(GuardClosed):
            await g.aio(1)

    asyncio.run(main())


# The breaker


def test_the_breaker_asks_its_guard_for_a_fresh_model(events: list[telemetry.Event]) -> None:
    """It opens, refuses, and the model is reloaded meanwhile."""
    nlp = guard(lambda: {"loads": len(events)}, reload_on=None, name="nlp")

    @batched(max_size=4, breaker=Breaker(failures=2, cooldown="1h", max_cooldown="1h", reload=nlp), name="f")
    @nlp
    def f(model: dict[str, int], items: list[int]) -> list[int]:
        raise OSError("device lost")

    for _ in range(2):
        with pytest.raises(OSError, match="device lost"):
            f(1)
    until(lambda: any(isinstance(event, telemetry.CircuitOpened) for event in events))
    with pytest.raises(CircuitOpen) as refused:
        f(1)
    assert 3590 < refused.value.retry_after <= 3600
    until(lambda: nlp.status().generation == 2)
    assert ("circuit open", 1) == (f.status().state, f.status().refused_open)
    assert f.ready, "without traffic there would be no probe"


# Who hangs up


def test_a_hang_up_calls_off_what_waits(model: Gated) -> None:
    """From any thread; the caller is told, the item is not computed, and later calls are called off, too."""
    f = batched(max_size=1)(model)
    watched: list[int] = []
    wire = Hangup(lambda: watched.append(1))
    queued(f, model)
    with hangup(wire):
        waiting = [f.submit(1), f.submit(2)]
        threading.Thread(target=wire.hang_up).start()
        for future in waiting:
            with pytest.raises(CallerGone):
                future.result(TIMEOUT)
        with pytest.raises(CallerGone):
            f.submit(3).result(TIMEOUT)
    assert [1] == watched, "the client is watched from the first call on, once"
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_a_request_that_makes_many_calls_does_not_keep_them(model: Gated) -> None:
    """What has its answer is forgotten."""
    model.gate.set()
    f = batched(max_size=64)(model)
    wire = Hangup()
    with hangup(wire):
        for n in range(1000):
            f(n)
    assert len(wire._calls) <= 65


# No thread to be had


def test_without_a_thread_the_caller_is_told(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an overload; the item is not queued for ever."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    f = batched(max_size=1)(model)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Overloaded, match="no thread to be had"):
            f(1)
    assert f.status().waiting == 0
    model.gate.set()
    assert 1 == f(1)


def test_status_tells_what_happened(model: Gated, events: list[telemetry.Event]) -> None:
    """Counts, sizes and times; the same by events."""
    f = batched(max_size=4, max_queue=4, name="f")(model)
    futures = queued(f, model, 1, 2, 3)
    assert (3, 1, "open") == (f.status().waiting, f.status().running, f.status().state)
    with pytest.raises(QueueFull):
        [f.submit(n) for n in range(9)]
    model.gate.set()
    for future in futures:
        future.result(TIMEOUT)
    f.close()
    status = f.status()
    assert (5, 1, 2, 4, 4) == (status.answered, status.refused_full, status.batches, status.batch_size.max, 4)
    assert status.rate is not None
    assert status.run.max > 0
    sizes = [event.size for event in events if isinstance(event, telemetry.BatchFinished)]
    assert [1, 4] == sizes
    assert [1] == [event.full for event in events if isinstance(event, telemetry.RequestsRefused)]


def test_a_caller_that_is_interrupted_leaves_the_queue(model: Gated) -> None:
    """Ctrl-C in a blocking call takes its item out."""
    import signal

    f = batched(max_size=1)(model)
    queued(f, model)
    waiting = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        f("mine")
    assert (0, 1) == (f.status().waiting, f.status().cancelled)


def test_a_timeout_of_the_future_itself_drops_nothing(model: Gated) -> None:
    """It is the caller's own patience; the item stays."""
    f = batched(max_size=1)(model)
    future = f.submit(1)
    with pytest.raises(FutureTimeout):
        future.result(0)
    model.gate.set()
    assert 1 == future.result(TIMEOUT)


def test_a_failing_batch_does_not_fail_the_next() -> None:
    """Whatever was raised."""
    answers: Iterator[Any] = iter([SystemExit(1), ValueError("x")])

    def run(items: list[int]) -> list[int]:
        error = next(answers, None)
        if error is not None:
            raise error
        return items

    f = batched(max_size=4)(run)
    with pytest.raises(BatchFailed):
        f(1)
    with pytest.raises(ValueError, match="x"):
        f(1)
    assert 1 == f(1)
