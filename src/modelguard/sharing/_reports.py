"""What a process tree really holds, read from outside.

RSS counts a page that forked workers share once for each of them, so it shows N copies of a model where there is one.
PSS divides such a page among those that map it: added up over a tree it is what the tree really holds. USS, private
memory, is what one process would give back if it ended.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from modelguard import _units
from modelguard.environment import _proc, _remote
from modelguard.environment._allocator_kinds import Kind
from modelguard.environment._proc import ProcessStat
from modelguard.errors import InvalidOption, NotSupported
from modelguard.sharing import _places
from modelguard.sharing._places import Places

__all__ = ["Places", "ProcessReport", "TreeReport", "TreeWatch", "python_trees", "report"]


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """What one process holds, in bytes.

    Attributes:
        pid: The process.
        parent: Its parent.
        age: Seconds since it started.
        command: The words of its command line, unchanged; secrets may be among them.
        threads: Its number of threads.
        allocator: What most probably serves ``malloc`` in it (:func:`modelguard.allocator.observe`).
        pss: Its memory, with each shared page divided by the number of processes that map it.
        uss: Its private memory: pages that no other process maps. ``where`` adds up to it.
        private: The part of ``uss`` that the system cannot take back: written to, or in swap. Growth is measured in
            this figure, because clean pages of files come and go with what other processes do.
        since_birth: How much ``private`` has grown since the process started. A fork starts with none, so for a fork
            it is all of it: what it allocated itself, and each page that it or its parent has written to since. None
            for a process that is not a fork of a process that still runs.
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
    allocator: Kind
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
        """The sum of what each of its processes holds alone."""
        return sum(process.uss for process in self.processes)

    @property
    def rss(self) -> int:
        """The misleading sum: it counts N times what N processes share."""
        return sum(process.rss for process in self.processes)

    @property
    def largest(self) -> ProcessReport:
        """The process with the largest RSS, which is what it would hold if it were alone."""
        return max(self.processes, key=lambda process: process.rss)

    @property
    def one_copy(self) -> int:
        """The unit of ``copies``: ``model_bytes``, or what the largest process would hold if it were alone."""
        return self.largest.rss if self.model_bytes is None else self.model_bytes

    @property
    def copies(self) -> float:
        """How many times ``one_copy`` the tree holds.

        Near 1 the processes share what the largest of them needs; near their number each has its own. With
        ``model_bytes`` it is an upper bound of the copies of the model: libraries and the rest of the program count.
        """
        return self.pss / max(1, self.one_copy)


def report(
    tree: int | Iterable[int] | None = None, *, model_bytes: int | str | None = None, root: Path = _proc.ROOT
) -> TreeReport:
    """Read what a process and everything that it has started hold.

    Args:
        tree: The process at the top, or several processes, without what they started. Default: this process.
        model_bytes: The size of one copy of the model, such as ``"500 MB"``. Default: unknown.
        root: The folder that holds ``proc``.

    Returns:
        The figures of one look. It takes 50 - 150 ms for each process with torch or spaCy, and a process that requests
        memory from the system meanwhile may have to wait for a part of that.

    Raises:
        InvalidOption: ``tree`` is not a process id, or ``model_bytes`` is not a size.
        ProcessLookupError: There is no such process, it has exited, or it is a kernel thread.
        PermissionError: The process at the top belongs to someone else.
        NotSupported: There is no ``/proc``.
    """
    return TreeWatch(tree, model_bytes=model_bytes, root=root).look()


class _FirstLook(NamedTuple):
    """A process at the first look."""

    private: int
    time: float


