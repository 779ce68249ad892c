"""An async function that waits for some tasks of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count


async def rule(text: str, number: int) -> bool:
    await asyncio.sleep(0)
    return str(number) in text


async def predict(text: str) -> int:
    return sum(await asyncio.gather(*(rule(text, number) for number in range(10))))


def inputs() -> Iterator[str]:
    return (f"transfer {number}" for number in count())


EXPECTED = {"calls": 4000}
