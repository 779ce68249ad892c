"""The truth about the memory of a process tree, read from outside.

RSS counts a page that forked workers share once for each of them, so it shows N copies of a model where there is one.
PSS divides such a page among those that map it: added up over a tree it is what the tree really holds. USS, private
memory, is what one process would give back if it ended.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from modelguard import _units
from modelguard.environment import allocator
from modelguard.errors import InvalidOption, NotSupported
from modelguard.sharing import _mappings, _processes
from modelguard.sharing._mappings import Places
from modelguard.sharing._processes import Stat

__all__ = ["Places", "ProcessReport", "TreeReport", "TreeWatch", "pythons", "report"]

_FEATURE = "a report of a process tree"


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What one process holds, in bytes.

    Attributes:
        pid: The process.
        parent: Its parent.
        age: Seconds since it began.
        command: The words of its command line as they are; secrets may be among them.
        threads: How many it runs.
        allocator: What most probably serves ``malloc`` in it (:func:`modelguard.environment.allocator.observe`).
        pss: Its memory, each shared page divided by the number of processes that map it.
        uss: Its private memory: pages that no other process maps. ``where`` adds up to it.
        private: The part of it that the system cannot take back: written to, or in swap. Growth is measured in this,
            because clean pages of files come and go with what the neighbours do.
        since_birth: How much ``private`` has grown since the process began. A fork is born with none, so there it is
            all that it has: what it allocated itself, and each page that it or its parent has written to since. None
            for a process that is no fork of a process that still runs.
        since_seen: How much ``private`` has grown since the first look; None at the first look.
        watched: Seconds since the first look.
        where: Where ``uss`` sits.
        swap: Its share of what was moved out of memory.
        rss: All its pages in memory, shared or not: misleading under sharing.
    """

    pid: int
    parent: int
    age: float
    command: tuple[str, ...] = field(repr=False)
    threads: int
    allocator: allocator.Kind
    pss: int
    uss: int
    private: int
    since_birth: int | None
    since_seen: int | None
    watched: float
    where: Places
    swap: int
    rss: int


@dataclass(frozen=True, slots=True)
class TreeReport:
    """What a process tree holds, in bytes.

    Attributes:
        processes: Its processes, parents before children.
        unread: Processes whose memory this user may not read; the totals are without them.
        model_bytes: The size of one copy of the model, if it was given.
    """

    processes: tuple[ProcessReport, ...]
    unread: tuple[int, ...] = ()
    model_bytes: int | None = None

    @property
    def pss(self) -> int:
        """What the tree holds. Of pages that processes outside of it map too, such as libc's, only its share."""
        return sum(process.pss for process in self.processes)

    @property
    def uss(self) -> int:
        """What its processes hold each for itself."""
        return sum(process.uss for process in self.processes)

    @property
    def rss(self) -> int:
        """The sum that misleads: it counts what N processes share N times."""
        return sum(process.rss for process in self.processes)

    @property
    def largest(self) -> ProcessReport:
        """The process with the largest RSS, which is what it would hold if it were alone."""
        return max(self.processes, key=lambda process: process.rss)

    @property
    def one_copy(self) -> int:
        """What ``copies`` counts: ``model_bytes``, or what the largest process would hold if it were alone."""
        return self.largest.rss if self.model_bytes is None else self.model_bytes

    @property
    def copies(self) -> float:
        """How many times ``one_copy`` the tree holds.

        Near 1 the processes share what the largest of them needs, near their number each has its own. With
        ``model_bytes`` it is an upper bound of the copies of the model: libraries and the rest of the program count.
        """
        return self.pss / max(1, self.one_copy)


def report(
    tree: int | Iterable[int] | None = None, *, model_bytes: int | str | None = None, root: Path = Path("/")
) -> TreeReport:
    """Read what a process and all that it has started hold.

    Args:
        tree: The process at the top, by default this one; or the processes themselves, without what they started.
        model_bytes: The size of one copy of the model, such as ``"500 MB"``, by default unknown.
        root: Where ``/proc`` is found.

    Returns:
        The figures of one look. It takes 50 - 150 ms for each process with torch or spaCy, and one that asks the system
        for memory meanwhile may have to wait for a part of that.

    Raises:
        InvalidOption: ``tree`` is not the number of a process, or ``model_bytes`` is not a size.
        ProcessLookupError: There is no such process, it has exited, or it is a part of the kernel.
        PermissionError: The process at the top belongs to someone else.
        NotSupported: There is no ``/proc``.
    """
    return TreeWatch(tree, model_bytes=model_bytes, root=root).look()


class _Seen(NamedTuple):
    """How a process was at the first look."""

    private: int
    time: float


