"""A trial child that does what every worker will do, to detect a hang before the first worker starts."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["TrialResult", "read_until", "run"]

_CHUNK = 65_536
#: The child writes its stacks this many seconds before it is killed.
_STACKS_BEFORE_KILL = 0.5


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

    Args:
        work: The function to run.
        timeout: Seconds until the child is killed.

    Returns:
        The result.
    """
    started = time.monotonic()
    reader, writer = os.pipe()
    sys.stdout.flush()  # otherwise the content of the buffers is written twice
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(work, writer, timeout)
    os.close(writer)
    try:
        output, ended = read_until(reader, started + timeout)
        hung = not ended
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - started
    ok = output == _DONE
    if not (ok or output):
        output = f"the child {_how_it_ended(status)} and wrote nothing".encode()
    return TrialResult(ok, hung, "" if ok else output.decode(errors="replace"), seconds)


_DONE = b"done"


def _child(work: Callable[[], None], writer: int, timeout: float) -> None:
    try:
        # This thread needs neither the GIL nor a lock, so it writes even if the main thread hangs in C.
        faulthandler.dump_traceback_later(max(timeout - _STACKS_BEFORE_KILL, timeout / 2), file=writer)
        work()
        faulthandler.cancel_dump_traceback_later()
        os.write(writer, _DONE)
    except BaseException:  # noqa: BLE001 - the parent reports it
        faulthandler.cancel_dump_traceback_later()
        os.write(writer, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(0)  # no exit handler and no buffer of the parent may run twice


def read_until(reader: int, deadline: float) -> tuple[bytes, bool]:
    """Read from a child's pipe until ``deadline`` (monotonic seconds), and report whether the child has closed it."""
    output = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            more = os.read(reader, _CHUNK)
            if not more:
                return output, True
            output += more
    return output, False


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit status {os.waitstatus_to_exitcode(status)}"
