"""Inline mode, for tests: no policies, reloads or background work; models load in the thread that needs them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._generation import Generation
from modelguard.lifecycle._load_job import LoadJob
from modelguard.lifecycle._resolve import resolve
from modelguard.lifecycle.loaded import Unpacked, unpacked

M = TypeVar("M")

_active = False
_lock = threading.RLock()
_undo: list[Callable[[], object]] = []


@contextmanager
def inline() -> Iterator[None]:
    """Run every guard of this process inline inside the block.

    A guard without a model calls its loader in the thread that needs the model, and the loader's own error is raised;
    there is no warm-up, no validation and no policy. At the end, models that were loaded inline are dropped, so that
    the next use loads them in the normal way.
    """
    global _active
    _active = True
    try:
        yield
    finally:
        _active = False
        while _undo:
            _undo.pop()()


def active() -> bool:
    """Whether guards run inline now."""
    return _active


def load(guard: GuardContext[M]) -> None:
    """Load the model in this thread, unless there is one."""
    with _lock:
        guard.state.raise_if_closed()
        if guard.state.current is None:
            _install(guard, unpacked(resolve(guard.options.load())))


async def aload(guard: GuardContext[M]) -> None:
    """:func:`load` on the running event loop."""
    guard.state.raise_if_closed()
    if guard.state.current is None:
        made: Any = guard.options.load()
        loaded = unpacked(await made if asyncio.iscoroutine(made) else made)
        with _lock:
            if guard.state.current is None:  # another task may have been faster
                _install(guard, loaded)


def unload(guard: GuardContext[Any]) -> None:
    """Drop the model, if there is one."""
    with _lock:
        guard.state.retire_until_next_use(if_unused=False)


def _install(guard: GuardContext[Any], loaded: Unpacked) -> None:
    state, number = guard.state, guard.state.generations
    runtime = guard.runtime
    born, began = runtime.clock(), runtime.wall_clock()
    generation = Generation(number + 1, loaded.model, version=loaded.version, born=born, began=began, jitter=0.0)
    state.install(LoadJob((), urgent=True), generation, discardable=False)
    _undo.append(lambda: state.forget_current(number))
