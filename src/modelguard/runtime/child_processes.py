"""Processes that this one starts or forks: how they end with it, are ended, and have ended; and signals for that."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import NoReturn

#: The signals that ask a process to end. Python's own handlers, or the kernel, end it at once.
ENDING = frozenset(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP") if hasattr(signal, name)
)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def end_with_parent(parent: int, number: int) -> None:
    """Receive a signal when the parent ends, however it ends (Linux only). Exits at once if it has ended already.

    The kernel means the thread that started this process, so that must be one that lives as long as its process.
    """
    if hasattr(_libc(), "prctl"):
        _libc().prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def adopt_orphans() -> Iterator[None]:
    """In the block, children of this process's children become its own when their parent ends (Linux only)."""
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def exit_now(status: int) -> NoReturn:
    """End this process without the exit handlers that it has inherited."""
    flush_output()
    os._exit(status)


def flush_output() -> None:
    """Write what is still in this process's buffers, as far as it can be written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a program may have closed or replaced them
            stream.flush()


# How a process is ended, and has ended. By a descriptor where the system has them (``pidfd_open``, Linux 5.3): a number
# may belong to another process by then.


def open_pidfd(pid: int) -> int | None:
    """Open a process; None if the system cannot do it, or the process is gone."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def send_kill(pidfd: int) -> None:
    with suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def await_end(pidfd: int, seconds: float) -> bool:
    """Wait until a process has ended, or is a zombie, at most so many seconds; whether it has."""
    poll = select.poll()  # select.select fails with more than 1,024 open files
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, seconds) * 1000))


def kill_group(group: int) -> None:
    """End a whole process group; does nothing if there is none."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Describe how a process ended: the signal's name for a negative code, else its exit status."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def reap(number: int, *, own: bool = False) -> bool:
    """Collect a process that has ended or, of a negative number, a whole group; whether it is gone.

    Where it may become this process's child by the death of its parent, as in a container's first process, what is no
    child is not gone; what has been its own child is.
    """
    some = False
    try:
        while os.waitpid(number, os.WNOHANG)[0]:
            some = True
    except ChildProcessError:
        return some or own
    return False


#: Bytes that are read at a time.
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
        self._handle = open_pidfd(pid)

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
                if not (more := os.read(reader, _CHUNK)):
                    return output, True
                output += more
            elif ready:
                return output, True
        return output, False

    def end(self) -> int | None:
        """Kill the child and its process group if they still run, and wait for its end.

        Returns:
            Its wait status; None if something else in this process has taken it.
        """
        try:
            if self._handle is None or self.send(0):
                kill_group(self._pid)
                self.send(signal.SIGKILL)
            return os.waitpid(self._pid, 0)[1]
        except ChildProcessError:
            return None
        finally:
            if self._handle is not None:
                os.close(self._handle)

    def send(self, number: int) -> bool:
        """Send a signal; False if the child's number is no longer its own: it has ended, and somebody waited for it."""
        try:
            if self._handle is None:
                os.kill(self._pid, number)
            else:
                signal.pidfd_send_signal(self._handle, number)
        except ProcessLookupError:
            return False
        return True


# Signals in this process, and in a forked child of it.


def do_nothing(_number: int, _frame: object) -> None:
    """A signal handler, where SIG_IGN would be inherited by programs that the model starts."""


class _Ended(BaseException):
    """By the signal of this number."""


@contextmanager
def ending_signals() -> Iterator[None]:
    """Let signals that would end this process at once end it after the block has been left."""

    def end(number: int, _: object) -> None:
        raise _Ended(number)

    if threading.current_thread() is not threading.main_thread():  # where Python handles no signals
        yield
        return
    before = {each: signal.getsignal(each) for each in ENDING}
    handled = [each for each, handler in before.items() if handler is signal.SIG_DFL]
    for each in handled:
        signal.signal(each, end)
    came = None
    try:
        yield
    except _Ended as ended:
        (came,) = ended.args
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
    if came is not None:
        signal.raise_signal(came)


# Signals in a forked child that does not serve yet: those that ask a process to end must end it.
#
# Until a server has installed the handlers of its workers, a child has those of its parent. They note the signal for
# the parent's main loop, which the child does not run, so the signal is lost: the server then waits for the worker
# until its patience is over (30 s in gunicorn), or forever.


#: More than the size of ``struct sigaction`` anywhere (152 bytes in glibc). All zeros mean the default action.
_ACTION_SIZE = 512
_DEFAULT, _IGNORE = 0, 1  # SIG_DFL and SIG_IGN; the structure begins with them or with a function's address


