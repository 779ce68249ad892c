"""A trial child that does what every worker will do, to detect a hang before the first worker starts."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

# A forked child as its parent sees it: what it writes, whether it has ended, and its end.


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
            if self._handle is None or self._send(0):
                if group:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self._pid, signal.SIGKILL)
                self._send(signal.SIGKILL)
            return os.waitpid(self._pid, 0)[1]
        except ChildProcessError:
            return None
        finally:
            if self._handle is not None:
                os.close(self._handle)

    def _send(self, number: int) -> bool:
        """Send a signal; False if the child's number is no longer its own: it has ended, and somebody waited for it."""
        try:
            if self._handle is None:
                os.kill(self._pid, number)
            else:
                signal.pidfd_send_signal(self._handle, number)
        except ProcessLookupError:
            return False
        return True


def _open(pid: int) -> int | None:
    """Open a process; None if the system cannot do it, or the process is gone."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


# Signals in a forked child that does not serve yet: those that ask a process to end must end it.
#
# Until a server has installed the handlers of its workers, a child has those of its parent. They note the signal for
# the parent's main loop, which the child does not run, so the signal is lost: the server then waits for the worker
# until its patience is over (30 s in gunicorn), or forever.


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


#: The child writes its stacks this many seconds before it is killed.
_STACKS_BEFORE_KILL = 0.5

_DONE = b"done"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial ended.

    Attributes:
        ok: Whether the work succeeded.
        hung: Whether it did not end in time.
        report: The traceback of an error, or the stacks of a child that hung.
        seconds: How long it took.
    """

    ok: bool
    hung: bool
    report: str
    seconds: float


def run(work: Callable[[], None], timeout: float) -> TrialResult:
    """Fork, run ``work`` in the child, and report how it ended. This function never returns in the child.

    Processes that the work has started are killed with the child.

    Args:
        work: The function to run.
        timeout: Seconds until the child is killed.

    Returns:
        The result.
    """
    started = time.monotonic()
    parent = os.getpid()
    reader, writer = os.pipe()
    sys.stdout.flush()  # otherwise the content of the buffers is written twice
    sys.stderr.flush()
    mask = block()
    try:
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _child(work, writer, timeout, parent, mask)
    finally:
        restore_mask(mask)
    os.close(writer)
    child = ForkedChild(pid)
    try:
        output, ended = child.read(reader, started + timeout)
    finally:
        os.close(reader)
        status = child.end(group=True)
    seconds = time.monotonic() - started
    ok = output == _DONE
    if not (ok or output):
        output = f"the child {_how_it_ended(status)} and wrote nothing".encode()
    return TrialResult(ok, not ended, "" if ok else output.decode(errors="replace"), seconds)


def _child(work: Callable[[], None], writer: int, timeout: float, parent: int, mask: set[int]) -> NoReturn:
    me, group = os.getpid(), os.getpgrp()
    try:
        with default_actions():
            restore_mask(mask)
            end_with_parent(parent)  # a child that hangs must not outlive a server that is killed
            os.setpgid(0, 0)  # so that the processes that it starts can be killed with it
            # This thread needs neither the GIL nor a lock, so it writes even if the main thread hangs in C.
            faulthandler.dump_traceback_later(max(timeout - _STACKS_BEFORE_KILL, timeout / 2), file=writer)
            work()
            if os.getpid() == me:  # not a process that the work has forked and that returned here
                faulthandler.cancel_dump_traceback_later()
                os.write(writer, _DONE)
    except BaseException:  # noqa: BLE001 - the parent reports it
        if os.getpid() == me:
            faulthandler.cancel_dump_traceback_later()
            os.write(writer, traceback.format_exc().encode(errors="replace"))
    finally:
        if os.getpid() == me:
            _end_what_it_started(me, group)
        os._exit(0)  # no exit handler and no buffer of the parent may run twice


def _end_what_it_started(me: int, group: int) -> None:
    """Kill the processes of this child's group, but not the child, whose exit status would alarm the server's log."""
    with contextlib.suppress(OSError):
        os.setpgid(0, group)
        os.killpg(me, signal.SIGKILL)


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "ended (something else in this process waits for all children, and has taken its exit status)"
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit status {os.waitstatus_to_exitcode(status)}"
