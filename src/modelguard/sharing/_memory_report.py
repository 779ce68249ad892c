"""How much memory a process tree actually uses, read from outside.

RSS counts a page that forked workers share once for each worker, so it shows N copies of a model although there is only
one. PSS divides such a page among the processes that map it: added up over a tree, it is the memory that the tree
actually uses. USS, private memory, is what one process would release if it ended.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from modelguard import _units
from modelguard.environment import _allocator_problems
from modelguard.environment._allocator_files import Kind
from modelguard.errors import InvalidOption, NotSupported
from modelguard.facts import _memory, _proc
from modelguard.facts._proc import MemoryMapping, ProcessStat, interpreter_in, model_libraries

# Where the private memory of a process is, as far as its mappings show.


#: The size of obmalloc's requests to the system, since CPython 3.10 (``ARENA_BITS`` in pycore_obmalloc.h). CPython
#: 3.11 to 3.14 give these mappings no name, and the kernel merges neighbours.
_ARENA = 1 << 20

#: The guard area below a thread's stack is one page, or as large as the program has requested.
_LARGEST_GUARD = 1 << 20

# Names that the kernel, or a library through PR_SET_VMA_ANON_NAME, gives to anonymous memory.
_NAMED = (
    ("python", re.compile(r"\[anon:cpython:pymalloc")),  # since 3.15, under -X dev
    ("stacks", re.compile(r"\[stack|\[anon: glibc: pthread stack")),
    ("heap", re.compile(r"\[heap\]|\[anon: ?(?:glibc|jemalloc|mimalloc|tcmalloc)")),
)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the private memory of a process (its USS) is, in bytes; the sum of the fields is the USS.

    Attributes:
        python: Arenas of Python's own allocator, which holds objects of up to 512 bytes. Their pages are copied when a
            reference count is written. Arenas are recognised by their size, whole MiB of anonymous memory, so this is a
            lower bound: arenas that the kernel has merged with large blocks are in ``mixed``. In programs with 90 MB of
            arenas or more, 35% to 95% were found under glibc, and 97% or more under jemalloc, mimalloc and tcmalloc.
            None if arenas are not in use: with another ``PYTHONMALLOC``, in a free-threaded Python, or without Python.
        heap: Memory for ``malloc``: ``[heap]``, the heaps of glibc's threads, and what another allocator reserves.
        mixed: Other anonymous memory: large blocks such as tensors and arrays, which ``malloc`` requests from the
            system one by one, arenas next to them, and variables of libraries.
        stacks: The stacks of all threads.
        files: Pages of files that no other process maps at the moment, and pages that were written to since they were
            mapped. This includes files in ``/dev/shm``.
    """

    python: int | None
    heap: int
    mixed: int
    stacks: int
    files: int


def places(mappings: Iterable[MemoryMapping], *, arenas: bool) -> Places:
    """Find out where private memory is, by the mappings of a process in the order of their addresses."""
    sums = dict.fromkeys((field.name for field in fields(Places)), 0)
    before = None
    for mapping in mappings:
        name = _place(mapping, before)
        sums[name if arenas or name != "python" else "mixed"] += mapping.private
        before = mapping
    python = sums.pop("python")
    return Places(python=python if arenas else None, **sums)


def total(mappings: Iterable[MemoryMapping], *names: str) -> int:
    return sum(mapping.sizes.get(name, 0) for mapping in mappings for name in names)


def has_arenas(mappings: Sequence[MemoryMapping], pythonmalloc: str) -> bool:
    """Whether Python's own allocator serves its small objects."""
    python = interpreter_in(mappings)
    if python is None or python.name != "CPython" or python.free_threaded:
        return False
    return pythonmalloc in {"", "default", "debug", "pymalloc", "pymalloc_debug"}


def _place(mapping: MemoryMapping, before: MemoryMapping | None) -> str:
    if mapping.is_file:
        return "files"
    for name, pattern in _NAMED:
        if pattern.match(mapping.name):
            return name
    if "nr" in mapping.flags:  # MAP_NORESERVE: glibc's threads, jemalloc and mimalloc reserve more than they use
        return "heap"
    # Since 6.7 the kernel uses no huge pages for mappings made as stacks.
    if "nh" in mapping.flags or _is_guard(before, mapping.start):
        return "stacks"
    return "python" if (mapping.end - mapping.start) % _ARENA == 0 else "mixed"


def _is_guard(before: MemoryMapping | None, end: int) -> bool:
    if before is None or before.end != end or before.access != "---p" or before.is_file:
        return False
    return before.end - before.start <= _LARGEST_GUARD


