"""Streams and async functions on Trio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.serving.gated import next_turn, until

from modelguard import Execution, batched
from modelguard.errors import DeadlineExceeded, NotSupported

trio: Any = pytest.importorskip("trio", reason="needs trio")


@batched(max_size=8, buffer=2)
def count(items: list[int]) -> Iterator[list[int | type[StopIteration]]]:
    number = 0
    while True:
        yield [StopIteration if number == item else number for item in items]
        number += 1


def test_parts_come_to_coroutines_on_trio() -> None:
    """Many at once, each its own."""
    found: dict[int, list[int]] = {}

    async def consume(item: int) -> None:
        found[item] = [part async for part in count.stream(item)]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for item in range(20):
                nursery.start_soon(consume, item)

    trio.run(main)
    assert {item: [*range(item)] for item in range(20)} == found


def test_a_cancelled_scope_leaves() -> None:
    """Its item drops out of the batch."""
    before = count.status().cancelled

    async def main() -> None:
        with trio.move_on_after(0.05):
            async for _ in count.stream(-1):
                pass

    trio.run(main)
    until(lambda: (before + 1, 0) == (count.status().cancelled, count.status().running))


def test_the_deadline_holds_on_trio() -> None:
    """The stream ends with DeadlineExceeded."""

    async def main() -> None:
        with pytest.raises(DeadlineExceeded):
            async for _ in count.stream(-1, timeout=0.05):
                pass

    trio.run(main)


def test_async_functions_run_on_their_own_loop() -> None:
    """That is asyncio's, whatever their callers run on; a caller on Trio has none to lend."""

    async def double(items: list[int]) -> list[int]:
        await next_turn()
        assert asyncio.get_running_loop()
        return [2 * item for item in items]

    own, callers = batched(max_size=4)(double), batched(max_size=4, execution=Execution(loop="caller"))(double)

    async def main() -> int:
        with pytest.raises(NotSupported, match="leave out loop="):
            await callers.aio(1)
        return await own.aio(3)

    assert 6 == trio.run(main)
