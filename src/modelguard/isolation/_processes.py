"""Whose turn a process is, for the CPU and when memory runs out; and what this process is among those of isolation."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from modelguard.errors import NotSupported
from modelguard.facts import _memory, _proc
from modelguard.runtime import child_processes

_CAP_SYS_NICE = 23

#: The user namespace that the system starts with, by the kernel's own number.
_FIRST_USERS = 0xEFFFFFFD

#: A thread of lower priority gets a third of the CPU time of another one, where there is not enough. With less, a
#: mold on a busy host would take minutes to load.
_NICE = 5

_LOWEST = 19

#: A worker's ``oom_score_adj``, in thousandths of all memory: when memory runs out, the kernel kills a worker and
#: neither the mold nor the server.
OOM_SCORE = 500

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
    if not sys.platform.startswith("linux") or not _OOM_FILE.exists():
        reason = "it needs Linux (parent-death signals, descriptors over sockets, fork) with /proc"
        raise NotSupported("isolate", reason=reason)
    global _oom_kills
    if _oom_kills is None:
        _oom_kills = _memory.oom_kills()


def priority() -> int:
    """The nice value of this thread."""
    return os.getpriority(os.PRIO_PROCESS, 0)


def set_oom_score(score: int) -> None:
    with suppress(OSError):
        _OOM_FILE.write_text(str(score), encoding="ascii")


def lower_priority(before: int) -> None:
    """Let this thread, and those that it starts, run after other work where there is not enough CPU time.

    ``before`` is its usual nice value, so that twice is no lower than once.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(before + _NICE, _LOWEST))


def may_restore_priority(before: int) -> bool:
    """Whether this process can take back :func:`lower_priority`."""
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= _LOWEST + 1 - before:
        return True
    try:
        capabilities = int(_proc.status().get("CapEff", "0").split()[0], 16)
    except OSError:  # no descriptor is left
        return False
    return bool(capabilities >> _CAP_SYS_NICE & 1) and _is_among_first_users()


def _is_among_first_users() -> bool:
    """Whether its capabilities are the system's: the root of a rootless container has them all, and may not do this."""
    try:
        return Path("/proc/self/ns/user").stat().st_ino == _FIRST_USERS
    except OSError:  # a kernel without user namespaces
        return True


def restore_priority(before: int) -> None:
    """Take back :func:`lower_priority`, if this process may."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, before)


def restore_priorities(before: int) -> None:
    """The same for this thread and those that it has started since then, such as a library's own."""
    if (lowered := priority()) == before:
        return
    restore_priority(before)
    with suppress(OSError):
        for task in _tasks(os.getpid()):
            with suppress(OSError):  # it has ended
                if os.getpriority(os.PRIO_PROCESS, task) == lowered:
                    os.setpriority(os.PRIO_PROCESS, task, before)


@contextmanager
def at_lower_priority(before: int, restore: Callable[[int], None] = restore_priority) -> Iterator[None]:
    """:func:`lower_priority` for a block, if this process may restore it."""
    if not may_restore_priority(before):
        yield
        return
    lower_priority(before)
    try:
        yield
    finally:
        restore(before)


@contextmanager
def at_lowest_priority(before: int) -> Iterator[None]:
    """:func:`at_lower_priority` while a model loads beside calls, which must lose no worker if memory runs out."""
    score = 0  # what was added to this process's place among those that the kernel kills when memory runs out
    with suppress(OSError, ValueError):
        score = int(_OOM_FILE.read_text(encoding="ascii"))
    set_oom_score(_OOM_SCORE_OF_LOADS)
    try:
        with at_lower_priority(before, restore_priorities):
            yield
    finally:
        set_oom_score(score)


def schedule(pids: Sequence[int], *, when_idle: bool) -> None:
    """Let processes take only the CPU time that nobody else wants, if this one may take that back; or take it back."""
    if may_restore_priority(priority()):
        for pid in pids:
            with suppress(OSError):
                os.sched_setscheduler(pid, os.SCHED_IDLE if when_idle else os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def on_cpus_of_their_own(pids: Sequence[int]) -> Iterator[None]:
    """Keep each process to one CPU in the block, if they have as many CPUs in common and each has a single thread.

    A process that sleeps between calls wakes on the CPU where it last ran, unless another one is idle. Beside a mold
    that keeps one busy at whatever priority, workers would share those that are left.
    """
    allowed, alone = list[set[int]](), False
    with suppress(OSError):  # one has ended
        allowed = [os.sched_getaffinity(pid) for pid in pids]
        alone = all(len(_tasks(pid)) == 1 for pid in pids)
    if not alone or len(pids) <= 1 or any(one != allowed[0] or len(one) != len(pids) for one in allowed):
        yield
        return
    cpus, mine = allowed[0], os.sched_getaffinity(0)
    own = dict(zip(pids, sorted(cpus), strict=True))
    try:
        for pid, cpu in own.items():
            with suppress(OSError):
                os.sched_setaffinity(pid, {cpu})
        yield
    finally:
        if (now := os.sched_getaffinity(0)) != mine:  # somebody has bound the whole service
            own = {pid: cpu for pid, cpu in own.items() if now != {cpu}}
        for pid, cpu in own.items():
            _unbind(pid, cpu, cpus)
        with suppress(OSError):  # no descriptor is left
            known = _proc.processes()
            for pid, cpu in own.items():
                for one in _proc.descendants(pid, known):
                    _unbind(one.pid, cpu, cpus)


def _unbind(pid: int, cpu: int, cpus: set[int]) -> None:
    """Let a process, and threads that it has started meanwhile, use all CPUs again, unless somebody has bound them."""
    tasks = [pid]
    with suppress(OSError):
        tasks = _tasks(pid)
    for task in tasks:
        with suppress(OSError):  # it has ended
            if os.sched_getaffinity(task) == {cpu}:
                os.sched_setaffinity(task, cpus)


def _tasks(pid: int) -> list[int]:
    return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]


def describe_exit(code: int) -> str:
    """As :func:`child_processes.describe_exit`, and whether it was for want of memory."""
    if -code == signal.SIGKILL and _kernel_has_killed():
        return "SIGKILL, by the kernel's OOM killer, probably"
    return child_processes.describe_exit(code)


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