@dataclass(frozen=True, slots=True)
class ProcessReport:
    """The memory of one process, in bytes.

    Attributes:
        pid: The process.
        parent: Its parent.
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
        where: Where ``uss`` is.
        swap: Its share of the memory that was moved to swap.
        rss: All its pages in memory, shared or not: misleading if processes share memory.
        versions: The versions of its models, by the names of their guards, as far as their loaders gave any.
        paused: The names of its guards that are paused.
        libraries: Libraries that compute models, as far as their compiled parts are mapped.
    """

    pid: int
    parent: int
    command: tuple[str, ...] = field(repr=False)
    threads: int
    allocator: Kind
    pss: int
    uss: int
    private: int
    since_birth: int | None
    since_seen: int | None
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


class TreeWatch:
    """Reads the memory of a process tree repeatedly, and remembers the first reading of each process.

    Args:
        tree: As for :func:`report`.
        model_bytes: As for :func:`report`.
        root: The folder that holds ``proc``.

    Raises:
        InvalidOption: ``tree`` is not a process id, or ``model_bytes`` is not a size.
        NotSupported: There is no ``/proc``.
    """

    def __init__(
        self, tree: int | Iterable[int] | None = None, *, model_bytes: int | str | None = None, root: Path = _proc.ROOT
    ) -> None:
        self._whole = tree is None or isinstance(tree, int)
        self._pids = _pids(os.getpid() if tree is None else tree)
        self._model_bytes = None if model_bytes is None else _units.size(model_bytes, "model_bytes", at_least=1000)
        self._root = root
        self._started: dict[int, int] = {}
        # The private memory of each process at its first reading.
        self._first: dict[tuple[object, ...], int] = {}
        _require_proc(root)

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
                    raise _proc.not_permitted(process.pid) from None
                unread.append(process.pid)
                continue
            if read is not None:
                found.append(read)
            elif was_given:
                raise _no_process(process.pid, "has exited, or executed another program, while it was being read")
        kept = {process.identity for process in chosen}
        self._first = {identity: seen for identity, seen in self._first.items() if identity in kept}
        return TreeReport(tuple(found), tuple(unread), self._model_bytes)

    def _chosen(self, processes: Mapping[int, ProcessStat]) -> list[ProcessStat]:
        for pid in self._pids:
            if pid not in processes:
                raise _no_process(pid, _proc.absence(pid, self._root))
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
            kind = _allocator_problems.observe(pid, root=root).kind
        except (FileNotFoundError, ProcessLookupError):
            return None
        after = _proc.stat(pid, root)
        if not mappings or after is None or after.identity != process.identity:
            return None
        environ = _proc.if_readable(_proc.environment, pid, root) or {}
        arenas = has_arenas(mappings, environ.get("PYTHONMALLOC", ""))
        private = _memory.private_of(pid, root)
        known = process.identity in self._first
        first = self._first.setdefault(process.identity, private)
        return ProcessReport(
            pid=pid,
            parent=process.parent,
            command=_proc.if_readable(_proc.command_line, pid, root) or (),
            threads=process.threads,
            allocator=kind,
            pss=total(mappings, "Pss"),
            uss=total(mappings, "Private_Clean", "Private_Dirty"),
            private=private,
            since_birth=private if _proc.is_fork(process, processes.values()) else None,
            since_seen=private - first if known else None,
            where=places(mappings, arenas=arenas),
            swap=total(mappings, "SwapPss"),
            rss=total(mappings, "Rss"),
            versions=_proc.versions_in(mappings),
            paused=_proc.paused_in(mappings),
            libraries=model_libraries(mappings),
        )


def python_trees(*, root: Path = _proc.ROOT, without: Collection[int] = ()) -> list[int]:
    """Find the trees of Python processes of this process's user.

    A process counts if it executes Python or has loaded it, as uWSGI does. The top of a tree is a Python process whose
    parent is not one.
    """
    _require_proc(root)
    processes = _proc.processes(root)
    # A process that cannot be read has ended, or belongs to another user.
    owned = (
        pid for pid in processes if pid not in without and _proc.if_readable(_proc.owner, pid, root) == os.geteuid()
    )
    found = [pid for pid in owned if interpreter_in(_proc.if_readable(_proc.maps, pid, root) or ())]
    return [pid for pid in found if processes[pid].parent not in found]


def _require_proc(root: Path) -> None:
    if not (_proc.folder(None, root) / "smaps").exists():
        reason = "there is no /proc that shows the mappings of processes"
        raise NotSupported("a report of a process tree", reason=reason)


def _pids(tree: int | Iterable[int]) -> tuple[int, ...]:
    pids: tuple[Any, ...] = tuple(tree) if isinstance(tree, Iterable) and not isinstance(tree, str) else (tree,)
    if not pids:
        raise InvalidOption("tree", tree, why="must not be empty", fix="Give a process id, or several.")
    return tuple(dict.fromkeys(_units.process_id(pid, "tree") for pid in pids))


def _no_process(pid: int, why: str) -> ProcessLookupError:
    return _proc.not_found(pid, f"{why}; give the id of a running process")
