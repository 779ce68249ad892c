"""Blocking work for the coroutines of a web application, on asyncio and on Trio."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import TypeVar

from modelguard.frameworks._answers import Answer
from modelguard.lifecycle import _in_thread
from modelguard.lifecycle._threads import THREADS

__all__ = ["answer_of", "in_thread"]

T = TypeVar("T")


async def answer_of(command: Answer | Callable[[], Answer]) -> Answer:
    """The answer to an admin command. A reload takes seconds, in which the event loop must go on."""
    return command if isinstance(command, Answer) else await in_thread(command)


async def in_thread(work: Callable[[], T]) -> T:
    """Await ``work``, which is done in a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        trio = importlib.import_module("trio")
        result: T = await trio.to_thread.run_sync(work)
        return result
    return await _in_thread.run(work, "modelguard-admin", THREADS.start_once)
