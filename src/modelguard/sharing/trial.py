"""A throw-away child that does what every worker will do, so that a hang is found before the first worker."""

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

__all__ = ["Verdict", "listen", "run"]

_CHUNK = 65_536
#: The child tells its stack so many seconds before it is given up.
_LAST_WORDS = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a trial ended.

    Attributes:
        ok: Whether the work was done.
        hung: Whether it was not done in time.
        report: What was raised, or the stacks of the child that hung.
        seconds: How long it took.
    """

    ok: bool
    hung: bool
    report: str
    seconds: float


def run(work: Callable[[], None], timeout: float) -> Verdict:
    """Fork, do ``work`` in the child, and see how that ends. The child never returns from here.

    Args:
        work: What to do.
        timeout: Seconds until the child is killed.

    Returns:
        How it ended.
    """
    started = time.monotonic()
    reader, writer = os.pipe()
    sys.stdout.flush()  # else what is in the buffers is written twice
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(work, writer, timeout)
    os.close(writer)
    try:
        words, ended = listen(reader, started + timeout)
        hung = not ended
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - started
    ok = words == _DONE
    if not (ok or words):
        words = f"the child died of {_cause(status)} without a word".encode()
    return Verdict(ok, hung, "" if ok else words.decode(errors="replace"), seconds)


_DONE = b"done"


def _child(work: Callable[[], None], writer: int, timeout: float) -> None:
    try:
        # By a thread that needs neither the GIL nor a lock, so it speaks even if the main thread hangs in C.
        faulthandler.dump_traceback_later(max(timeout - _LAST_WORDS, timeout / 2), file=writer)
        work()
        faulthandler.cancel_dump_traceback_later()
        os.write(writer, _DONE)
    except BaseException:  # noqa: BLE001 - it is the parent's to judge
        faulthandler.cancel_dump_traceback_later()
        os.write(writer, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(0)  # no exit handler and no buffer of the parent's may run twice


def listen(reader: int, deadline: float) -> tuple[bytes, bool]:
    """What a child wrote into the pipe until ``deadline`` (monotonic seconds), and whether it closed it by itself."""
    words = b""
    while (left := deadline - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            more = os.read(reader, _CHUNK)
            if not more:
                return words, True
            words += more
    return words, False


def _cause(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}"
