"""``_batcher``: rare cases: finalizers, signals, circular calls, callbacks that call, and what is kept in memory."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, ends_beside, next_turn, queued, until

from modelguard import Fair, batched, deadline, guard, telemetry
from modelguard.errors import BatchFailed, GuardClosed, QueueFull, WouldDeadlock
from modelguard.runtime.clock import Watch
from modelguard.serving._requests import deliver
from modelguard.serving.deadlines import left


def test_a_function_may_keep_its_list_of_results() -> None:
    """And fill it again for the next batch: no caller gets another caller's result."""
    kept: list[int] = []

    @batched(max_size=4)
    def f(items: list[int]) -> list[int]:
        kept[:] = items
        return kept

    async def main() -> list[int]:
        return await asyncio.gather(*(f.aio(n) for n in range(200)))

    assert list(range(200)) == asyncio.run(main())


def test_a_cancellation_by_the_garbage_collector_does_not_deadlock(model: Gated) -> None:
    """A finalizer may run in the middle of any change of the queue, in the thread that holds its lock."""
    f = batched(max_size=1)(model)
    (waiting,) = queued(f, model, 1)
    with f._batcher._lock:  # as a finalizer finds it
        waiting.cancel()
        assert f._batcher._others_wait(), "deferred"
        with pytest.raises(WouldDeadlock, match="finalizer"):
            f.close()
    assert 0 == f.status().waiting


@pytest.mark.parametrize("call", [lambda f: f.aio(1), lambda f: f.amap([1])], ids=["aio", "amap"])
def test_a_coroutine_that_the_garbage_collector_closes_waits_for_no_lock(model: Gated, call: Any) -> None:
    """Of a loop that has ended. The collector may run in code that holds a lock for which this one's holder waits."""
    f = batched(max_size=1)(model)
    queued(f, model)
    loop, coroutine = asyncio.new_event_loop(), call(f)
    loop.create_task(coroutine)
    loop.run_until_complete(next_turn())
    loop.close()
    assert ends_beside(f, coroutine.close)
    assert (0, 1) == (f.status().waiting, f.status().cancelled)
    model.gate.set()


def test_an_exception_by_a_signal_leaves_nothing_half_done(model: Gated) -> None:
    """An interrupted admission is undone: the counts are right, and the next caller is served."""
    model.gate.set()
    f = batched(max_size=4)(model)
    queue = f._batcher._queue

    class Interrupting(dict[Any, None]):
        def __setitem__(self, request: Any, value: None) -> None:
            super().__setitem__(request, value)
            if request.item == "mine":
                raise KeyboardInterrupt

    queue._lines.ungrouped.requests = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        f("mine", timeout=60)
    assert 0 == queue.waiting
    assert "next" == f("next")


def test_who_has_lost_a_place_to_an_interrupted_call_is_told_at_once(model: Gated) -> None:
    """And not when a thread is free: that may take as long as a batch does."""
    f = batched(max_size=1, max_queue=4, fair_by=Fair(by=str))(model)
    *_, displaced = queued(f, model, *["first"] * 4)
    requests = f._batcher._queue._lines.ungrouped.requests

    class Interrupting(dict[Any, None]):
        def __setitem__(self, request: Any, value: None) -> None:
            raise KeyboardInterrupt

    f._batcher._queue._lines.ungrouped.requests = Interrupting(requests)
    with pytest.raises(KeyboardInterrupt):
        f("another", timeout=60)
    with pytest.raises(QueueFull):
        displaced.result(0)
    model.gate.set()


