"""Records for a consumer that was never started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

audit_records: asyncio.Queue[dict[str, str]] = asyncio.Queue()


async def predict(text: str) -> int:
    record = {f"field{number}": f"{text} {number}" for number in range(20)}  # LEAK
    await audit_records.put(record)
    return len(record)


def inputs() -> Iterator[str]:
    return (f"claim {number}" for number in count())


EXPECTED = {"causes": ["queues"], "holders": ["audit_records"], "calls": 4000}
