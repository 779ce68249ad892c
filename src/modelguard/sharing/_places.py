"""Where the private memory of a process is, as far as its mappings show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from modelguard.environment._mappings import MemoryMapping

__all__ = ["Places", "has_arenas", "is_python", "places", "total"]

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

_PYTHON = re.compile(r"/(?:python\d[\d.]*t?|libpython\d[^/]*|lib-dynload/[^/]*)$")
_FREE_THREADED = re.compile(r"/(?:(?:lib)?python3\.\d+t(?:\.so[^/]*)?|[^/]*\.cpython-3\d+t-[^/]*)$")


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
    """Find out where private memory is.

    Args:
        mappings: The mappings of a process with their sizes, by address.
        arenas: The result of :func:`has_arenas`.
    """
    sums = dict.fromkeys((field.name for field in fields(Places)), 0)
    for name, private in _placed(mappings):
        sums[name if arenas or name != "python" else "mixed"] += private
    python = sums.pop("python")
    return Places(python=python if arenas else None, **sums)


def total(mappings: Iterable[MemoryMapping], *names: str) -> int:
    """Add up figures of all mappings, in bytes."""
    return sum(mapping.sizes.get(name, 0) for mapping in mappings for name in names)


def is_python(mappings: Iterable[MemoryMapping]) -> bool:
    """Whether a process with these mappings runs Python, as its program or inside of it."""
    return any(mapping.is_file and _PYTHON.search(mapping.name) for mapping in mappings)


def has_arenas(mappings: Iterable[MemoryMapping], pythonmalloc: str) -> bool:
    """Whether Python's own allocator serves its small objects.

    Args:
        mappings: The mappings of the process.
        pythonmalloc: The variable ``PYTHONMALLOC`` of the process; empty if it is not set.
    """
    mappings = list(mappings)
    if not is_python(mappings) or any(_FREE_THREADED.search(mapping.name) for mapping in mappings if mapping.is_file):
        return False
    return pythonmalloc in {"", "default", "debug", "pymalloc", "pymalloc_debug"}


def _placed(mappings: Iterable[MemoryMapping]) -> Iterator[tuple[str, int]]:
    before = None
    for mapping in mappings:
        yield _place(mapping, before), mapping.private
        before = mapping


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