def test_an_exception_by_a_signal_loses_no_refusal(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is interrupted when it tells others that they are refused does so all the same."""
    f = batched(max_size=1)(model)
    waiting = queued(f, model, 1, 2)
    interrupts = iter([True])

    def interrupted(requests: Any, outcomes: Any) -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt
        deliver(requests, outcomes)

    monkeypatch.setattr("modelguard.serving._batcher.deliver", interrupted)
    with pytest.raises(KeyboardInterrupt):
        f.close(0)
    for future in waiting:
        with pytest.raises(GuardClosed):
            future.result(0)
    model.gate.set()


def test_functions_that_call_each_other_are_refused() -> None:
    """A circle of calls of any length would wait for itself."""

    @batched(max_size=4, name="first")
    def first(items: list[Any]) -> list[Any]:
        return [second(item) for item in items]

    @batched(max_size=4, name="second")
    def second(items: list[Any]) -> list[Any]:
        return [first(item) if item else item for item in items]

    assert not first(0)
    with pytest.raises(WouldDeadlock, match="'first'"):
        first(1)


def test_a_callback_may_call_again(model: Gated) -> None:
    """It runs on a batch thread, but not inside the batch function."""
    model.gate.set()
    f = batched(max_size=1)(model)
    chained: list[Any] = []
    f.submit(1).add_done_callback(lambda _: chained.append(f.submit(2)))
    until(lambda: bool(chained))
    assert 2 == chained[0].result(TIMEOUT)


def test_a_callback_may_call_again_while_a_bad_item_is_looked_for(model: Gated) -> None:
    """It runs as soon as there is an answer, between two runs of the batch function, and is no part of these."""
    f = batched(max_size=4)(model)
    chained: list[Any] = []
    for future in queued(f, model, "good", "bad", "too"):
        future.add_done_callback(lambda _: chained.append(f.submit("next")))
    model.gate.set()
    until(lambda: len(chained) == 3)
    assert ["next"] * 3 == [future.result(TIMEOUT) for future in chained]


def test_a_callback_is_no_part_of_the_call_that_delivers_it(model: Gated) -> None:
    """Whoever closes a function has to tell others that they are refused: the closer's time is not theirs."""
    f = batched(max_size=1)(model)
    (waits,) = queued(f, model, "waits")
    found: list[float | None] = []
    waits.add_done_callback(lambda _: found.append(left()))
    with deadline(60):
        f.close(0)
    model.gate.set()
    assert [None] == found


@pytest.mark.parametrize("way", ["a call", "map", "close"])
@pytest.mark.parametrize("by", ["a callback", "a hook"])
def test_what_a_batch_thread_runs_beside_batches_must_not_wait_for_it(model: Gated, by: str, way: str) -> None:
    """It would wait for ever: the thread that computes batches waits for itself."""
    f = batched(max_size=1, deadline="10s")(model)
    found: list[Any] = []

    def wait(_: object) -> None:
        if not found:
            with pytest.raises(WouldDeadlock, match="runs this callback or hook") as refused:
                {"a call": lambda: f(2), "map": lambda: list(f.map([2])), "close": f.close}[way]()
            found.append(refused.value)

    remove = telemetry.add_hook(wait) if by == "a hook" else lambda: None
    try:
        future = f.submit(1)
        if by == "a callback":
            future.add_done_callback(wait)  # before there is an answer: else it runs here
        model.gate.set()
        until(lambda: bool(found))
    finally:
        remove()
    assert 3 == f(3)


def test_a_second_free_thread_is_woken_for_what_is_left(model: Gated) -> None:
    """When the thread that waited for a batch to be due has taken another one, the rest is not forgotten."""
    model.gate.set()
    f = batched(max_size=8, max_wait=0.02, threads=2)(model)
    assert [2, 6, 4] == [future.result(TIMEOUT) for future in [f.submit(1, by=2), f.submit(2, by=3), f.submit(1, by=4)]]


def test_closing_does_not_wait_for_fuller_batches(model: Gated) -> None:
    """What waits is computed at once, since nothing more is admitted."""
    model.gate.set()
    f = batched(max_size=8, max_wait="1h")(model)
    future = f.submit(1)
    f.close(timeout=TIMEOUT)
    assert 1 == future.result(0)


def test_results_and_errors_are_not_kept_alive(model: Gated) -> None:
    """Neither a successful call nor a failed one leaves a reference cycle."""

    class Payload:
        pass

    class NoItem(ValueError):
        pass

    @batched(max_size=4)
    def f(items: list[Any]) -> list[Any]:
        return [NoItem() if item is None else Payload() for item in items]

    async def on_a_loop() -> None:
        try:
            await f.aio(None)
        except NoItem as error:
            errors.append(weakref.ref(error))

    errors: list[weakref.ref[NoItem]] = []
    gc.collect()
    gc.disable()
    try:
        results = [weakref.ref(f(1)), weakref.ref(f.submit(1).result(TIMEOUT))]
        for ask in (lambda: f(None), lambda: f.submit(None).result(TIMEOUT)):
            try:
                ask()
            except ValueError as error:
                errors.append(weakref.ref(error))
        asyncio.run(on_a_loop())
        f("something else")  # the thread has let go of the batch before
        assert [None] * 5 == [one() for one in results + errors]
    finally:
        gc.enable()


def test_ever_new_keyword_arguments_leave_no_queues_behind(model: Gated) -> None:
    """Even while the model is stuck, and no batch is taken from the queues."""
    f = batched(max_size=1)(model)
    queued(f, model)
    for n in range(1000):
        f.submit(1, by=n).cancel()
    assert len(f._batcher._queue._lines) < 200


def test_a_coroutine_that_is_closed_leaves_nothing_in_the_queue(model: Gated) -> None:
    """Its caller is gone without a cancellation; nobody waits for the item any more."""
    f = batched(max_size=1)(model)

    async def main() -> None:
        queued(f, model)
        call = f.aio("second")
        call.send(None)
        assert 1 == f.status().waiting
        call.close()
        assert 0 == f.status().waiting

    asyncio.run(main())


def test_answered_items_are_let_go_at_once(model: Gated) -> None:
    """A large item does not stay in memory until its deadline, nor does its result."""

    class Large:
        pass

    model.gate.set()
    f = batched(max_size=4, deadline="1h")(lambda items: [Large() for _ in items])
    seen: list[weakref.ref[Any]] = []
    for _ in range(50):
        item = Large()
        seen.append(weakref.ref(item))
        seen.append(weakref.ref(f(item)))
        del item
    f(Large())  # the thread has let go of the batch before
    gc.collect()
    assert sum(one() is not None for one in seen) <= 1


class Large:
    """An item or a result that somebody would miss the memory of."""

    def __init__(self, seen: list[weakref.ref[Any]], *, bad: bool = False) -> None:
        seen.append(weakref.ref(self))
        self.seen, self.bad = seen, bad


def checked(items: list[Large]) -> list[Large]:
    """Raise if one of them is bad, and have none of them as a local variable."""
    if any([item.bad for item in items]):  # noqa: C419 - as above
        raise ValueError("bad item")
    return [Large(item.seen) for item in items]


async def achecked(items: list[Large]) -> list[Large]:
    await next_turn()
    return checked(items)


@guard(object, reload_on=None)
def guarded(_model: object, items: list[Large]) -> list[Large]:
    return checked(items)


@guard(object, reload_on=None)
async def aguarded(_model: object, items: list[Large]) -> list[Large]:
    return await achecked(items)


def parts(items: list[Large]) -> Iterator[list[Large]]:
    yield [Large(item.seen) for item in items]
    yield checked(items)


async def aparts(items: list[Large]) -> AsyncIterator[list[Large]]:
    yield [Large(item.seen) for item in items]
    await next_turn()
    yield checked(items)


def _each(f: Any, items: list[Large]) -> None:
    futures = [f.submit(items.pop()) for _ in range(len(items))]
    while futures:
        with suppress(ValueError, BatchFailed):
            futures.pop(0).result(TIMEOUT)


def _call(f: Any, items: list[Large]) -> None:
    while items:
        with suppress(ValueError, BatchFailed):
            f(items.pop())


def _aio(f: Any, items: list[Large]) -> None:
    async def main() -> None:
        await asyncio.gather(*(f.aio(items.pop()) for _ in range(len(items))), return_exceptions=True)

    asyncio.run(main())


def _map(f: Any, items: list[Large]) -> None:
    with suppress(ValueError, BatchFailed):
        list(f.map(items))


def _amap(f: Any, items: list[Large]) -> None:
    async def main() -> None:
        await asyncio.gather(f.amap(items), return_exceptions=True)

    asyncio.run(main())


def _streams(f: Any, items: list[Large]) -> None:
    streams = [f.stream(items.pop()) for _ in range(len(items))]
    while streams:
        with suppress(ValueError, BatchFailed):
            list(streams.pop(0))


def _astreams(f: Any, items: list[Large]) -> None:
    async def one(item: Large) -> None:
        with suppress(ValueError, BatchFailed):
            async for _ in f.stream(item):
                pass

    async def main() -> None:
        await asyncio.gather(*(one(items.pop()) for _ in range(len(items))))

    asyncio.run(main())


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is freed but what nobody refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
class TestErrorsKeepNothing:
    """What a batch that raised has computed is freed with the errors that its callers got, not some day."""

    @pytest.mark.parametrize("use", [_call, _each, _aio, _map, _amap])
    @pytest.mark.parametrize("on_error", ["isolate", "fail"])
    @pytest.mark.parametrize("function", [checked, achecked, guarded, aguarded])
    def test_of_items_and_results(self, function: Any, on_error: Any, use: Any) -> None:
        """Whatever the function is, and however it is called."""
        self.check(batched(max_size=4, on_error=on_error)(function), use)

    @pytest.mark.parametrize("use", [_streams, _astreams])
    @pytest.mark.parametrize("function", [parts, aparts])
    def test_of_parts(self, function: Any, use: Any) -> None:
        """However they are made, and taken."""
        self.check(batched(max_size=4)(function), use)

    def check(self, f: Any, use: Any) -> None:
        seen: list[weakref.ref[Any]] = []
        for _ in range(3):
            use(f, [Large(seen, bad=number % 4 == 1) for number in range(8)])
        use(f, [Large([])])  # the thread has let go of the batch before
        assert len(seen) >= 3 * 8
        # Without the GIL, what other threads have let go of is counted later: of the last batches some may be there.
        most = 16 if hasattr(sys, "_is_gil_enabled") and not sys._is_gil_enabled() else 0
        assert sum(one() is not None for one in seen) <= most


def test_a_fault_of_the_watch_is_not_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """The next deadline is looked after, however the last look ended."""
    faults = ["an error"]
    checked = threading.Event()

    def check(_now: float) -> float:
        if faults:
            raise ValueError(faults.pop())
        checked.set()
        return math.inf

    lock = threading.RLock()
    watch = Watch("faulty", lock, check, lambda _now: None)
    with lock:
        watch.schedule(0.0)
    until(lambda: "the deadlines of faulty() are late" in caplog.text)
    with lock:
        assert math.inf == watch.due
        watch.schedule(0.0)
    assert checked.wait(10)
