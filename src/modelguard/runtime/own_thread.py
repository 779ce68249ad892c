"""What the calling context says about a call: it must not leave its thread, or it only looks for a bad item.

A batched function that a warm-up calls would hand its item to another thread, which would wait for the model that is
being warmed up. Inside :func:`stay` it computes the item at once instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: How many blocks are open in this process; one look at it saves the context look-up of :func:`required`.
open_blocks = 0

_in_own_thread: ContextVar[bool] = ContextVar("modelguard own thread", default=False)


@contextmanager
def stay() -> Iterator[None]:
    """Have batched functions that the block calls compute in this thread."""
    global open_blocks
    token = _in_own_thread.set(True)
    open_blocks += 1
    try:
        yield
    finally:
        open_blocks -= 1
        _in_own_thread.reset(token)


def required() -> bool:
    return _in_own_thread.get()


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