class TreeWatch:
    """Looks at a process tree again and again, and remembers how each process was at the first look.

    Args:
        tree: As for :func:`report`.
        model_bytes: As for :func:`report`.
        root: Where ``/proc`` is found.
        clock: Seconds from any start, never going back.

    Raises:
        InvalidOption: ``tree`` is not the number of a process, or ``model_bytes`` is not a size.
        NotSupported: There is no ``/proc``.
    """

    def __init__(
        self,
        tree: int | Iterable[int] | None = None,
        *,
        model_bytes: int | str | None = None,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._whole = tree is None or isinstance(tree, int)
        self._pids = _pids(os.getpid() if tree is None else tree)
        self._model_bytes = None if model_bytes is None else _units.size(model_bytes, "model_bytes")
        self._root = root
        self._clock = clock
        self._born: dict[int, int] = {}
        self._first: dict[tuple[object, ...], _Seen] = {}
        if not (root / "proc" / "self" / "smaps").exists():
            raise NotSupported(_FEATURE, reason="there is no /proc with the mappings of processes")

    def look(self) -> TreeReport:
        """Read what the processes hold now.

        Returns:
            The figures. Processes that end meanwhile are left out.

        Raises:
            ProcessLookupError: A process that was asked for is gone, or another one has its number by now.
            PermissionError: It belongs to someone else.
        """
        processes = _processes.listed(self._root)
        chosen = self._chosen(processes)
        found: list[ProcessReport] = []
        unread: list[int] = []
        for one in chosen:
            asked_for = one.pid in self._pids
            try:
                read = self._read(one, processes)
            except PermissionError:
                if asked_for:
                    raise _not_ours(one.pid) from None
                unread.append(one.pid)
                continue
            if read is not None:
                found.append(read)
            elif asked_for:
                raise _gone(one.pid, "has ended, or become another program, while it was read")
        self._forget_all_but({one.identity for one in chosen})
        return TreeReport(tuple(found), tuple(unread), self._model_bytes)

    def _chosen(self, processes: Mapping[int, Stat]) -> list[Stat]:
        for pid in self._pids:
            if pid not in processes:
                raise _absent(pid, self._root)
            if self._born.setdefault(pid, processes[pid].born) != processes[pid].born:
                raise _gone(pid, "has ended, and another process has its number now")
        if self._whole:
            return list(_processes.descendants(self._pids[0], processes))
        return [processes[pid] for pid in self._pids]

    def _read(self, process: Stat, processes: Mapping[int, Stat]) -> ProcessReport | None:
        """Read one process; None if it has ended meanwhile, so that the figures may be another one's."""
        pid, root = process.pid, self._root
        try:
            found = _mappings.mappings(_text(root, pid, "smaps"))
            kind = allocator.observe(pid, root).kind
        except (FileNotFoundError, ProcessLookupError):
            return None
        after = _processes.stat(pid, root)
        if not found or after is None or after.identity != process.identity:
            return None
        arenas = _mappings.has_arenas(found, _processes.variable("PYTHONMALLOC", pid, root))
        private = _mappings.total(found, "Private_Dirty", "SwapPss")
        now = self._clock()
        first = self._first.get(process.identity)
        seen = self._first.setdefault(process.identity, _Seen(private, now))
        return ProcessReport(
            pid=pid,
            parent=process.parent,
            age=_processes.age(process, root),
            command=_processes.command(pid, root),
            threads=process.threads,
            allocator=kind,
            pss=_mappings.total(found, "Pss"),
            uss=_mappings.total(found, "Private_Clean", "Private_Dirty"),
            private=private,
            since_birth=private if _processes.forked(process, processes.values()) else None,
            since_seen=None if first is None else private - first.private,
            watched=now - seen.time,
            where=_mappings.place(found, arenas=arenas),
            swap=_mappings.total(found, "SwapPss"),
            rss=_mappings.total(found, "Rss"),
        )

    def _forget_all_but(self, kept: set[tuple[int, int, _processes.Image]]) -> None:
        self._first = {identity: seen for identity, seen in self._first.items() if identity in kept}


def pythons(*, root: Path = Path("/"), user: int | None = None, without: Iterable[int] = ()) -> list[int]:
    """Find the trees of Python processes of a user.

    A process counts that executes a Python or has loaded one, as uWSGI does. Of processes that started each other
    the topmost is given, if all between are Pythons.

    Args:
        root: Where ``/proc`` is found.
        user: The user's number, by default that of this process.
        without: Processes that do not count, such as the one that asks.

    Returns:
        The top of each tree.
    """
    user = os.geteuid() if user is None else user
    left_out = set(without)
    processes = _processes.listed(root)
    found = [pid for pid in processes if pid not in left_out and _is_python_of(user, pid, root)]
    return [pid for pid in found if processes[pid].parent not in found]


def _is_python_of(user: int, pid: int, root: Path) -> bool:
    try:
        if (root / "proc" / str(pid)).stat().st_uid != user:
            return False
        return _mappings.is_python(_mappings.mappings(_text(root, pid, "maps")))
    except OSError:  # it has ended, or hides itself
        return False


def _pids(tree: int | Iterable[int]) -> tuple[int, ...]:
    pids = tuple(tree) if isinstance(tree, Iterable) else (tree,)
    if not pids or not all(type(pid) is int and pid > 0 for pid in pids):
        why = "it is not the number of a process"
        raise InvalidOption("tree", tree, why=why, fix="Give a positive whole number, or several.")
    return pids


def _text(root: Path, pid: int, name: str) -> str:
    return (root / "proc" / str(pid) / name).read_text(encoding="utf-8", errors="surrogateescape")


def _absent(pid: int, root: Path) -> ProcessLookupError:
    known = _processes.stat(pid, root)
    if known is None:
        return _gone(pid, "is gone")
    if known.kernel:
        return _gone(pid, "is a part of the kernel, which has no memory of its own")
    return _gone(pid, "has exited; only its exit status is left")


def _gone(pid: int, why: str) -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"process {pid} {why}; give the number of a process that runs")


def _not_ours(pid: int) -> PermissionError:
    return PermissionError(
        errno.EACCES, f"process {pid} belongs to someone else; look at it as its own user or as root"
    )
