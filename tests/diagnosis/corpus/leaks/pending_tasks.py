"""Tasks in a set, discarded when they are done, as the documentation says; but they wait for what never comes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

running_jobs: set[asyncio.Task[None]] = set()
confirmations: dict[str, asyncio.Event] = {}


async def store_after_confirmation(key: str, text: str) -> None:
    words = [f"{key}:{word}" for word in text.split()]  # LEAK
    confirmed = confirmations.setdefault(key, asyncio.Event())
    await confirmed.wait()
    words.clear()
    del confirmations[key]


async def predict(text: str) -> int:
    job = asyncio.create_task(store_after_confirmation(text[:16], text))  # LEAK
    running_jobs.add(job)
    job.add_done_callback(running_jobs.discard)
    await asyncio.sleep(0)
    return len(text)


def inputs() -> Iterator[str]:
    return (f"document-{number:07d} " + "some words of it " * 8 for number in count())


EXPECTED = {"causes": ["tasks"], "holders": ["running_jobs", "store_after_confirmation"], "calls": 2500}
