"""Blocking work for the coroutines of a web application, on asyncio and on Trio."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import TypeVar

from modelguard.lifecycle import _in_thread
from modelguard.lifecycle._threads import THREADS

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Await ``work``, which is done in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        trio = importlib.import_module("trio")
        result: T = await trio.to_thread.run_sync(work)
        return result
    return await _in_thread.run(work, "modelguard-admin", THREADS.start_once)
