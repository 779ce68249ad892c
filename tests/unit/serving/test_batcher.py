"""``batcher``: what it promises to callers, with real threads that wait for gates and not for time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, queued, until

from modelguard import Breaker, batched, deadline, guard, telemetry
from modelguard.errors import (
    BatchFailed,
    CallerGone,
    CircuitOpen,
    DeadlineExceeded,
    InvalidOption,
    ItemTooHeavy,
    Overloaded,
    QueueFull,
    WouldDeadlock,
    WrongResults,
)
from modelguard.serving.scope import Request, left, serving

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
    wire = Request(begin=lambda: watched.append(1))
    queued(f, model)
    with serving(wire):
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
    wire = Request()
    with serving(wire):
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


# What nobody would think of


def test_a_function_may_keep_its_list_of_results() -> None:
    """And fill it anew for the next batch: nobody gets what was computed for another."""
    kept: list[int] = []

    @batched(max_size=4)
    def f(items: list[int]) -> list[int]:
        kept[:] = items
        return kept

    async def main() -> list[int]:
        return await asyncio.gather(*(f.aio(n) for n in range(200)))

    assert list(range(200)) == asyncio.run(main())


class Untold(Exception):
    """An error that cannot even be written down."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Uncopied(BatchFailed):
    """One of the project's family that cannot be copied."""

    def __init__(self) -> None:
        super().__init__("f", "x", size=1)

    def __reduce__(self) -> Any:
        raise TypeError("not to be copied")


@pytest.mark.parametrize("error", [Untold(), Uncopied()], ids=["no text", "no copy"])
@pytest.mark.parametrize("on_error", ["fail", "isolate"])
def test_an_error_that_cannot_be_looked_at_ends_no_thread(error: Exception, on_error: Any) -> None:
    """All callers get an error, and the next batch is computed."""
    fail = [True]

    @batched(max_size=8, on_error=on_error)
    def f(items: list[int]) -> list[int]:
        if fail[0]:
            raise error
        return items

    for future in [f.submit(n) for n in range(8)]:
        with pytest.raises((BatchFailed, Untold)):
            future.result(TIMEOUT)
    fail[0] = False
    assert 1 == f.submit(1).result(TIMEOUT)


def test_what_the_collector_calls_off_does_not_wait_for_itself(model: Gated) -> None:
    """A finalizer may run amid any change of the queue, in the very thread that holds its lock."""
    f = batched(max_size=1)(model)
    (waiting,) = queued(f, model, 1)
    with f._batcher._lock:  # as a finalizer finds it
        waiting.cancel()
        assert 1 == f._batcher._core.waiting, "put off"
        with pytest.raises(WouldDeadlock, match="finalizer"):
            f.close()
    assert 0 == f.status().waiting


def test_an_exception_by_a_signal_leaves_nothing_half_done(model: Gated) -> None:
    """Whatever was done of an admission is undone: counts are true, and the next caller is served."""
    model.gate.set()
    f = batched(max_size=4)(model)
    core = f._batcher._core

    class Interrupting(deque[Any]):
        def append(self, entry: Any) -> None:
            super().append(entry)
            if entry.item == "mine":
                raise KeyboardInterrupt

    core._plain = core._queues[None] = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        f("mine")
    assert 0 == core.waiting
    assert "next" == f("next")


def test_functions_that_call_each_other_are_refused() -> None:
    """A circle of batch functions would wait for itself, however long it is."""

    @batched(max_size=4, name="first")
    def first(items: list[Any]) -> list[Any]:
        return [second(item) for item in items]

    @batched(max_size=4, name="second")
    def second(items: list[Any]) -> list[Any]:
        return [first(item) if item else item for item in items]

    assert not first(0)
    with pytest.raises(WouldDeadlock, match="'first'"):
        first(1)


def test_one_item_that_another_function_refuses_fails_alone() -> None:
    """Errors of modelguard are bisected like any other, unless they concern the whole batch."""
    inner = batched(max_size=4, weight=len, max_weight=3)(lambda items: items)
    outer = batched(max_size=8)(lambda items: [inner(item) for item in items])
    gate = threading.Event()
    futures = [outer.submit(item) for item in ("a", "bb", "much too long", "c")]
    gate.set()
    assert ["a", "bb", "c"] == [futures[n].result(TIMEOUT) for n in (0, 1, 3)]
    with pytest.raises(ItemTooHeavy):
        futures[2].result(TIMEOUT)


def test_a_callback_may_call_again(model: Gated) -> None:
    """It runs on the worker's thread, and yet not inside the batch function."""
    model.gate.set()
    f = batched(max_size=1)(model)
    chained: list[Any] = []
    f.submit(1).add_done_callback(lambda _: chained.append(f.submit(2)))
    until(lambda: bool(chained))
    assert 2 == chained[0].result(TIMEOUT)


def test_a_slow_callback_keeps_nobody_elses_deadline_waiting(model: Gated) -> None:
    """Callbacks of expired calls run beside the thread that looks after the deadlines."""
    f = batched(max_size=1)(model)
    queued(f, model)
    slow = threading.Event()
    try:
        f.submit(1, timeout=0.01).add_done_callback(lambda _: slow.wait(TIMEOUT))
        with pytest.raises(DeadlineExceeded):
            f(2, timeout=0.05)
    finally:
        slow.set()


def test_each_free_worker_looks_after_what_is_left(model: Gated) -> None:
    """The one that waited for the next batch to be due has taken another one; a second is woken for the rest."""
    model.gate.set()
    f = batched(max_size=8, max_wait=0.02, workers=2)(model)
    assert [2, 6, 4] == [future.result(TIMEOUT) for future in [f.submit(1, by=2), f.submit(2, by=3), f.submit(1, by=4)]]


def test_closing_does_not_wait_for_company(model: Gated) -> None:
    """There will be none: what waits for a fuller batch is computed now."""
    model.gate.set()
    f = batched(max_size=8, max_wait="1h")(model)
    future = f.submit(1)
    f.close(timeout=TIMEOUT)
    assert 1 == future.result(0)


def test_results_and_errors_are_not_kept_alive(model: Gated) -> None:
    """Neither a call that succeeded nor one that failed leaves a cycle for the collector."""

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
    """Although the model is stuck, and the queues are never looked through."""
    f = batched(max_size=1)(model)
    queued(f, model)
    for n in range(1000):
        f.submit(1, by=n).cancel()
    assert len(f._batcher._core._queues) < 200
