"""What the calling context says about a call: it must not leave its thread, or it only looks for a bad item.

A batched function that a warm-up calls would hand its item to another thread, which would wait for the model that is
being warmed up. Inside :func:`stay` it computes the item at once instead; inside :func:`inline` all of them do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from modelguard.runtime import fork_hooks

#: How many blocks are open in this process; one look at it saves the context look-up of :func:`required`.
open_blocks = 0
#: How many of them hold for the whole process, and what is undone at the end of the last one.
_inline = 0
_undo: list[Callable[[], object]] = []
_lock = threading.RLock()  # reentrant: a signal handler may fork
fork_hooks.at_fork(fork_hooks.Rank.LOCKS, before=_lock.acquire, in_parent=_lock.release, in_child=_lock.release)

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
    """Run guards and batched functions inline inside the block, in the whole process.

    A guard without a model calls its loader in the thread that needs the model, and the loader's own error is raised;
    there is no warm-up, no validation and no policy. A call of a batched function runs it with a list of its one item,
    in the calling thread: there is no queue, no deadline, no breaker, and nothing is counted. Arguments and results are
    checked as always, and what is closed stays closed.
    """
    _change(1, inline=1)
    try:
        yield
    finally:
        _change(-1, inline=-1)
        while _undo and not is_inline():
            _undo.pop()()


def is_inline() -> bool:
    return _inline > 0


def after_inline(undo: Callable[[], object]) -> None:
    """Call ``undo`` when nothing is inline any more."""
    _undo.append(undo)


def _change(by: int, *, inline: int = 0) -> None:
    global open_blocks, _inline
    with _lock:
        open_blocks, _inline = open_blocks + by, _inline + inline


def required() -> bool:
    return is_inline() or _in_own_thread.get()


# Calls that only look for the item at fault, in a batch that has raised.
#
# One bad item makes up to ``log2(n) + 1`` runs in a row raise. Counted one by one they would look like a broken model,
# and reload it: of a batch of 32, one poison input in sixteen reached five errors in a row.


rerunning: ContextVar[bool] = ContextVar("modelguard reruns", default=False)


@contextmanager
def reruns() -> Iterator[None]:
    """Errors of guarded functions that the block calls say nothing new about the model."""
    token = rerunning.set(True)
    try:
        yield
    finally:
        rerunning.reset(token)
