"""A forked child as its parent sees it: what it writes, whether it has ended, and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

__all__ = ["ForkedChild"]

_CHUNK = 65_536


class ForkedChild:
    """A child that this process has just forked, and ends with :meth:`end`.

    Something else in this process may take the child's exit status first: a handler of SIGCHLD that waits for any
    child, as gunicorn's up to version 23 does, or a SIGCHLD that is ignored. The child's number may then belong to
    another process, so the child is addressed by a file descriptor (``pidfd_open``, Linux 5.3), if there is one.

    Args:
        pid: Its process id.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._handle = _open(pid)

    def read(self, reader: int, deadline: float) -> tuple[bytes, bool]:
        """Read what the child writes until it ends or closes the pipe, or until ``deadline``.

        A process that the child has started may keep the pipe open, so the child's own end counts too.

        Args:
            reader: The pipe's end to read from.
            deadline: Monotonic seconds.

        Returns:
            The output, and whether the child has ended or closed the pipe.
        """
        output = b""
        poll = select.poll()  # select.select fails with more than 1,024 open files
        for descriptor in (reader, self._handle):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in poll.poll(left * 1000)}
            if reader in ready:
                more = os.read(reader, _CHUNK)
                if not more:
                    return output, True
                output += more
            elif ready:
                return output, True
        return output, False

    def end(self, *, group: bool) -> int | None:
        """Kill the child if it still runs, and wait for its end.

        Args:
            group: Whether the child leads a process group, which is killed as well.

        Returns:
            Its wait status; None if something else in this process has taken it.
        """
        try:
            if self._exists():
                if group:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self._pid, signal.SIGKILL)
                self._kill()
            return os.waitpid(self._pid, 0)[1]
        except ChildProcessError:
            return None
        finally:
            if self._handle is not None:
                os.close(self._handle)

    def _exists(self) -> bool:
        """Whether the child's number is still its own: it runs, or nobody has waited for it."""
        if self._handle is None:
            return True
        try:
            signal.pidfd_send_signal(self._handle, 0)
        except ProcessLookupError:
            return False
        return True

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._handle is None:
                os.kill(self._pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _open(pid: int) -> int | None:
    """Open a process; None if the system cannot do it, or the process is gone."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
