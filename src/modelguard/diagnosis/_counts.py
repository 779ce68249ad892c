"""What a process has beside memory, and runs out of: open files, threads and child processes."""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

from modelguard.diagnosis import _redact
from modelguard.environment import _proc
from modelguard.facts.growth import judge

__all__ = ["MOST", "NAMES", "Counts", "Growing"]

NAMES = ("open files", "threads", "child processes")
#: So many more end a run: going on would only endanger the machine.
MOST = {"open files": 2000, "threads": 2000, "child processes": 200}
#: Kinds that are named, and kinds that are kept for one number.
_SHOWN, _KEPT = 3, 20
#: Growth by fewer in a run is not accused.
_LEAST = 8
_SPARE = 16

Kinds = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Growing:
    """A number that grows with the calls.

    Attributes:
        name: What is counted.
        more: By how many it has grown.
        calls: In so many calls, or milliseconds.
        seen: What they are, the most frequent first.
        fix: What to do.
    """

    name: str
    more: int
    calls: int
    seen: str
    fix: str

    def told(self, per: str) -> str:
        """Its numbers.

        Args:
            per: What ``calls`` counts.
        """
        during = f"{self.calls:,} calls" if per == "calls" else f"{self.calls / 1000:.0f} seconds"
        return f"{self.more:,} more {self.name} in {during}"


FIXES = {
    "open files": "Close what each call opens: with open(...), client.close(), or one client for all calls.",
    "threads": "End threads, or use one ThreadPoolExecutor for all calls.",
    "child processes": "Wait for the processes that calls start: with Popen(...), or process.wait().",
}


def numbers(pid: int | None = None) -> dict[str, int]:
    """How many a process has, without a process id this one."""
    folder = _proc.folder(pid)
    return {
        "open files": len(os.listdir(folder / "fd")),  # noqa: PTH208 - only the number is needed
        "threads": len(os.listdir(folder / "task")),  # noqa: PTH208 - as above
        "child processes": len(_children(pid)),
    }


def kinds(pid: int | None = None) -> dict[str, dict[str, int]]:
    """How many it has of each kind."""
    found = {"open files": _files(pid), "threads": _threads(pid), "child processes": _processes(pid)}
    return {name: dict(Counter(each).most_common(_KEPT)) for name, each in found.items()}


class Counts:
    """The numbers by reading, and what they are.

    Args:
        pid: Of which process; None for this one.

    Attributes:
        calls: How many calls had been made at each reading.
        judged: Whether that was asked for.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self.calls: list[int] = []
        self.judged = False
        self._spare: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Forget what was read."""
        self.calls.clear()
        self._kinds, self._first = kinds(self._pid), numbers(self._pid)
        self._read: list[dict[str, int]] = []
        # The call may use up all descriptors, and then nothing could be read.
        if self._pid is None:
            self._spare += [os.open(os.devnull, os.O_RDONLY) for _ in range(_SPARE - len(self._spare))]

    def read(self, calls: int) -> None:
        """Read the numbers after so many calls."""
        self.calls.append(calls)
        self._read.append(numbers(self._pid))

    def too_many(self) -> bool:
        """Whether so many are there that going on would endanger the machine."""
        now = numbers()
        return any(now[name] - self._first[name] > MOST[name] for name in NAMES)

    def growing(self, since: int) -> list[dict[str, Any]]:
        """What grows with the calls, from a reading on."""
        self.judged = True
        calls = self.calls[since:]
        found = []
        for name in NAMES:
            counts = [each[name] for each in self._read[since:]]
            judged = judge(calls, counts, least=_LEAST)
            if judged.verdict == "grows":
                found.append(self._grown(name, counts[-1] - counts[0], calls[-1] - calls[0]))
        return found

    def exhausted(self, calls: int) -> list[dict[str, Any]]:
        """What there is too much of, after so many calls."""
        for number in self._spare:
            os.close(number)
        self._spare.clear()
        now = numbers()
        more = {name: now[name] - self._first[name] + (_SPARE if name == "open files" else 0) for name in NAMES}
        most = max(NAMES, key=lambda name: more[name] / MOST[name])
        return [self._grown(most, more[most], calls)]

    def _grown(self, name: str, more: int, calls: int) -> dict[str, Any]:
        return asdict(Growing(name, more, calls, _most(self._kinds, kinds(self._pid), name), FIXES[name]))


def _most(before: Kinds, after: Kinds, name: str) -> str:
    """The kinds of which there are more, the most frequent first."""
    more = Counter(dict(after.get(name, {})))
    more.subtract(before.get(name, {}))
    return ", ".join(f"{count:,} {kind}" for kind, count in more.most_common(_SHOWN) if count > 0)


def _children(pid: int | None) -> list[int]:
    """Those that have ended too, until they are waited for."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 - as above
        each = _proc.if_readable(_proc.stat, int(name)) if name.isdecimal() else None
        if each is not None and each.parent == (pid or os.getpid()):
            found.append(each.pid)
    return found


def _files(pid: int | None) -> Iterator[str]:
    """What descriptors refer to: files by their paths, or by their folders if there are many; sockets by where to."""
    opened = list(_proc.open_files(pid).values())
    sockets = _sockets(_proc.folder(pid))
    paths = Counter(each for each in opened if each.startswith("/"))
    folders = Counter(str(PurePath(each).parent) for each in paths)
    for each in opened:
        kind, _, inode = each.partition(":")
        if kind == "socket":
            yield sockets.get(inode.strip("[]"), "sockets")
        elif each.startswith("/"):
            folder = str(PurePath(each).parent)
            many = paths[each] == 1 and folders[folder] > _SHOWN
            yield _redact.redact(f"files in {folder}" if many else each, {})
        else:
            yield {"pipe": "pipes", "anon_inode": inode.strip("[]")}.get(kind, kind)


def _sockets(folder: Path) -> dict[str, str]:
    """What sockets are, by their inodes."""
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in _table(folder / "net" / table):
            words = line.split()
            host, _, port = words[2].partition(":")
            to = f"sockets to {_address(host)}:{int(port, 16)}"
            closed = words[3] == "08"  # TCP_CLOSE_WAIT
            found[words[9]] = (
                f"{to}, closed by the other side" if closed else to if int(port, 16) else f"{table} sockets"
            )
    for line in _table(folder / "net/unix"):
        words = line.split(maxsplit=7)
        found[words[6]] = f"Unix sockets {words[7]}" if len(words) > 7 else "Unix sockets"  # noqa: PLR2004
    return found


def _table(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return []


def _address(text: str) -> str:
    """An address as the kernel writes it: words of four bytes in the order of this machine."""
    words = b"".join(struct.pack("=I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words)  # noqa: PLR2004 - bytes


def _threads(pid: int | None) -> Iterator[str]:
    """Threads by their names, numbers left out: those that Python names have their targets in them."""
    known = {each.native_id: each.name for each in threading.enumerate()} if pid is None else {}
    for thread, name in _proc.thread_names(pid).items():
        yield re.sub(r"\d+", "N", known.get(thread) or f"native {name}")


def _processes(parent: int | None) -> Iterator[str]:
    for pid in _children(parent):
        words = _proc.if_readable(_proc.command_line, pid)
        yield _redact.redact_command(words, os.environ) if words else "ended, and not waited for"
