"""A switch for tests: batched functions compute each item at once, in the thread of its caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["inline"]

#: How many blocks of :func:`inline` are open. Read at every call, so it is a plain number.
open_blocks = 0
_lock = threading.Lock()


@contextmanager
def inline() -> Iterator[None]:
    """Compute inline inside the block, in the whole process.

    A call runs the batch function with a list of its one item, in the calling thread. There is no queue, no deadline,
    no breaker, and nothing is counted. Arguments and results are checked as always, and a closed function stays closed.
    """
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    global open_blocks
    with _lock:
        open_blocks += by
