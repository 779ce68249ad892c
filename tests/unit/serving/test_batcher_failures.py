"""``_batcher``: whatever fails or is cancelled, its neighbours and the next batch are computed."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from types import FrameType
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, queued, until

from modelguard import Breaker, Weight, batched, guard, telemetry
from modelguard.errors import BatchFailed, CircuitOpen, ItemTooHeavy, WrongResults
from modelguard.serving._requests import CancellableFuture
from modelguard.serving._times import BatchTimes

# Neighbours


def test_a_bad_item_fails_alone(model: Gated, events: list[telemetry.Event]) -> None:
    """The other items of its batch get their results, and an event reports the error."""
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


def test_a_cancelled_task_does_not_affect_others(model: Gated) -> None:
    """Cancelled in the queue, it is not computed; cancelled in the batch, its result is dropped."""
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


def test_a_cancelled_future_makes_room(model: Gated) -> None:
    """A future can be cancelled until it has its answer."""
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


@pytest.mark.parametrize("running", [False, True], ids=["waits", "runs"])
def test_who_waits_for_a_cancelled_future_is_told(model: Gated, *, running: bool) -> None:
    """``concurrent.futures.wait`` and ``as_completed`` return for it, and do not wait for ever."""
    f = batched(max_size=1)(model)
    futures = [f.submit(n) for n in range(2)]
    model.busy()
    cancelled = futures[0 if running else 1]
    assert cancelled.cancel()
    assert {cancelled} == wait([cancelled], TIMEOUT).done
    assert cancelled.cancel(), "again"
    assert 1 == f.status().cancelled


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="CPython 3.12 does not trace single instructions")
def test_an_answer_may_come_at_any_point_of_a_cancellation() -> None:
    """``cancel()`` returns whether it came first, and never raises."""
    steps, cancelled, kept = 0, set(), True
    while kept:
        model = Gated()
        future = batched(max_size=1)(model).submit(1)
        model.busy()

        def answered(model: Gated = model, future: Any = future) -> None:
            model.gate.set()
            assert {future} == wait([future], TIMEOUT).done

        kept, was_cancelled = _interrupted(future.cancel, steps, answered)
        model.gate.set()
        cancelled.add(was_cancelled)
        steps += 1
    assert {True, False} == cancelled


def _interrupted(call: Callable[[], Any], after: int, interrupt: Callable[[], object]) -> tuple[bool, Any]:
    """Interrupt ``cancel`` of a future after so many of its own instructions. Returns whether it has as many."""
    left = after
    former = sys.gettrace()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if frame.f_code is not CancellableFuture.cancel.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(former)
                frame.f_trace = None
                interrupt()
        return trace

    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(former)
    return left < 0, result


def test_a_callback_that_raises_does_not_affect_others(model: Gated, caplog: pytest.LogCaptureFixture) -> None:
    """The thread goes on, and the other items get their results."""
    f = batched(max_size=4)(model)
    futures = queued(f, model, 1, 2)

    def leave(_future: object) -> None:
        raise SystemExit("callback")

    futures[0].add_done_callback(leave)
    model.gate.set()
    assert [1, 2, 3] == [futures[0].result(TIMEOUT), futures[1].result(TIMEOUT), f(3)]


def test_a_hook_that_raises_does_not_affect_callers(model: Gated) -> None:
    """Every call gets its result although the hook fails."""

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
    with pytest.raises(WrongResults, match="returned a list of 0"):
        f(1)
    assert 1 == f(1)


def test_a_failing_batch_does_not_fail_the_next() -> None:
    """Whatever the batch raised."""
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


def test_one_item_that_another_function_refuses_fails_alone() -> None:
    """Errors of modelguard are bisected like others, unless they concern the whole batch."""
    inner = batched(max_size=4, weight=Weight(of=len, most=3))(lambda items: items)
    outer = batched(max_size=8)(lambda items: [inner(item) for item in items])
    gate = threading.Event()
    futures = [outer.submit(item) for item in ("a", "bb", "much too long", "c")]
    gate.set()
    assert ["a", "bb", "c"] == [futures[n].result(TIMEOUT) for n in (0, 1, 3)]
    with pytest.raises(ItemTooHeavy):
        futures[2].result(TIMEOUT)


# Errors that cannot be printed or copied


class Unprintable(Exception):
    """An error whose ``__str__`` fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Uncopyable(BatchFailed):
    """One of modelguard's errors, which cannot be copied."""

    def __init__(self) -> None:
        super().__init__("f", "x", size=1)

    def __reduce__(self) -> Any:
        raise TypeError("not to be copied")


@pytest.mark.parametrize("error", [Unprintable(), Uncopyable()], ids=["no text", "no copy"])
@pytest.mark.parametrize("on_error", ["fail", "isolate"])
def test_an_error_that_cannot_be_printed_ends_no_thread(error: Exception, on_error: Any) -> None:
    """All callers get an error, and the next batch is computed."""
    fail = [True]

    @batched(max_size=8, on_error=on_error)
    def f(items: list[int]) -> list[int]:
        if fail[0]:
            raise error
        return items

    for future in [f.submit(n) for n in range(8)]:
        with pytest.raises((BatchFailed, Unprintable)):
            future.result(TIMEOUT)
    fail[0] = False
    assert 1 == f.submit(1).result(TIMEOUT)


# The breaker


def test_the_breaker_asks_its_guard_for_a_fresh_model(events: list[telemetry.Event]) -> None:
    """It opens and refuses items while the model is reloaded."""
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


def test_answers_do_not_depend_on_what_is_learned_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Figures of a batch that cannot be computed cost none of its answers, and not the next batch."""

    def overflow(*_: object, **__: object) -> None:
        message = "math range error"
        raise OverflowError(message)

    f = batched(max_size=4, deadline="1m")(lambda items: [item * 2 for item in items])
    monkeypatch.setattr(BatchTimes, "record", overflow)
    assert [2, 4, 6, 8, 10] == [*f.map([1, 2, 3, 4, 5])]
    assert "has not learned from a batch" in caplog.text
    assert 4 == f(2)
