"""Batched functions on Trio."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.serving.gated import Gated, until

from modelguard import batched, deadline
from modelguard.errors import DeadlineExceeded, NotSupported

trio: Any = pytest.importorskip("trio", reason="needs trio")


def double(items: list[Any]) -> list[Any]:
    return [ValueError("bad") if item == "bad" else item * 2 for item in items]


def test_calls_are_batched_and_answered_on_trio() -> None:
    """Many coroutines at once, each with its own result or error; and the function is closed at the end."""
    f = batched(max_size=8)(double)
    found: dict[int, int] = {}

    async def call(number: int) -> None:
        found[number] = await f.aio(number)

    async def main() -> None:
        async with f:
            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(call, number)
            with pytest.raises(ValueError, match="bad"):
                await f.aio("bad")

    trio.run(main)
    assert {number: 2 * number for number in range(100)} == found
    assert "closed" == f.status().state


def test_a_cancelled_scope_takes_the_item_out_of_the_queue(model: Gated) -> None:
    """It is not computed."""
    f = batched(max_size=1)(model)

    async def main() -> None:
        f.submit("first")
        await trio.to_thread.run_sync(model.busy)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(f.aio, "second")
            await trio.to_thread.run_sync(until, lambda: f.status().waiting == 1)
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert (0, 1) == (f.status().waiting, f.status().cancelled)
    model.gate.set()


def test_deadlines_hold_on_trio(model: Gated) -> None:
    """Even if the model is stuck."""
    f = batched(max_size=1)(model)

    async def main() -> None:
        with pytest.raises(DeadlineExceeded), deadline("50ms"):
            await f.aio("first")

    trio.run(main)
    model.gate.set()


def test_an_answer_after_the_end_of_trio_harms_nobody(model: Gated) -> None:
    """The loop has ended while the model was computing."""
    f = batched(max_size=1)(model)

    async def main() -> None:
        with trio.move_on_after(0.01):
            await f.aio("first")

    trio.run(main)
    model.gate.set()
    assert "second" == f("second")


def test_without_an_event_loop_the_error_says_what_to_write() -> None:
    """A coroutine that is driven by hand, or by another library."""
    f = batched(max_size=1)(double)
    with pytest.raises(NotSupported, match=r"and none of trio\. Call the function without \.aio"):
        f.aio(1).send(None)
    assert 2 == asyncio.run(f.aio(1))


def test_the_first_error_ends_a_request_on_trio(model: Gated) -> None:
    """As on asyncio: although an item before it is still being computed. What waits is not computed any more."""
    seen: list[Any] = []

    def run(items: list[Any], by: int = 1) -> list[Any]:
        seen.extend(items)
        if items == ["bad"]:
            raise ValueError("bad")
        return model(items, by=by)

    f = batched(max_size=1, threads=2)(run)

    async def main() -> None:
        with pytest.raises(ValueError, match="bad"):
            await f.amap(["slow", "bad", "third", "fourth", "fifth"])
        assert 0 == f.status().waiting
        model.gate.set()
        assert [2, 4, 6] == await f.amap([1, 2, 3], by=2)
        assert [] == await f.amap([])

    trio.run(main)
    assert {"slow", "bad"} <= set(seen)
    assert "fifth" not in seen
