"""Signals in a forked child that does not serve yet: those that ask a process to end must end it.

Until a server has installed the handlers of its workers, a child has those of its parent. They note the signal for
the parent's main loop, which the child does not run, so the signal is lost: the server then waits for the worker until
its patience is over (30 s in gunicorn), or forever.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache

__all__ = ["ENDING", "adopt_orphans", "block", "default_actions", "end_with_parent", "restore_mask"]

#: The signals that ask a process to end.
ENDING = frozenset(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP") if hasattr(signal, name)
)

#: More than the size of ``struct sigaction`` anywhere (152 bytes in glibc). All zeros mean the default action.
_ACTION_SIZE = 512
_DEFAULT, _IGNORE = 0, 1  # SIG_DFL and SIG_IGN; the structure begins with them or with a function's address

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def block() -> set[int]:
    """Keep the signals of :data:`ENDING` pending in this thread; returns the mask to restore."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ENDING))


def restore_mask(mask: set[int]) -> None:
    """Restore the mask that :func:`block` returned; pending signals arrive now."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def default_actions() -> Iterator[None]:
    """Give the signals of :data:`ENDING` and SIGCHLD their default actions inside the block.

    Ignored signals stay ignored. The actions are read from and written to the system, because Python does not know
    handlers that were installed in C, such as uWSGI's.
    """
    earlier = {number: action for number in (*ENDING, signal.SIGCHLD) if (action := _action(number)) is not None}
    for number in earlier:
        _set(number, bytes(_ACTION_SIZE))
    try:
        yield
    finally:
        for number, action in earlier.items():
            if _action(number) is None:  # otherwise the code inside the block has installed its own
                _set(number, action)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends (Linux only).

    Args:
        parent: The process id of the parent. If it has ended already, this process ends now.
    """
    if hasattr(_libc(), "prctl"):
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


@contextlib.contextmanager
def adopt_orphans() -> Iterator[None]:
    """In the block, children of this process's children become its own when their parent ends (Linux only)."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _action(number: int) -> bytes | None:
    """The action of a signal, as the system stores it; None if the signal is ignored or has its default action."""
    action = ctypes.create_string_buffer(_ACTION_SIZE)
    _libc().sigaction(number, None, action)
    handler = int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)
    return None if handler in (_DEFAULT, _IGNORE) else action.raw


def _set(number: int, action: bytes) -> None:
    _libc().sigaction(number, action, None)
