"""Functions that leak in Python, each in one known way."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import logging
import mmap
import queue
import random
import ssl
import threading
import weakref
from collections.abc import Iterator

kept: list[object] = []
by_text: dict[str, list[int]] = {}
waiting: queue.Queue[list[int]] = queue.Queue()
tasks: set[asyncio.Task[list[int]]] = set()
subscribers: list[object] = []
over = threading.Event()
chance = random.Random(0)
current: contextvars.ContextVar[list[int]] = contextvars.ContextVar("current")


def texts() -> Iterator[str]:
    """Texts that are never repeated, all of one length."""
    number = 0
    while True:
        number += 1
        yield f"{number:012d}"


@functools.cache
def cached(text: str) -> list[str]:
    return [text] * 500


class Service:
    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033 - the leak
    def answer(self, text: str) -> list[str]:
        return [text] * 500


def cached_method(text: str) -> None:
    Service().answer(text)


def dictionary(text: str) -> None:
    by_text[text] = list(range(500))


def appended(text: str) -> None:
    kept.append([text] * 500)


def arrays(text: str) -> None:
    kept.append(bytearray(5000) + text.encode())


class Node:
    def __init__(self) -> None:
        self.me = self
        self.data = [0] * 500


def cycles(text: str) -> None:
    gc.disable()
    Node()


def classes(text: str) -> None:
    gc.disable()
    type(f"Made{text}", (), {"data": [0] * 500})


def failing(text: str) -> int:
    """Half of the inputs fail, and an error log keeps the exceptions."""
    data = list(range(500))
    try:
        if int(text) % 2:
            raise ValueError(text)  # noqa: TRY301 - what an app does
    except ValueError as error:
        kept.append(error)
        raise
    return len(data)


async def finished_tasks(text: str) -> None:
    async def work() -> list[int]:
        return list(range(300))

    task = asyncio.create_task(work())
    tasks.add(task)
    await task
    del text


def queued(text: str) -> None:
    waiting.put(list(range(500)))


def threads(text: str) -> None:
    threading.Thread(target=over.wait, daemon=True).start()


def contexts(text: str) -> None:
    kept.append(ssl.create_default_context())


def handlers(text: str) -> None:
    handler = logging.NullHandler()
    handler.data = [text] * 500  # type: ignore[attr-defined]
    logging.getLogger("corpus").addHandler(handler)


def callbacks(text: str) -> None:
    data = [text] * 500
    subscribers.append(lambda: data)


def generators(text: str) -> None:
    def lazily() -> Iterator[str]:
        data = [text] * 500
        yield from data

    lazy = lazily()
    next(lazy)
    kept.append(lazy)


def finalizers(text: str) -> None:
    weakref.finalize(Service, print, [text] * 500)


def mapped(text: str) -> None:
    memory = mmap.mmap(-1, 16384)
    memory.write(b"x" * 16384)
    kept.append(memory)


def context_values(text: str) -> None:
    current.set([len(text)] * 500)
    kept.append(contextvars.copy_context())


def cache_and_contexts(text: str) -> None:
    """Two causes: a cache, and now and then a context."""
    cached(text)
    if chance.random() < 0.005:
        contexts(text)
