"""How much memory a process tree actually uses, read from outside.

RSS counts a page that forked workers share once for each worker, so it shows N copies of a model although there is only
one. PSS divides such a page among the processes that map it: added up over a tree, it is the memory that the tree
actually uses. USS, private memory, is what one process would release if it ended.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from modelguard import _units
from modelguard.environment import _memory, _proc, _remote, _shown_guards
from modelguard.environment._allocator_kinds import Kind
from modelguard.environment._mappings import model_libraries
from modelguard.environment._proc import ProcessStat
from modelguard.errors import InvalidOption, NotSupported
from modelguard.sharing import _places
from modelguard.sharing._places import Places

__all__ = ["Places", "ProcessReport", "TreeReport", "TreeWatch", "python_trees", "report"]


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The memory of one process, in bytes.

    Attributes:
        pid: The process.
        parent: Its parent.
        age: Seconds since it started.
        command: The words of its command line, unchanged; they may include secrets.
        threads: Its number of threads.
        allocator: The allocator that most probably serves ``malloc`` in it (:func:`modelguard.allocator.observe`).
        pss: Its memory, with each shared page divided by the number of processes that map it.
        uss: Its private memory: pages that no other process maps. It is the sum of ``where``.
        private: Memory of this process alone that the system cannot reclaim: pages that were written to, or are in
            swap. Growth is measured in this figure, because clean pages of files come and go with the activity of other
            processes.
        since_birth: How much ``private`` has grown since the process started. A fork starts at zero, so for a fork
            this equals ``private``: what it has allocated itself, and each page that it or its parent has written to
            since. None for a process that is not a fork of a process that still runs.
        since_seen: How much ``private`` has grown since the first reading; None at the first reading.
        watched: Seconds since the first reading.
        where: Where ``uss`` is.
        swap: Its share of the memory that was moved to swap.
        rss: All its pages in memory, shared or not: misleading if processes share memory.
        versions: The versions of its models, by the names of their guards, as far as their loaders gave any.
        paused: The names of its guards that are paused.
        libraries: Libraries that compute models, as far as their compiled parts are mapped.
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
    versions: Mapping[str, str] = field(default_factory=dict)
    paused: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeReport:
    """The memory of a process tree, in bytes.

    Attributes:
        processes: Its processes, parents before children.
        unread: Processes that this user may not read; the totals do not include them.
        model_bytes: The size of one copy of the model, if it was given.
    """

    processes: tuple[ProcessReport, ...]
    unread: tuple[int, ...] = ()
    model_bytes: int | None = None

    @property
    def pss(self) -> int:
        """The memory that the tree uses; of pages that other processes map too, such as libc's, only its share."""
        return sum(process.pss for process in self.processes)

    @property
    def uss(self) -> int:
        """The sum of the private memory of its processes."""
        return sum(process.uss for process in self.processes)

    @property
    def rss(self) -> int:
        """The sum of RSS, which is misleading: it counts N times what N processes share."""
        return sum(process.rss for process in self.processes)

    @property
    def largest(self) -> ProcessReport:
        """The process with the largest RSS."""
        return max(self.processes, key=lambda process: process.rss)

    @property
    def one_copy(self) -> int:
        """The unit of ``copies``: ``model_bytes``, or the RSS of the largest process."""
        return self.largest.rss if self.model_bytes is None else self.model_bytes

    @property
    def copies(self) -> float:
        """How many times ``one_copy`` fits into the memory that the tree uses.

        A value near 1 means that the processes share what the largest of them needs; a value near their number means
        that each has its own copy. With ``model_bytes`` it is an upper bound for the copies of the model, because
        libraries and the rest of the program count too.
        """
        return self.pss / max(1, self.one_copy)


def report(
    tree: int | Iterable[int] | None = None, *, model_bytes: int | str | None = None, root: Path = _proc.ROOT
) -> TreeReport:
    """Read the memory of a process and all its descendants.

    Args:
        tree: The process at the top, or several processes without their descendants. Default: this process.
        model_bytes: The size of one copy of the model, such as ``"500 MB"``. Default: unknown.
        root: The folder that holds ``proc``.

    Returns:
        The figures. Reading them takes 50 - 150 ms for each process with torch or spaCy, and a process that requests
        memory from the system in the meantime may have to wait for a part of that time.

    Raises:
        InvalidOption: ``tree`` is not a process id, or ``model_bytes`` is not a size.
        ProcessLookupError: There is no such process, it has exited, or it is a kernel thread.
        PermissionError: The process at the top belongs to another user.
        NotSupported: There is no ``/proc``.
    """
    return TreeWatch(tree, model_bytes=model_bytes, root=root).look()


class _FirstReading(NamedTuple):
    """The first reading of a process."""

    private: int
    time: float


