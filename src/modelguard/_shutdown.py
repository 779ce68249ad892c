"""At interpreter exit: wait until none of modelguard's threads is inside native code, then unload models.

Up to CPython 3.13 a daemon thread that returns from native code while the interpreter exits is ended by
``pthread_exit``. If there is C++ on its stack, such as torch's, that aborts the whole process: "terminate called
without an active exception", exit status 134 (https://github.com/python/cpython/issues/87135). So the exit waits for
running loads and batches, but only for a limited time: a hanging load must not prevent the exit.

Models are unloaded after that, in the thread that exits: CPython 3.12 and later start no thread any more at this point.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Literal

#: Seconds that the exit waits for all running work together: half of the time that Docker gives a container to stop.
GRACE = 5.0

#: In this order: a batch may need a load, and a load may install a model.
_ORDER = ("batches", "loads", "models")

_waits: dict[str, Callable[[float], object]] = {}
#: Taken by the first call, and never released.
_first = threading.Lock()


def before_exit(what: Literal["batches", "loads", "models"], wait: Callable[[float], object]) -> None:
    """Call ``wait`` at interpreter exit, with the seconds that it may take."""
    _waits[what] = wait
    if _first.acquire(blocking=False):
        atexit.register(_wait)


def _wait() -> None:
    until = time.monotonic() + GRACE
    for what in _ORDER:
        if what in _waits:
            _waits[what](max(0.0, until - time.monotonic()))
