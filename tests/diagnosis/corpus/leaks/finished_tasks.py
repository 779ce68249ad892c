"""Tasks are kept so that they are not collected while they run, and stay when they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

AUDITS: list[asyncio.Task[list[str]]] = []


async def audit(text: str) -> list[str]:
    await asyncio.sleep(0)
    return [f"{text}: {rule}" for rule in range(30)]  # LEAK


async def predict(text: str) -> int:
    task = asyncio.create_task(audit(text))  # LEAK
    AUDITS.append(task)
    await task
    return len(text)


def inputs() -> Iterator[str]:
    return (f"transfer {number} to another account" for number in count())


EXPECTED = {"causes": ["tasks"], "holders": ["AUDITS"], "calls": 3000}
