"""Calls that need nothing but room are queued without the lock: they keep all promises."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.serving.gated import Gated, ends_beside, next_turn, queued, until

from modelguard import batched, deadline
from modelguard.errors import DeadlineExceeded, GuardClosed, QueueFull


async def started(*coroutines: Any) -> list[asyncio.Task[Any]]:
    """Tasks that have run up to their first wait."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    await next_turn()
    return tasks


async def busy(f: Any, model: Gated) -> list[asyncio.Task[Any]]:
    """The thread computes a first item, so all others wait."""
    tasks = await started(f.aio("first"))
    await asyncio.to_thread(model.busy)
    return tasks


def test_the_queue_is_bounded_exactly(model: Gated) -> None:
    """The last place is given, and the next call refused."""

    async def run() -> None:
        async with batched(max_size=4, max_queue=4)(model) as f:
            first = await busy(f, model)
            waiting = await started(*(f.aio(number) for number in range(4)))
            assert 4 == f.status().waiting
            with pytest.raises(QueueFull) as refused:
                await f.aio(5)
            assert 4 == refused.value.queued
            model.gate.set()
            assert ["first", 0, 1, 2, 3] == await asyncio.gather(*first, *waiting)

    asyncio.run(run())


def test_the_order_is_that_of_the_calls(model: Gated) -> None:
    """Also beside calls with keyword arguments and time bounds, and those of threads."""

    async def run() -> None:
        async with batched(max_size=2, max_queue=16)(model) as f:
            first = await busy(f, model)
            waiting = await started(f.aio(0), f.aio(1, timeout=60), f.aio(2))
            future = f.submit(3)
            waiting += await started(f.aio(4))
            model.gate.set()
            assert [0, 1, 2, 4] == (await asyncio.gather(*first, *waiting))[1:]
            assert 3 == await asyncio.wrap_future(future)

    asyncio.run(run())
    assert [["first"], [0, 1], [2, 3], [4]] == model.batches


@pytest.mark.parametrize("options", [{}, {"weight": lambda item: 2}], ids=["plain", "weight"])
def test_a_call_of_a_thread_waits_for_no_other_thread_to_be_queued(model: Gated, options: dict[str, Any]) -> None:
    """Whoever holds the lock, it takes its place; and it gets its answer in its turn."""
    f, futures = batched(max_size=2, **options)(model), list[Any]()
    (second,) = queued(f, model, 2)
    assert ends_beside(f, lambda: futures.append(f.submit(3)))
    assert 2 == f.status().waiting
    model.gate.set()
    assert [2, 3] == [second.result(20), futures[0].result(20)]
    assert [["first"], [2, 3]] == model.batches
    assert 4 == f(4)


def test_a_cancelled_call_is_not_computed(model: Gated) -> None:
    """It leaves the queue, and its neighbours stay."""

    async def run() -> None:
        async with batched(max_size=4)(model) as f:
            first = await busy(f, model)
            waiting = await started(*(f.aio(number) for number in range(3)))
            waiting[1].cancel()
            await next_turn()
            assert (2, 1) == (f.status().waiting, f.status().cancelled)
            model.gate.set()
            assert ["first", 0, 2] == await asyncio.gather(*first, waiting[0], waiting[2])

    asyncio.run(run())
    assert [["first"], [0, 2]] == model.batches


def test_what_waits_at_a_close_is_computed_and_what_comes_later_refused(model: Gated) -> None:
    """A close waits for calls that were queued without the lock, too."""

    async def run() -> None:
        f = batched(max_size=4)(model)
        first = await busy(f, model)
        waiting = await started(f.aio(1))
        closing = asyncio.ensure_future(f.aclose())
        await asyncio.to_thread(until, lambda: not f.ready)
        with pytest.raises(GuardClosed):
            await f.aio(2)
        model.gate.set()
        assert ["first", 1] == await asyncio.gather(*first, *waiting)
        await closing

    asyncio.run(run())


def test_a_close_between_the_look_and_the_queue_refuses_the_call(model: Gated, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call finds out, and neither it nor the close waits for the other."""

    async def run() -> None:
        f = batched(max_size=4)(model)
        first = await busy(f, model)
        batcher = f._batcher
        append = batcher._queue.inbox.append

        class Inbox:
            """Closes the queue just before the call is put into it."""

            def __len__(self) -> int:
                return 0

            def append(self, call: Any) -> None:
                batcher._queue.close()
                append(call)

        inbox = batcher._queue.inbox
        monkeypatch.setattr(batcher._queue, "inbox", Inbox())
        attend_to = batcher._attend_to

        def attend(request: Any) -> None:
            monkeypatch.setattr(batcher._queue, "inbox", inbox)
            attend_to(request)

        monkeypatch.setattr(batcher, "_attend_to", attend)
        with pytest.raises(GuardClosed):
            await f.aio(1)
        model.gate.set()
        assert ["first"] == await asyncio.gather(*first)
        await f.aclose()

    asyncio.run(run())
    assert [["first"]] == model.batches


def test_a_block_with_a_deadline_bounds_them(model: Gated) -> None:
    """Then they are not plain: they expire on time."""

    async def run() -> None:
        async with batched(max_size=4)(model) as f:
            first = await busy(f, model)
            with deadline("1ms"), pytest.raises(DeadlineExceeded):
                await f.aio(1)
            model.gate.set()
            assert ["first"] == await asyncio.gather(*first)

    asyncio.run(run())


def test_wait_times_count_from_the_call(model: Gated) -> None:
    """The status shows how long the first of a batch waited."""

    async def run() -> None:
        async with batched(max_size=4)(model) as f:
            first = await busy(f, model)
            waiting = await started(f.aio(1))
            model.gate.set()
            await asyncio.gather(*first, *waiting)
            assert f.status().wait.max > 0

    asyncio.run(run())