class TreeWatch:
    """Looks at a process tree repeatedly, and remembers how each process was at the first look.

    Args:
        tree: As for :func:`report`.
        model_bytes: As for :func:`report`.
        root: The folder that holds ``proc``.
        clock: Seconds from any start, never going back.

    Raises:
        InvalidOption: ``tree`` is not a process id, or ``model_bytes`` is not a size.
        NotSupported: There is no ``/proc``.
    """

    def __init__(
        self,
        tree: int | Iterable[int] | None = None,
        *,
        model_bytes: int | str | None = None,
        root: Path = _proc.ROOT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._whole = tree is None or isinstance(tree, int)
        self._pids = _pids(os.getpid() if tree is None else tree)
        self._model_bytes = None if model_bytes is None else _units.size(model_bytes, "model_bytes")
        self._root = root
        self._clock = clock
        self._started: dict[int, int] = {}
        self._first: dict[tuple[object, ...], _FirstLook] = {}
        if not (_proc.folder(None, root) / "smaps").exists():
            reason = "there is no /proc that shows the mappings of processes"
            raise NotSupported("a report of a process tree", reason=reason)

    def look(self) -> TreeReport:
        """Read what the processes hold now.

        Returns:
            The figures. Processes that end meanwhile are left out.

        Raises:
            ProcessLookupError: A process that was asked for is gone, or another one has its id by now.
            PermissionError: It belongs to someone else.
        """
        processes = _proc.processes(self._root)
        chosen = self._chosen(processes)
        found: list[ProcessReport] = []
        unread: list[int] = []
        for one in chosen:
            asked_for = one.pid in self._pids
            try:
                read = self._read(one, processes)
            except PermissionError:
                if asked_for:
                    raise _no_permission(one.pid) from None
                unread.append(one.pid)
                continue
            if read is not None:
                found.append(read)
            elif asked_for:
                raise _gone(one.pid, "has ended, or become another program, while it was read")
        self._forget_all_but({one.identity for one in chosen})
        return TreeReport(tuple(found), tuple(unread), self._model_bytes)

    def _chosen(self, processes: Mapping[int, ProcessStat]) -> list[ProcessStat]:
        for pid in self._pids:
            if pid not in processes:
                raise _absent(pid, self._root)
            if self._started.setdefault(pid, processes[pid].started) != processes[pid].started:
                raise _gone(pid, "has ended, and another process has its id now")
        if self._whole:
            return list(_proc.descendants(self._pids[0], processes))
        return [processes[pid] for pid in self._pids]

    def _read(self, process: ProcessStat, processes: Mapping[int, ProcessStat]) -> ProcessReport | None:
        """Read one process; None if it has ended meanwhile, so that the figures may be another one's."""
        pid, root = process.pid, self._root
        try:
            mappings = _proc.smaps(pid, root)
            kind = _remote.observe(pid, root=root).kind
        except (FileNotFoundError, ProcessLookupError):
            return None
        after = _proc.stat(pid, root)
        if not mappings or after is None or after.identity != process.identity:
            return None
        environ = _proc.if_readable(_proc.environment, pid, root) or {}
        arenas = _places.has_arenas(mappings, environ.get("PYTHONMALLOC", ""))
        private = _places.total(mappings, "Private_Dirty", "SwapPss")
        now = self._clock()
        first = self._first.get(process.identity)
        seen = self._first.setdefault(process.identity, _FirstLook(private, now))
        return ProcessReport(
            pid=pid,
            parent=process.parent,
            age=_proc.age(process, root),
            command=_proc.if_readable(_proc.command_line, pid, root) or (),
            threads=process.threads,
            allocator=kind,
            pss=_places.total(mappings, "Pss"),
            uss=_places.total(mappings, "Private_Clean", "Private_Dirty"),
            private=private,
            since_birth=private if _proc.is_fork(process, processes.values()) else None,
            since_seen=None if first is None else private - first.private,
            watched=now - seen.time,
            where=_places.places(mappings, arenas=arenas),
            swap=_places.total(mappings, "SwapPss"),
            rss=_places.total(mappings, "Rss"),
        )

    def _forget_all_but(self, kept: set[tuple[int, int, _proc.MemoryLayout]]) -> None:
        self._first = {identity: seen for identity, seen in self._first.items() if identity in kept}


def python_trees(*, root: Path = _proc.ROOT, user: int | None = None, without: Iterable[int] = ()) -> list[int]:
    """Find the trees of Python processes of a user.

    A process counts if it executes a Python or has loaded one, as uWSGI does. Of processes that started each other
    the topmost counts, if all between are Pythons.

    Args:
        root: The folder that holds ``proc``.
        user: The user id. Default: that of this process.
        without: Processes that do not count, such as the one that asks.

    Returns:
        The top of each tree.
    """
    user = os.geteuid() if user is None else user
    left_out = set(without)
    processes = _proc.processes(root)
    found = [pid for pid in processes if pid not in left_out and _is_python_of(user, pid, root)]
    return [pid for pid in found if processes[pid].parent not in found]


def _is_python_of(user: int, pid: int, root: Path) -> bool:
    # What cannot be read has ended, or belongs to someone else.
    if _proc.if_readable(_proc.owner, pid, root) != user:
        return False
    return _places.is_python(_proc.if_readable(_proc.maps, pid, root) or ())


def _pids(tree: int | Iterable[int]) -> tuple[int, ...]:
    pids: tuple[Any, ...] = tuple(tree) if isinstance(tree, Iterable) and not isinstance(tree, str) else (tree,)
    if not pids:
        raise InvalidOption("tree", tree, why="it must not be empty", fix="Give a process id, or several.")
    return tuple(_units.process_id(pid, "tree") for pid in pids)


def _absent(pid: int, root: Path) -> ProcessLookupError:
    known = _proc.stat(pid, root)
    if known is None:
        return _gone(pid, "is gone")
    if known.kernel:
        return _gone(pid, "is a kernel thread, which has no memory of its own")
    return _gone(pid, "has exited; only its exit status is left")


def _gone(pid: int, why: str) -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"process {pid} {why}; give the id of a running process")


def _no_permission(pid: int) -> PermissionError:
    return PermissionError(errno.EACCES, f"process {pid} belongs to someone else; look at it as its owner or as root")
