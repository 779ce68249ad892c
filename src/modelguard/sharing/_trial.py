"""A trial child that does what every worker will do, to detect a hang before the first worker starts."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from modelguard.runtime.child_processes import (
    ForkedChild,
    block,
    default_actions,
    describe_exit,
    end_with_parent,
    flush_output,
    restore_mask,
)

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
    flush_output()  # otherwise the content of the buffers is written twice
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
            end_with_parent(parent, signal.SIGKILL)  # a child that hangs must not outlive a server that is killed
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
    code = os.waitstatus_to_exitcode(status)
    return f"{'was killed by' if code < 0 else 'ended with'} {describe_exit(code)}"
