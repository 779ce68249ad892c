"""``_batcher``: bounds, deadlines, disconnects and counts, with real threads that wait for gates, not for time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import math
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest
from tests.unit.serving.gated import TIMEOUT, Gated, queued, until

from modelguard import batched, deadline, telemetry
from modelguard.errors import CallerGone, DeadlineExceeded, InvalidOption, Overloaded, QueueFull
from modelguard.serving import _batcher
from modelguard.serving.deadlines import WebRequest, caller, current_scope, left, on_behalf_of
from modelguard.testing import Clock

# Bounds and deadlines


def test_a_full_queue_refuses_at_once(model: Gated) -> None:
    """Whether it is called, awaited or submitted."""
    f = batched(max_size=2, max_queue=2)(model)
    queued(f, model, 1, 2)
    with pytest.raises(QueueFull):
        f(3)
    with pytest.raises(QueueFull):
        f.submit(3)
    with pytest.raises(QueueFull):
        asyncio.run(f.aio(3))
    assert 3 == f.status().refused_full


@pytest.mark.parametrize("way", ["call", "aio", "submit"])
@pytest.mark.parametrize("bound", ["timeout", "context", "option"])
def test_a_deadline_is_kept_although_the_model_is_stuck(model: Gated, way: str, bound: str) -> None:
    """The caller gets its error at the deadline, not when the model has ended; in the queue and in the batch."""
    f = batched(max_size=1, deadline=0.05 if bound == "option" else None)(model)
    timeout = 0.05 if bound == "timeout" else None

    def ask() -> Any:
        if way == "call":
            return f(1, timeout=timeout)
        if way == "submit":
            return f.submit(1, timeout=timeout).result(TIMEOUT)
        return asyncio.run(f.aio(1, timeout=timeout))

    with deadline(0.05) if bound == "context" else contextlib.nullcontext():
        for _ in range(2):  # one that is being computed, if the machine is quick enough, and one that waits
            with pytest.raises(DeadlineExceeded):
                ask()
    assert 2 == f.status().expired
    assert len(model.batches) <= 1


def test_deadlines_nest_and_only_shorten() -> None:
    """An inner block cannot get more time than the outer one."""
    assert left() is None
    with deadline("1h"):
        outer = left()
        with deadline("2h"):
            assert left() <= outer  # type: ignore[operator]
        with deadline("1m"):
            assert left() <= 60  # type: ignore[operator]
        assert 3500 < left() <= 3600  # type: ignore[operator]
    assert left() is None


def test_a_deadline_decorates_plain_functions() -> None:
    """Each call of a decorated function has the whole time, counted from its start."""

    @deadline("1h")
    def step() -> float | None:
        return left()

    assert 3500 < (step() or 0) <= 3600
    assert 3500 < (step() or 0) <= 3600
    assert left() is None


def test_many_tasks_enter_one_block() -> None:
    """Such as one at the top of a module; each has its own time."""
    block = deadline("1h")

    async def step(turns: int) -> float | None:
        with block:
            for _ in range(turns):
                await asyncio.to_thread(lambda: None)
            found = left()
        assert left() is None
        return found

    async def main() -> list[float | None]:
        return await asyncio.gather(*(step(turns) for turns in (3, 1, 2)))

    assert all(3500 < (found or 0) <= 3600 for found in asyncio.run(main()))


@pytest.mark.parametrize("block", [lambda: deadline("1h"), lambda: caller("a")], ids=["deadline", "caller"])
def test_a_block_may_end_in_another_context(block: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """FastAPI runs each step of a plain generator, a dependency or a response, in a copy of its own."""

    def parts() -> Iterator[None]:
        with block():
            yield

    stepped = parts()
    contextvars.copy_context().run(next, stepped)
    assert current_scope.get() is None
    assert contextvars.copy_context().run(next, stepped, "the end") == "the end"


def test_a_block_that_ends_elsewhere_leaves_those_of_others_alone() -> None:
    """One block at the top of a module: what ends in a context that knows nothing of it takes nobody else's."""
    block = deadline("1h")
    mine, theirs, nowhere = (contextvars.Context() for _ in range(3))
    for each in (mine, theirs):
        each.run(block.__enter__)
    nowhere.run(block.__exit__)
    for each in (theirs, mine):
        assert each.run(left) is not None
        each.run(block.__exit__)
        assert each.run(current_scope.get) is None


def test_a_block_may_be_used_again() -> None:
    """One after the other and inside itself, of either kind."""
    for block in (deadline("1h"), caller("a")):
        for _ in range(2):
            with block, block:
                inner = current_scope.get()
                assert inner is not None
                assert (inner.key, inner.deadline) != (None, math.inf)
            assert current_scope.get() is None


@pytest.mark.parametrize(("block", "name"), [(deadline("1s"), "deadline"), (caller("a"), "caller")])
def test_a_block_is_not_asynchronous(block: Any, name: str) -> None:
    """``async with`` and functions that run later are rejected with what to write: the block itself never waits."""

    async def step() -> None: ...

    def parts() -> Iterator[None]:
        yield

    async def async_parts() -> AsyncIterator[None]:
        yield

    class Called:
        async def __call__(self) -> None: ...

    async def enter() -> None:
        async with block:
            pass

    for function in (
        step,
        parts,
        async_parts,
        staticmethod(step),
        functools.partial(step),
        Called(),
        Called().__call__,
    ):
        with pytest.raises(InvalidOption, match=rf"Write inside it: with {name}\(...\):"):
            block(function)
    with pytest.raises(TypeError, match=rf"Write `with {name}\(...\):`, without async"):
        asyncio.run(enter())


