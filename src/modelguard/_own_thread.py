"""Work that must not leave its thread: the warm-up of a model that no other thread can use yet.

A batched function that a warm-up calls would hand its item to another thread, which would wait for the model that is
being warmed up. Inside :func:`stay` it computes the item at once instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

#: How many blocks are open in this process; one look at it saves the context look-up of :func:`required`.
open_blocks = 0

_here: ContextVar[bool] = ContextVar("modelguard own thread", default=False)


@contextmanager
def stay() -> Iterator[None]:
    """Have batched functions that the block calls compute in this thread."""
    global open_blocks
    token = _here.set(True)
    open_blocks += 1
    try:
        yield
    finally:
        open_blocks -= 1
        _here.reset(token)


def required() -> bool:
    """Whether the calling context is inside such a block."""
    return _here.get()
