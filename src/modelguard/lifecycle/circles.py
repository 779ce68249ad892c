"""Loads that wait for themselves: found before anybody waits, whoever stands between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from modelguard.errors import WouldDeadlock

if TYPE_CHECKING:
    from modelguard.lifecycle.core import Core

#: For each thread that waits for loads: whose they are. The tasks of one event loop may wait for several.
_waiting: dict[int, list[Core[Any]]] = {}


@contextmanager
def waiting_for(core: Core[Any]) -> Iterator[None]:
    """Wait for a load of ``core`` inside the block.

    Raises:
        WouldDeadlock: That load waits for this thread: its loader waits here, or for a load whose loader does.
    """
    me = threading.get_ident()
    mine = _waiting.setdefault(me, [])
    mine.append(core)  # noted first, so that of two who close a circle at once the second sees it
    try:
        _refuse_circle(core, me)
        yield
    finally:
        mine.remove(core)
        if not mine:
            _waiting.pop(me, None)


def refuse_on_loop(name: str, action: str, instead: str) -> None:
    """Refuse to block a running event loop, which the thing waited for may need."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise WouldDeadlock(
        name, why=f"{action}() would block the running event loop", fix=f"Write: await guard.{instead}()."
    )


def _refuse_circle(core: Core[Any], me: int) -> None:
    to_look_at, seen = [core], {core}
    while to_look_at:
        ticket = to_look_at.pop().ticket
        for thread in tuple(ticket.threads) if ticket is not None else ():
            if thread == me:
                raise WouldDeadlock(
                    core.name,
                    why="its loader waits, here, for the very model that is being loaded",
                    fix="Use the model itself inside the loader, or move the call to warmup: it runs on the new model.",
                )
            following = [other for other in _waiting.get(thread, ()) if other not in seen]
            seen.update(following)
            to_look_at.extend(following)


def after_fork_in_child() -> None:
    """Nobody waits in a newborn child."""
    _waiting.clear()
