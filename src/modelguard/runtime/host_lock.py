"""Only one process of this user on this host may hold two copies of a model at a time.

The host lock is a POSIX record lock on a file in a private folder. The kernel releases it when its holder dies and,
unlike ``flock``, a forked child does not inherit it.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from modelguard.runtime import fork_hooks

if sys.platform != "win32":
    import fcntl

#: Seconds after which others no longer wait for a holder, such as a hung loader without a timeout.
MAX_WAIT = 300.0
_POLL = 0.05

#: How the lock was obtained: ``"host"``, for all processes of this user; ``"process"``, for this process alone, where
#: no lock file can be used; or why it was not: the holder kept it too long, or the wait was cancelled.
Held = Literal["host", "process", "timed_out", "cancelled"]


class HostLock:
    """The right to replace a model.

    Args:
        folder: Returns the folder of the lock file; it is made with mode 700 when first needed.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._mine = threading.Lock()

    @contextmanager
    def held(
        self, *, sleep: Callable[[float], None], clock: Callable[[], float], cancelled: Callable[[], bool]
    ) -> Iterator[Held]:
        """Wait for the lock and hold it for the block.

        Yields:
            How it was obtained. ``"timed_out"`` (its holder kept it for five minutes) and ``"cancelled"``
            (``cancelled()`` turned true first) mean that it is not held.
        """
        deadline = clock() + MAX_WAIT

        def wait_for(attempt: Callable[[], bool]) -> Literal["timed_out", "cancelled"] | None:
            while not attempt():
                if cancelled() or clock() >= deadline:
                    return "cancelled" if cancelled() else "timed_out"
                sleep(_POLL)
            return None

        # Record locks belong to the process; between its own threads an ordinary lock decides.
        mine = self._mine
        if refused := wait_for(lambda: mine.acquire(blocking=False)):
            yield refused
            return
        try:
            descriptor = self._open()
            if descriptor is None:
                yield "process"
                return
            try:
                yield wait_for(lambda: _lock(descriptor)) or "host"
            finally:
                os.close(descriptor)  # which releases the lock
        finally:
            mine.release()

    def after_fork_in_child(self) -> None:
        """Forget that the parent held it: its thread does not exist here, and record locks are not inherited."""
        self._mine = threading.Lock()

    def _open(self) -> int | None:
        if sys.platform == "win32":  # it has no record locks
            return None
        try:
            folder = self._folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            # A folder that another user made or can write to may be a trap, or let that user block everybody.
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                return None
            return os.open(folder / "reload.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None


def _lock(descriptor: int) -> bool:
    assert sys.platform != "win32"  # noqa: S101 - no descriptor was opened there
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def private_folder() -> Path:
    """``$MODELGUARD_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/modelguard``, else ``modelguard-UID`` in the temp folder."""
    if named := os.environ.get("MODELGUARD_RUNTIME_DIR"):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime, "modelguard")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(_temporary(), f"modelguard-{user}")


def _temporary() -> str:
    """The temp folder, also while it is full: ``gettempdir()`` is another one then, where the others do not meet."""
    for place in (*map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp"):  # noqa: S108 - the folder in it is private
        if place and os.access(place, os.W_OK | os.X_OK):
            return place
    import tempfile

    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # nothing can be written; whoever uses the folder says so
        return "/tmp"  # noqa: S108 - as above


HOST_LOCK = HostLock(private_folder)
fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=HOST_LOCK.after_fork_in_child)
