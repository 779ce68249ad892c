"""Loads that wait for themselves, directly or through others: found before anybody waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from modelguard.errors import WouldDeadlock
from modelguard.lifecycle._state import GuardState

#: For each thread that waits for loads: whose loads. The tasks of one event loop may wait for several.
_waiting: dict[int, list[GuardState[Any]]] = {}


@contextmanager
def waiting_for(state: GuardState[Any]) -> Iterator[None]:
    """Wait for a load of the guard with this ``state`` inside the block.

    Raises:
        WouldDeadlock: That load waits for this thread: its loader waits here, or for a load whose loader does.
    """
    me = threading.get_ident()
    mine = _waiting.setdefault(me, [])
    mine.append(state)  # recorded first: if two threads close a circle at once, the second one sees it
    try:
        _raise_on_circle(state, me)
        yield
    finally:
        mine.remove(state)
        if not mine:
            _waiting.pop(me, None)


def raise_on_event_loop(name: str, action: str, instead: str) -> None:
    """Refuse to block a running event loop, which the awaited work may need.

    Args:
        name: The guard's or pool's name.
        action: What would block.
        instead: The expression to write in its place.

    Raises:
        WouldDeadlock: This thread runs an event loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WouldDeadlock(name, why=f"{action}() would block the running event loop", fix=f"Write: {instead}.")


def _raise_on_circle(state: GuardState[Any], me: int) -> None:
    pending, seen = [state], {state}
    while pending:
        job = pending.pop().job
        for thread in tuple(job.threads) if job is not None else ():
            if thread == me:
                raise WouldDeadlock(
                    state.name,
                    why="its loader waits for the very model that it is loading",
                    fix="Use the model itself inside the loader, or move the call to warmup: it runs on the new model.",
                )
            following = [other for other in _waiting.get(thread, ()) if other not in seen]
            seen.update(following)
            pending.extend(following)


def after_fork_in_child() -> None:
    """Forget the parent's waiting threads, which do not exist in the child."""
    _waiting.clear()
