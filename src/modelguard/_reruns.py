"""Calls that only look for the item at fault, in a batch that has raised.

One bad item makes up to ``log2(n) + 1`` runs in a row raise. Counted one by one they would look like a broken model,
and reload it: of a batch of 32, one poison input in sixteen reached five errors in a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_here: ContextVar[bool] = ContextVar("modelguard reruns", default=False)


@contextmanager
def running() -> Iterator[None]:
    """Errors of guarded functions that the block calls say nothing new about the model."""
    token = _here.set(True)
    try:
        yield
    finally:
        _here.reset(token)


def active() -> bool:
    """Whether the calling context is inside such a block."""
    return _here.get()
