"""Where the processes of one user meet: sockets in a private folder, and a lock on it.

The lock is ``flock`` on the folder itself, so there is no lock file to leave behind: the kernel releases it when the
last process that holds it dies. A socket whose process is gone refuses connections, and the next election removes it.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from modelguard.environment._peer import peer
from modelguard.errors import NotSupported

if sys.platform != "win32":
    import fcntl

__all__ = ["Folder", "ForeignPeer", "check_peer", "unlock"]

#: Seconds between two attempts at the lock.
_POLL = 0.01

#: Connections that wait to be accepted.
_BACKLOG = 512

#: Descriptors with which this process may hold the lock, for the children that it forks meanwhile.
_held: set[int] = set()


class ForeignPeer(Exception):
    """The other end of a connection belongs to another user."""


class Folder:
    """The private folder, held open: what is checked once stays what it was.

    Args:
        path: The folder; it is made with mode 700 if it is missing.

    Raises:
        NotSupported: It cannot be made, is not a folder, belongs to another user, or others may use it.
        OSError: No descriptor is left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(self._fd)
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise
            raise _unusable(f"the folder {path} cannot be used: {error.strerror}") from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            self.close()
            whose = f"it belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}"
            raise _unusable(f"the folder {path} is not private: {whose}, but it must be this user's, with mode 700")

    def fileno(self) -> int:
        """Its descriptor."""
        return self._fd

    def close(self) -> None:
        """Close it. Closing twice does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def names(self, prefix: str) -> list[str]:
        """The sockets in it whose names start like this, in their order."""
        found = os.listdir(self._fd)  # noqa: PTH208 - of the open folder
        return sorted(name for name in found if name.startswith(prefix))

    def connect(self, name: str, timeout: float) -> socket.socket | None:
        """Connect to the process that listens there; None if there is none.

        Raises:
            ForeignPeer: It belongs to another user.
            OSError: It does not accept connections.
        """
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _connect(connected, self._address(name), time.monotonic() + timeout)
            check_peer(connected)
        except (FileNotFoundError, ConnectionRefusedError):
            connected.close()
            return None
        except BaseException:
            connected.close()
            raise
        return connected

    def listen(self, name: str) -> socket.socket:
        """Take the name, and accept connections. The caller holds the lock."""
        self.remove(name)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(self._address(name))
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
        return listening

    def remove(self, name: str) -> None:
        """Remove a socket. The caller holds the lock."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    @contextmanager
    def locked(self, give_up: Callable[[], bool]) -> Iterator[int | None]:
        """Hold the lock for the block.

        Args:
            give_up: Asked while another process holds it.

        Yields:
            A descriptor that holds the lock, also in a process that inherits it; None after giving up.
        """
        lock = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _held.add(lock)
        try:
            while not _lock(lock):
                if give_up():
                    yield None
                    return
                time.sleep(_POLL)
            yield lock
        finally:
            _held.discard(lock)
            os.close(lock)

    def _address(self, name: str) -> str:
        # By the open folder: nobody can exchange it in between, and a long path does not matter.
        return f"/proc/self/fd/{self._fd}/{name}"


def _connect(connecting: socket.socket, address: str, until: float) -> None:
    """Connect, and wait for room among the connections that are to be accepted.

    By looking: Python's own timeout does not wait for that, and a wait in the kernel that a signal interrupts leaves a
    socket without a peer.
    """
    connecting.setblocking(False)  # noqa: FBT003 - its only parameter
    while True:
        try:
            connecting.connect(address)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(_POLL)
        else:
            connecting.setblocking(True)  # noqa: FBT003 - its only parameter
            return


def check_peer(connected: socket.socket) -> int:
    """Check that the other end belongs to this process's user; returns its process id.

    Raises:
        ForeignPeer: It does not.
    """
    pid, user = peer(connected)
    if user != os.geteuid():
        raise ForeignPeer(f"process {pid} of user {user}")
    return pid


def unlock(lock: int) -> None:
    """Release the lock for all processes that have inherited its descriptor."""
    fcntl.flock(lock, fcntl.LOCK_UN)


def _lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _unusable(f"the private folder cannot be locked: {error.strerror}") from error
    return True


def _unusable(reason: str) -> NotSupported:
    return NotSupported('scope="host"', reason=f"{reason}. MODELGUARD_RUNTIME_DIR names another folder")


def _after_fork_in_child() -> None:
    """The parent's election goes on in the parent; its lock must not outlive it in here."""
    for lock in list(_held):
        with suppress(OSError):
            os.close(lock)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
