"""The processes of this machine as ``/proc`` lists them, and which of them is whose child."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["Image", "Stat", "age", "command", "descendants", "forked", "listed", "stat", "variable"]

_KERNEL = 0x00200000  # PF_KTHREAD in the kernel's sched.h
_EXITED = frozenset("ZXx")


class Image(NamedTuple):
    """Where a program lies in memory. Linux puts each one that is executed elsewhere; a fork lies as its parent does.

    Attributes:
        code: Where its code begins.
        stack: Where its stack began.
    """

    code: int
    stack: int

    @property
    def known(self) -> bool:
        """Whether this user may see it; the kernel gives 0 or 1 otherwise."""
        return min(self) > 1


@dataclass(frozen=True, slots=True)
class Stat:
    """What ``/proc/PID/stat`` tells of a process.

    Attributes:
        pid: Its number.
        parent: That of its parent.
        born: When it began, in clock ticks since the machine started. Numbers of processes are used again; with this
            one it is unique.
        threads: How many it runs.
        image: Where its program lies.
        alive: Whether it has not exited yet.
        kernel: Whether it is a part of the kernel.
    """

    pid: int
    parent: int
    born: int
    threads: int
    image: Image
    alive: bool
    kernel: bool

    @property
    def identity(self) -> tuple[int, int, Image]:
        """Tells it from every other process, and from what it was before it executed another program."""
        return self.pid, self.born, self.image


def stat(pid: int, root: Path) -> Stat | None:
    """Read what is known of a process; None if there is none."""
    try:
        text = (root / "proc" / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in brackets, and may itself hold brackets and blanks.
    words = text.rpartition(")")[2].split()
    number = {field: int(words[field - 3]) for field in (4, 9, 20, 22, 26, 28)}  # as proc_pid_stat(5) counts them
    return Stat(
        pid=pid,
        parent=number[4],
        born=number[22],
        threads=number[20],
        image=Image(number[26], number[28]),
        alive=words[0] not in _EXITED,
        kernel=bool(number[9] & _KERNEL),
    )


def listed(root: Path) -> dict[int, Stat]:
    """Read what is known of every process that runs."""
    pids = (int(name) for name in os.listdir(root / "proc") if name.isdecimal())  # noqa: PTH208 - names are all it takes
    found = (stat(pid, root) for pid in sorted(pids))
    return {one.pid: one for one in found if one is not None and one.alive and not one.kernel}


def descendants(pid: int, processes: Mapping[int, Stat]) -> Iterator[Stat]:
    """Go through a process and all that it has started, parents before children."""
    children: dict[int, list[Stat]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    waiting = [processes[pid]] if pid in processes else []
    seen = set()
    while waiting:
        process = waiting.pop()
        if process.pid not in seen:  # numbers that are used again while one looks could make a circle
            seen.add(process.pid)
            yield process
            waiting += reversed(children.get(process.pid, []))


def forked(process: Stat, others: Iterable[Stat]) -> bool:
    """Whether a process is a fork of one of these."""
    return process.image.known and any(
        other.image == process.image and (other.born, other.pid) < (process.born, process.pid) for other in others
    )


def command(pid: int, root: Path) -> tuple[str, ...]:
    """Read the words that a process shows as its command line; none if they cannot be read."""
    with suppress(OSError):
        text = (root / "proc" / str(pid) / "cmdline").read_text(encoding="utf-8", errors="replace")
        return tuple(text.rstrip("\0").split("\0"))
    return ()


def variable(name: str, pid: int, root: Path) -> str:
    """Read one variable that a process was started with; empty if it has none, or that cannot be read."""
    with suppress(OSError):
        text = (root / "proc" / str(pid) / "environ").read_text(encoding="utf-8", errors="replace")
        prefix = f"{name}="
        return next((word.removeprefix(prefix) for word in text.split("\0") if word.startswith(prefix)), "")
    return ""


def age(process: Stat, root: Path) -> float:
    """Give the seconds since a process began."""
    up = float((root / "proc" / "uptime").read_text(encoding="ascii").split()[0])
    return max(0.0, up - process.born / os.sysconf("SC_CLK_TCK"))
