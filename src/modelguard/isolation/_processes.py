"""What the kernel offers so that no process outlives its owner, and none is killed by mistake."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from modelguard.errors import NotSupported

__all__ = [
    "check_supported",
    "describe_exit",
    "die_with_parent",
    "kill_group",
    "prefer_as_oom_victim",
    "reap",
    "send_kill",
]

_PR_SET_PDEATHSIG = 1

#: Added to a worker's badness, in thousandths of all memory: when memory runs out, the kernel kills a worker and
#: neither the mold nor the server.
_OOM_SCORE = 500


def check_supported() -> None:
    """Check that this system can isolate.

    Raises:
        NotSupported: It is not Linux.
    """
    if not sys.platform.startswith("linux"):
        raise NotSupported("isolate", reason="it needs Linux (parent-death signals, descriptors over sockets, fork)")


def die_with_parent(parent: int, number: int) -> None:
    """Receive a signal when the parent ends, however it ends. Exits at once if it has ended already.

    The kernel means the thread that started this process, so that must be one that lives as long as its process.

    Args:
        parent: The expected parent's process id.
        number: The signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def prefer_as_oom_victim() -> None:
    """Let the kernel kill this process first when memory runs out."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE), encoding="ascii")


def send_kill(pidfd: int) -> None:
    """End the process of a ``pidfd``, which cannot be mistaken for another one."""
    with suppress(ProcessLookupError, OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def kill_group(group: int) -> None:
    """End a whole process group; does nothing if there is none."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """Describe how a process ended: the signal's name for a negative code, else its exit status."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def reap(pids: Iterable[int]) -> None:
    """Collect processes that became this one's children when their parent died, as in a container's first process."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
