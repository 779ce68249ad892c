"""Where the memory of a process sits, told from ``/proc/PID/smaps`` alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields

__all__ = ["Mapping", "Places", "has_arenas", "is_python", "mappings", "place", "total"]

#: What obmalloc asks the system for at a time, since CPython 3.10 (``ARENA_BITS`` in pycore_obmalloc.h). 3.11 - 3.14
#: give these mappings no name, and the kernel joins those that touch.
_ARENA = 1 << 20

#: A guard below a thread's stack is a page, or as much as the program has asked for.
_LARGEST_GUARD = 1 << 20

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+) *(.*)")

# Names that the kernel, or a library through PR_SET_VMA_ANON_NAME, gives to anonymous memory.
_NAMED = (
    ("python", re.compile(r"\[anon:cpython:pymalloc")),  # from 3.15 on, under -X dev
    ("stacks", re.compile(r"\[stack|\[anon: glibc: pthread stack")),
    ("heap", re.compile(r"\[heap\]|\[anon: ?(?:glibc|jemalloc|mimalloc|tcmalloc)")),
)

# An upgrade of the system leaves "(deleted)" behind the names of files that still run.
_PYTHON = re.compile(r"/(?:python\d[\d.]*t?(?: \(deleted\))?|libpython\d[^/]*|lib-dynload/[^/]*)$")
_FREE_THREADED = re.compile(r"/(?:(?:lib)?python3\.\d+t(?:\.so[^/]*| \(deleted\))?|[^/]*\.cpython-3\d+t-[^/]*)$")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the private memory of a process (its USS) sits, in bytes; the fields add up to it.

    Attributes:
        python: Arenas of Python's own allocator, which holds objects of up to 512 bytes: what a write to a reference
            count copies. Told by their shape, whole MiB of anonymous memory, so this is a lower bound: arenas that
            the kernel has joined with large blocks are in ``mixed``. Under glibc 35% to 95% were found, under
            jemalloc, mimalloc and tcmalloc 97% or more, in programs with 90 MB of arenas or more. None where arenas
            are not in use: ``PYTHONMALLOC`` says so, a free-threaded Python, or no Python at all.
        heap: What ``malloc`` serves: ``[heap]``, the heaps of glibc's threads, and what another allocator reserves.
        mixed: Other anonymous memory: large blocks such as tensors and arrays, which ``malloc`` takes from the system
            one by one, arenas that lie beside them, and variables of libraries.
        stacks: Of all threads.
        files: Pages of files that no other process maps just now, and those that were written to since. Files in
            ``/dev/shm`` are among them.
    """

    python: int | None
    heap: int
    mixed: int
    stacks: int
    files: int


@dataclass(slots=True)
class Mapping:
    """One mapping of a process, as ``smaps`` shows it.

    Attributes:
        start: Its first address.
        end: The address behind its last.
        access: Such as ``rw-p``.
        file: Whether a file is behind it.
        name: The file, a name such as ``[heap]``, or nothing.
        sizes: What smaps tells of it, in bytes.
        flags: Its two-letter flags (proc_pid_smaps(5)).
    """

    start: int
    end: int
    access: str
    file: bool
    name: str
    sizes: dict[str, int] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()

    @property
    def private(self) -> int:
        """Its bytes that no other process maps."""
        return self.sizes.get("Private_Clean", 0) + self.sizes.get("Private_Dirty", 0)


def mappings(smaps: str) -> list[Mapping]:
    """Read the text of a file ``smaps``."""
    found: list[Mapping] = []
    for line in smaps.splitlines():
        head = _HEAD.match(line)
        if head:
            start, end, access, inode, name = head.groups()
            found.append(Mapping(int(start, 16), int(end, 16), access, inode != "0", name))
        elif found:
            _add(found[-1], line)
    return found


def total(found: Iterable[Mapping], *names: str) -> int:
    """Add up figures of all mappings, in bytes."""
    return sum(mapping.sizes.get(name, 0) for mapping in found for name in names)


def is_python(found: Iterable[Mapping]) -> bool:
    """Whether a Python runs in a process with these mappings, as a program or inside of one."""
    return any(mapping.file and _PYTHON.search(mapping.name) for mapping in found)


def has_arenas(found: Iterable[Mapping], pythonmalloc: str) -> bool:
    """Whether Python's own allocator serves its small objects.

    Args:
        found: The mappings of the process.
        pythonmalloc: The variable ``PYTHONMALLOC`` of the process, empty if it is not set.
    """
    found = list(found)
    if not is_python(found) or any(mapping.file and _FREE_THREADED.search(mapping.name) for mapping in found):
        return False
    return pythonmalloc in {"", "default", "debug", "pymalloc", "pymalloc_debug"}


def place(found: Iterable[Mapping], *, arenas: bool) -> Places:
    """Tell where private memory sits.

    Args:
        found: The mappings of a process, by address.
        arenas: Whether :func:`has_arenas`.
    """
    sums = dict.fromkeys((one.name for one in fields(Places)), 0)
    for name, private in _placed(found):
        sums[name if arenas or name != "python" else "mixed"] += private
    python = sums.pop("python")
    return Places(python=python if arenas else None, **sums)


def _add(mapping: Mapping, line: str) -> None:
    name, _, value = line.partition(":")
    words = value.split()
    if name == "VmFlags":
        mapping.flags = frozenset(words)
    elif words[1:] == ["kB"]:
        mapping.sizes[name] = int(words[0]) * 1024


def _placed(found: Iterable[Mapping]) -> Iterator[tuple[str, int]]:
    before = None
    for mapping in found:
        yield _place(mapping, before), mapping.private
        before = mapping


def _place(mapping: Mapping, before: Mapping | None) -> str:
    if mapping.file:
        return "files"
    for name, pattern in _NAMED:
        if pattern.match(mapping.name):
            return name
    if "nr" in mapping.flags:  # MAP_NORESERVE: glibc's threads, jemalloc and mimalloc reserve more than they use
        return "heap"
    # The kernel keeps huge pages away from what is mapped as a stack (since 6.7).
    if "nh" in mapping.flags or _is_guard(before, mapping.start):
        return "stacks"
    return "python" if (mapping.end - mapping.start) % _ARENA == 0 else "mixed"


def _is_guard(before: Mapping | None, end: int) -> bool:
    if before is None or before.end != end or before.access != "---p" or before.file:
        return False
    return before.end - before.start <= _LARGEST_GUARD