def test_no_time_at_all_admits_nothing(model: Gated) -> None:
    """A caller without any time left gets its error at once."""
    f = batched(max_size=1)(model)
    with deadline(0), pytest.raises(DeadlineExceeded):
        f(1)
    assert [] == model.batches


@pytest.mark.parametrize("timeout", [-1, float("nan"), "soon", True, object()])
def test_an_invalid_timeout_is_that_callers_error_alone(model: Gated, timeout: Any) -> None:
    """It is rejected before anything is queued, and the next call works."""
    model.gate.set()
    f = batched(max_size=1)(model)
    with pytest.raises(InvalidOption, match="timeout"):
        f(1, timeout=timeout)
    with pytest.raises(InvalidOption, match="timeout"):
        deadline(timeout)
    assert 1 == f(1)


def test_a_timeout_of_the_future_itself_drops_nothing(model: Gated) -> None:
    """``future.result(timeout)`` ends the wait; the item stays in the queue."""
    f = batched(max_size=1)(model)
    future = f.submit(1)
    with pytest.raises(FutureTimeout):
        future.result(0)
    model.gate.set()
    assert 1 == future.result(TIMEOUT)


def test_a_slow_callback_does_not_delay_other_deadlines(model: Gated) -> None:
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


# Disconnects


def test_a_disconnect_cancels_what_waits(model: Gated) -> None:
    """From any thread: the caller gets an error, the item is not computed, and later calls raise too."""
    f = batched(max_size=1)(model)
    watched: list[int] = []
    web_request = WebRequest(on_first_call=lambda: watched.append(1))
    queued(f, model)
    with on_behalf_of(web_request):
        waiting = [f.submit(1), f.submit(2)]
        threading.Thread(target=web_request.disconnect).start()
        for future in waiting:
            with pytest.raises(CallerGone):
                future.result(TIMEOUT)
        with pytest.raises(CallerGone):
            f.submit(3).result(TIMEOUT)
    assert [1] == watched, "watching the client starts once, with the first call"
    model.gate.set()
    f.close()
    assert [["first"]] == model.batches


def test_a_request_that_makes_many_calls_does_not_keep_them(model: Gated) -> None:
    """Calls that have their answers are forgotten."""
    model.gate.set()
    f = batched(max_size=64)(model)
    web_request = WebRequest()
    with on_behalf_of(web_request):
        for n in range(1000):
            f(n)
    assert len(web_request._calls) <= 65


def test_thousands_of_calls_of_one_request_are_not_looked_at_with_each() -> None:
    """Else the items of one large ``amap`` would block the event loop for seconds."""
    looks = 0

    class Waiting:
        @property
        def state(self) -> str:
            nonlocal looks
            looks += 1
            return "waiting"

    web_request = WebRequest()
    for _ in range(4000):
        web_request.add(Waiting(), lambda: None)  # type: ignore[arg-type]
    assert looks <= 8000


def test_a_caller_that_is_interrupted_leaves_the_queue(model: Gated) -> None:
    """Ctrl-C in a blocking call takes its item out."""
    f = batched(max_size=1)(model)
    queued(f, model)
    waiting = threading.Timer(0.05, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        f("mine")
    assert (0, 1) == (f.status().waiting, f.status().cancelled)


# When no thread can be started


def test_without_a_thread_the_caller_gets_an_error(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ``Overloaded``, and the item does not wait for ever."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    f = batched(max_size=1)(model)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Overloaded, match="cannot start a thread"):
            f(1)
    assert f.status().waiting == 0
    model.gate.set()
    assert 1 == f(1)


# What is reported


def refused(events: list[telemetry.Event], name: str) -> list[telemetry.RequestsRefused]:
    """The refusals of a function: those of an earlier test's may be reported up to a second later."""
    found = (event for event in list(events) if isinstance(event, telemetry.RequestsRefused))
    return [event for event in found if event.guard == name]


def test_status_shows_what_happened(model: Gated, events: list[telemetry.Event]) -> None:
    """Counts, sizes and times, and the same in events."""
    f = batched(max_size=4, max_queue=4, name="shows what happened")(model)
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
    until(lambda: [1] == [event.full for event in refused(events, f.name)])


def test_what_passes_between_two_runs_is_part_of_what_a_batch_takes(model: Gated, modelguard_clock: Clock) -> None:
    """Else a thread that is late for each batch would be taken for one that computes more than it does."""
    f = batched(max_size=1)(model)
    futures = queued(f, model, 1, 2, 3)
    for future in futures:
        future.add_done_callback(lambda _: modelguard_clock.advance(1.0))  # after the run, in the same thread
    model.gate.set()
    assert [1, 2, 3] == [future.result(TIMEOUT) for future in futures]
    f.close()
    rate = f.status().rate
    assert rate is not None
    assert rate <= 4 / 2.0  # no run took any time, but twice a second passed before the next


@pytest.mark.parametrize("how", ["refused", "cancelled"])
def test_the_last_refusals_are_reported_too(
    how: str, model: Gated, events: list[telemetry.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a second after they happened, without a deadline, whether batches end or not."""
    monkeypatch.setattr(_batcher, "LINGER", 3600.0)  # nothing else wakes the thread that reports
    f = batched(max_size=1, max_queue=2, name=f"last {how}")(model)
    futures = queued(f, model, 1, 2)

    def reported() -> int:
        return sum(event.full + event.cancelled for event in refused(events, f.name))

    for number in range(1, 4):
        if how == "cancelled" and number > 1:
            assert futures.pop().cancel()
        else:
            with pytest.raises(QueueFull):
                f.submit("one too many")
        until(lambda number=number: reported() == number)
