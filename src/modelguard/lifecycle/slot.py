"""One process of this user on this host may hold two copies of a model at a time.

The slot is a POSIX record lock on a file in a private folder. The kernel gives it back when its holder dies, and,
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

if sys.platform != "win32":
    import fcntl

#: A holder that keeps the slot longer than this (a hung loader without load_timeout) no longer holds others up.
PATIENCE = 300.0
_POLL = 0.05


class Slot:
    """The turn to replace a model.

    Args:
        folder: Gives the folder of the lock file; it is made with mode 700 when first needed.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._mine = threading.Lock()

    @contextmanager
    def held(
        self, *, sleep: Callable[[float], None], clock: Callable[[], float], cancelled: Callable[[], bool]
    ) -> Iterator[str]:
        """Wait for the slot, hold it for the block, and say how it was had.

        Yields:
            ``"host"``; ``"process"`` where no lock file can be used; ``"timed out"`` if its holder kept it for
            five minutes, ``"cancelled"`` if ``cancelled()`` turned true first: in both cases it is not held.
        """
        deadline = clock() + PATIENCE

        def wait_for(attempt: Callable[[], bool]) -> bool:
            while not attempt():
                if cancelled() or clock() >= deadline:
                    return False
                sleep(_POLL)
            return True

        # Record locks belong to the process: between its own threads an ordinary lock decides.
        mine = self._mine
        if not wait_for(lambda: mine.acquire(blocking=False)):
            yield "cancelled" if cancelled() else "timed out"
            return
        try:
            descriptor = self._open()
            if descriptor is None:
                yield "process"
                return
            try:
                got = wait_for(lambda: _lock(descriptor))
                yield "host" if got else "cancelled" if cancelled() else "timed out"
            finally:
                os.close(descriptor)  # which releases the lock
        finally:
            mine.release()

    def after_fork_in_child(self) -> None:
        """Forget the parent's turn: its thread does not exist here, and record locks are not inherited."""
        self._mine = threading.Lock()

    def _open(self) -> int | None:
        if sys.platform == "win32":  # there is no record lock to be had
            return None
        try:
            folder = self._folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            # A folder that somebody else made or can write to could be a trap or a way to hold everybody up.
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
    named = os.environ.get("MODELGUARD_RUNTIME_DIR")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "modelguard")
    import tempfile

    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir(), f"modelguard-{user}")


HOST = Slot(private_folder)
