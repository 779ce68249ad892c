"""A batch function that waits for a gate, and ways to wait for what other threads do."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

TIMEOUT = 20.0


class Gated:
    """A batch function that waits until its gate is set, and remembers its batches and their threads."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.batches: list[list[Any]] = []
        self.threads: set[str] = set()

    def __call__(self, items: list[Any], *, by: int = 1) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        self.batches.append(list(items))
        self.entered.release()
        assert self.gate.wait(TIMEOUT)
        if "bad" in items:
            raise ValueError("bad item")
        return [item * by for item in items]

    def busy(self) -> None:
        """Wait until a batch is being computed."""
        assert self.entered.acquire(timeout=TIMEOUT)


class BadHash:
    """A value whose own code raises."""

    def __hash__(self) -> int:
        raise RuntimeError("no hash")


class Incomparable:
    """One that has a hash, and raises when it is compared, as an object with an array does."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("neither true nor false")

    def __hash__(self) -> int:
        return 1


class OnlyWithItself(int):
    """One whose comparison with another one raises."""

    def __eq__(self, other: object) -> bool:
        if other is not self:
            raise RuntimeError("another one")
        return True

    def __hash__(self) -> int:
        return 1


def ends_beside(f: Any, act: Callable[[], object]) -> bool:
    """Whether this ends while another thread holds the lock of a batched function."""
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with f._batcher._lock:
            held.set()
            go_on.wait(TIMEOUT)

    holding, acting = threading.Thread(target=hold), threading.Thread(target=act, daemon=True)
    holding.start()
    assert held.wait(TIMEOUT)
    acting.start()
    acting.join(10)
    waits = acting.is_alive()
    go_on.set()
    holding.join(TIMEOUT)
    return not waits


def queued(f: Any, model: Gated, *items: Any, **options: Any) -> list[Future[Any]]:
    """One item is being computed, and these wait behind it."""
    f.submit("first")
    model.busy()
    return [f.submit(item, **options) for item in items]


async def next_turn() -> None:
    """Let the event loop do everything else that is due."""
    loop = asyncio.get_running_loop()
    turn = loop.create_future()

    def end() -> None:
        if not turn.done():  # its task was not cancelled
            turn.set_result(None)

    loop.call_soon(end)
    await turn


def until(condition: Callable[[], bool]) -> None:
    """Spin until the condition holds; for what another thread does next."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end
        os.sched_yield()
