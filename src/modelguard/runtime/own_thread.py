"""What the calling context says about a call: it must not leave its thread, or it only looks for a bad item.

A batched function that a warm-up calls would hand its item to another thread, which would wait for the model that is
being warmed up. Inside :func:`stay` it computes the item at once instead; inside :func:`inline` all of them do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from modelguard.runtime import fork

#: How many blocks are open in this process; one look at it saves the context look-up of :func:`required`.
open_blocks = 0
#: How many of them hold for the whole process.
_inline = 0
_lock = threading.RLock()  # reentrant: a signal handler may fork
fork.at_fork(fork.Rank.LOCKS, before=_lock.acquire, in_parent=_lock.release, in_child=_lock.release)

_in_own_thread: ContextVar[bool] = ContextVar("modelguard own thread", default=False)


@contextmanager
def stay() -> Iterator[None]:
    """Have batched functions that the block calls compute in this thread."""
    token = _in_own_thread.set(True)
    _change(1)
    try:
        yield
    finally:
        _change(-1)
        _in_own_thread.reset(token)


@contextmanager
def inline() -> Iterator[None]:
    """Compute inline inside the block, in the whole process.

    A call runs the batch function with a list of its one item, in the calling thread. There is no queue, no deadline,
    no breaker, and nothing is counted. Arguments and results are checked as always, and a closed function stays closed.
    """
    _change(1, inline=1)
    try:
        yield
    finally:
        _change(-1, inline=-1)


def _change(by: int, *, inline: int = 0) -> None:
    global open_blocks, _inline
    with _lock:
        open_blocks, _inline = open_blocks + by, _inline + inline


def required() -> bool:
    return _inline > 0 or _in_own_thread.get()


# Calls that only look for the item at fault, in a batch that has raised.
#
# One bad item makes up to ``log2(n) + 1`` runs in a row raise. Counted one by one they would look like a broken model,
# and reload it: of a batch of 32, one poison input in sixteen reached five errors in a row.


_rerunning: ContextVar[bool] = ContextVar("modelguard reruns", default=False)


@contextmanager
def reruns() -> Iterator[None]:
    """Errors of guarded functions that the block calls say nothing new about the model."""
    token = _rerunning.set(True)
    try:
        yield
    finally:
        _rerunning.reset(token)


def is_rerun() -> bool:
    return _rerunning.get()