class TreeWatch:
    """Reads the memory of a process tree repeatedly, and remembers the first reading of each process.

    Args:
        tree: As for :func:`report`.
        model_bytes: As for :func:`report`.
        root: The folder that holds ``proc``.
        clock: A monotonic clock, in seconds.

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
        self._first: dict[tuple[object, ...], _FirstReading] = {}
        if not (_proc.folder(None, root) / "smaps").exists():
            reason = "there is no /proc that shows the mappings of processes"
            raise NotSupported("a report of a process tree", reason=reason)

    def look(self) -> TreeReport:
        """Read the current memory of the processes.

        Returns:
            The figures. Processes that end in the meantime are left out.

        Raises:
            ProcessLookupError: A process that was given has exited, or another process now has its id.
            PermissionError: A process that was given belongs to another user.
        """
        processes = _proc.processes(self._root)
        chosen = self._chosen(processes)
        found: list[ProcessReport] = []
        unread: list[int] = []
        for process in chosen:
            was_given = process.pid in self._pids
            try:
                read = self._read(process, processes)
            except PermissionError:
                if was_given:
                    raise _no_permission(process.pid) from None
                unread.append(process.pid)
                continue
            if read is not None:
                found.append(read)
            elif was_given:
                raise _no_process(process.pid, "has exited, or executed another program, while it was being read")
        self._forget_all_but({process.identity for process in chosen})
        return TreeReport(tuple(found), tuple(unread), self._model_bytes)

    def _chosen(self, processes: Mapping[int, ProcessStat]) -> list[ProcessStat]:
        for pid in self._pids:
            if pid not in processes:
                raise _not_running(pid, self._root)
            if self._started.setdefault(pid, processes[pid].started) != processes[pid].started:
                raise _no_process(pid, "has exited, and another process now has its id")
        if self._whole:
            return list(_proc.descendants(self._pids[0], processes))
        return [processes[pid] for pid in self._pids]

    def _read(self, process: ProcessStat, processes: Mapping[int, ProcessStat]) -> ProcessReport | None:
        """Read one process; None if it has ended in the meantime: the figures could be another process's."""
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
        private = _memory.private_of(pid, root)
        now = self._clock()
        first = self._first.get(process.identity)
        seen = self._first.setdefault(process.identity, _FirstReading(private, now))
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
            versions=_shown_guards.versions_in(mappings),
            paused=_shown_guards.paused_in(mappings),
            libraries=model_libraries(mappings),
        )

    def _forget_all_but(self, kept: set[tuple[int, int, _proc.MemoryLayout]]) -> None:
        self._first = {identity: seen for identity, seen in self._first.items() if identity in kept}


def python_trees(*, root: Path = _proc.ROOT, user: int | None = None, without: Iterable[int] = ()) -> list[int]:
    """Find the trees of Python processes of a user.

    A process counts if it executes Python or has loaded it, as uWSGI does. The top of a tree is a Python process whose
    parent is not one.

    Args:
        root: The folder that holds ``proc``.
        user: The user id. Default: that of this process.
        without: Processes to leave out, such as the calling one.

    Returns:
        The process at the top of each tree.
    """
    user = os.geteuid() if user is None else user
    left_out = set(without)
    processes = _proc.processes(root)
    found = [pid for pid in processes if pid not in left_out and _is_python_of(user, pid, root)]
    return [pid for pid in found if processes[pid].parent not in found]


def _is_python_of(user: int, pid: int, root: Path) -> bool:
    # A process that cannot be read has ended, or belongs to another user.
    if _proc.if_readable(_proc.owner, pid, root) != user:
        return False
    return _places.is_python(_proc.if_readable(_proc.maps, pid, root) or ())


def _pids(tree: int | Iterable[int]) -> tuple[int, ...]:
    pids: tuple[Any, ...] = tuple(tree) if isinstance(tree, Iterable) and not isinstance(tree, str) else (tree,)
    if not pids:
        raise InvalidOption("tree", tree, why="must not be empty", fix="Give a process id, or several.")
    return tuple(_units.process_id(pid, "tree") for pid in pids)


def _not_running(pid: int, root: Path) -> ProcessLookupError:
    known = _proc.stat(pid, root)
    if known is None:
        return _no_process(pid, "does not exist")
    if known.kernel:
        return _no_process(pid, "is a kernel thread, which has no memory of its own")
    return _no_process(pid, "has exited; only its exit status is left")


def _no_process(pid: int, why: str) -> ProcessLookupError:
    return ProcessLookupError(errno.ESRCH, f"process {pid} {why}; give the id of a running process")


def _no_permission(pid: int) -> PermissionError:
    return PermissionError(errno.EACCES, f"process {pid} belongs to another user; inspect it as its owner or as root")
