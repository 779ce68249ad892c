"""What the kernel offers so that no process outlives its owner, and none is killed by mistake."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from modelguard.errors import NotSupported
from modelguard.facts import _memory, _proc

#: What ends this process unless it is handled. What it has started must not outlive it.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PR_SET_PDEATHSIG = 1

_CAP_SYS_NICE = 23

#: A thread that stands back gets a third of the CPU time of one that does not, where there is not enough. With less, a
#: mold on a busy host would take minutes to load.
_NICE = 5

_LOWEST = 19

#: A worker's ``oom_score_adj``, in thousandths of all memory: when memory runs out, the kernel kills a worker and
#: neither the mold nor the server.
_OOM_SCORE = 500

#: That of a mold that loads beside calls, which have the old model: sooner than any worker.
_OOM_SCORE_OF_LOADS = 1000

_OOM_FILE = Path("/proc/self/oom_score_adj")

#: How many of its cgroup's processes the kernel has killed that are accounted for. None before the first look.
_oom_kills: int | None = None


def _kernel_has_killed() -> bool:
    """Whether the kernel has counted one more process of this cgroup that it has killed for want of memory."""
    global _oom_kills
    counted = _memory.oom_kills()
    if counted is None or counted <= (_oom_kills or 0):
        return False
    _oom_kills = (_oom_kills or 0) + 1  # one process each: several may have been killed at once
    return True


def check_supported() -> None:
    """Check that this system can isolate, and note how many processes the kernel had to kill here before."""
    if not sys.platform.startswith("linux"):
        raise NotSupported("isolate", reason="it needs Linux (parent-death signals, descriptors over sockets, fork)")
    global _oom_kills
    if _oom_kills is None:
        _oom_kills = _memory.oom_kills()


def die_with_parent(parent: int, number: int) -> None:
    """Receive a signal when the parent ends, however it ends. Exits at once if it has ended already.

    The kernel means the thread that started this process, so that must be one that lives as long as its process.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class _Ended(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


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
        came = ended.number
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)
    if came is not None:
        signal.raise_signal(came)


class Place(NamedTuple):
    """Whose turn this process is.

    Attributes:
        oom_score: What was added to its place among those that the kernel kills when memory runs out.
        priority: The nice value of its thread.
    """

    oom_score: int
    priority: int


def place() -> Place:
    score = 0
    with suppress(OSError, ValueError):
        score = int(_OOM_FILE.read_text(encoding="ascii"))
    return Place(score, os.getpriority(os.PRIO_PROCESS, 0))


def set_oom_score(score: int) -> None:
    with suppress(OSError):
        _OOM_FILE.write_text(str(score), encoding="ascii")


def prefer_as_oom_victim() -> None:
    set_oom_score(_OOM_SCORE)


def stay_back(before: int) -> None:
    """Let this thread, and those that it starts, run after other work where there is not enough CPU time.

    Args:
        before: Its nice value while it does not, so that who has stood back already does so no further.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before + _NICE, _LOWEST))


def may_step_forward() -> bool:
    """Whether this process can take back :func:`stay_back`."""
    capabilities = int(_proc.status().get("CapEff", "0").split()[0], 16)
    room = resource.getrlimit(resource.RLIMIT_NICE)[0] >= _LOWEST + 1 - place().priority
    return bool(capabilities >> _CAP_SYS_NICE & 1) or room


def step_forward(before: int) -> None:
    """Take back :func:`stay_back`, if this process may."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, before)


@contextmanager
def standing_back() -> Iterator[None]:
    """:func:`stay_back` for a block, if this process has the right to step forward again."""
    if not may_step_forward():
        yield
        return
    before = place().priority
    stay_back(before)
    try:
        yield
    finally:
        step_forward(before)


@contextmanager
def coming_last() -> Iterator[None]:
    """:func:`standing_back` while a model loads beside calls, which must not pay with a worker if memory runs out."""
    before = place().oom_score
    set_oom_score(_OOM_SCORE_OF_LOADS)
    try:
        with standing_back():
            yield
    finally:
        set_oom_score(before)


def do_nothing(_number: int, _frame: object) -> None:
    """A signal handler, where SIG_IGN would be inherited by programs that the model starts."""


def send_kill(pidfd: int) -> None:
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
    if -code == signal.SIGKILL and _kernel_has_killed():
        return "SIGKILL, by the kernel's OOM killer, probably"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def reap(pids: Iterable[int]) -> list[int]:
    """Collect processes that became this one's children when their parent died, as in a container's first process.

    Returns:
        Those that have not ended, or are not its children yet.
    """
    return [pid for pid in pids if not _collected(pid)]


def _collected(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return False


def reap_group(group: int) -> bool:
    """:func:`reap` for a whole process group: a mold that was killed may not have reported its latest child.

    Returns:
        Whether some of it are this process's children, and have not ended.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
        return True
    return False


# What this process is: the one that calls isolated functions, a mold, or a worker.


Role = Literal["owner", "importing", "mold", "worker"]

#: Read by each call. These are only changed by :func:`enter`.
role: Role = "owner"

#: In a mold or worker, the function that it isolates, below ``@isolate``; and what computes a call of it here.
target: object = None
here: Any = None


def enter(new: Role, isolates: object = None, computes: Callable[..., Any] | None = None) -> None:
    global role, target, here
    role = new
    target = isolates if isolates is not None else target
    here = computes if computes is not None else here


def leave(status: int) -> NoReturn:
    """End this process without the exit handlers that it has inherited."""
    flush_output()
    os._exit(status)


def flush_output() -> None:
    """Write what is still in this process's buffers, as far as it can be written."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a program may have closed or replaced them
            stream.flush()