def block(also: Iterable[int] = ()) -> set[int]:
    """Keep the signals of :data:`ENDING`, and others, pending in this thread; returns the mask to restore."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, *also}))


def restore_mask(mask: set[int]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def default_actions() -> Iterator[None]:
    """Give the signals of :data:`ENDING` and SIGCHLD their default actions inside the block.

    Ignored signals stay ignored. The actions are read from and written to the system, because Python does not know
    handlers that were installed in C, such as uWSGI's.
    """
    earlier = {number: action for number in (*ENDING, signal.SIGCHLD) if (action := _action(number)) is not None}
    for number in earlier:
        _libc().sigaction(number, bytes(_ACTION_SIZE), None)
    try:
        yield
    finally:
        for number, action in earlier.items():
            if _action(number) is None:  # otherwise the code inside the block has installed its own
                _libc().sigaction(number, action, None)


def _action(number: int) -> bytes | None:
    """The action of a signal, as the system stores it; None if the signal is ignored or has its default action."""
    action = ctypes.create_string_buffer(_ACTION_SIZE)
    _libc().sigaction(number, None, action)
    handler = int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)
    return None if handler in (_DEFAULT, _IGNORE) else action.raw


# A trial child that does what every worker will do, to detect a hang before the first worker starts.


#: The signal that asks a child for its stacks, this many seconds before it is killed. Blocked until it can answer.
_ASK = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else getattr(signal, "SIGUSR2", 0)
_ASKED_BEFORE_KILL = 0.5


def _fork_and_read(run: Callable[[int, set[int]], NoReturn], timeout: float) -> tuple[bytes, bool, int | None]:
    """Fork, and read what the child writes until it ends or the time is over; then it is killed.

    Args:
        run: What the child does, with the descriptor to write to and the signal mask that it is to restore.
        timeout: Seconds.

    Returns:
        What it has written, whether it ended in time, and its wait status as of :meth:`ForkedChild.end`.
    """
    deadline = time.monotonic() + timeout
    reader, writer = os.pipe()
    flush_output()  # otherwise the content of the buffers is written twice
    mask = block({_ASK})
    try:
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            run(writer, mask)
    except OSError:  # too many processes
        os.close(reader)
        raise
    finally:
        restore_mask(mask)
        os.close(writer)
    child = ForkedChild(pid)
    try:
        output, ended = child.read(reader, deadline - min(_ASKED_BEFORE_KILL, timeout / 2))
        if not ended:
            child.send(_ASK)
            stacks, ended = child.read(reader, deadline)
            output += stacks
    finally:
        os.close(reader)
        status = child.end()
    return output, ended, status


_DONE = b"done"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a trial ended."""

    ok: bool  # whether the work succeeded
    hung: bool  # whether it did not end in time
    report: str  # what the work returned, the traceback of an error, or the stacks of a child that hung
    seconds: float  # how long it took


def run_trial(work: Callable[[], object], timeout: float) -> TrialResult:
    """Fork, run ``work`` in the child, and report how it ended. This function never returns in the child.

    Processes that the work has started are killed with the child.

    Args:
        work: The function to run; what it returns may be text for the report.
        timeout: Seconds until the child is killed.

    Returns:
        The result.
    """
    started, parent = time.monotonic(), os.getpid()
    output, ended, status = _fork_and_read(partial(_try, work, parent), timeout)
    seconds = time.monotonic() - started
    ok = output.startswith(_DONE)
    report = output.removeprefix(_DONE).decode(errors="replace")
    if not output:
        report = f"the child {_how_it_ended(status)} and wrote nothing"
    return TrialResult(ok, not ended, report, seconds)


def _try(work: Callable[[], object], parent: int, writer: int, mask: set[int]) -> NoReturn:
    me, group = os.getpid(), os.getpgrp()
    try:
        with default_actions():
            # It needs neither the GIL nor a lock, so it answers even if the main thread hangs in C. Faulthandler's own
            # timer is no choice: where the parent uses it, the child would wait for a thread that it does not have.
            faulthandler.register(_ASK, file=writer, all_threads=True)
            restore_mask(mask)
            end_with_parent(parent, signal.SIGKILL)  # a child that hangs must not outlive a server that is killed
            os.setpgid(0, 0)  # so that the processes that it starts can be killed with it
            found = work()
            if os.getpid() == me:  # not a process that the work has forked and that returned here
                signal.signal(_ASK, signal.SIG_IGN)
                os.write(writer, _DONE + (found.encode(errors="replace") if isinstance(found, str) else b""))
    except BaseException:  # noqa: BLE001 - the parent reports it
        if os.getpid() == me:
            signal.signal(_ASK, signal.SIG_IGN)
            os.write(writer, traceback.format_exc().encode(errors="replace"))
    finally:
        if os.getpid() == me:  # end what it has started, but not itself: its exit status would alarm the server's log
            with suppress(OSError):
                os.setpgid(0, group)
                os.killpg(me, signal.SIGKILL)
        os._exit(0)  # no exit handler and no buffer of the parent may run twice


def _how_it_ended(status: int | None) -> str:
    if status is None:
        return "ended (something else in this process waits for all children, and has taken its exit status)"
    code = os.waitstatus_to_exitcode(status)
    return f"{'was killed by' if code < 0 else 'ended with'} {describe_exit(code)}"
