"""What each allocator reports about itself: its version and its figures.

Separate from :mod:`modelguard.environment._allocator` because it imports ctypes. A function is called only if the file
that serves ``malloc`` exports it: a function of another file would report memory that this process does not use, or
crash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from modelguard.environment._allocator_kinds import Figures, Kind, Library

__all__ = ["background_threads", "figures", "start_background_threads", "version"]

#: The sum of what threads have allocated and freed may be negative, which is a huge number as an unsigned integer.
_BELOW_ZERO = 2**62

# mimalloc reports its version as 209 for 2.0.9, and since 2.2.6 as 20206.
_LONG_VERSION = 10_000


def version(kind: Kind, library: Library, function: str) -> str | None:
    """The allocator's version, as it reports it.

    Args:
        kind: The allocator.
        library: Its file.
        function: The name of jemalloc's ``mallctl`` in that file.

    Returns:
        Text such as ``"5.3.0"``; None if it does not report one.
    """
    return _VERSIONS[kind](library, function) if kind in _VERSIONS else None


def figures(kind: Kind, library: Library, function: str) -> Figures | None:
    """The allocator's figures.

    Args:
        kind: The allocator.
        library: Its file.
        function: The name of jemalloc's ``mallctl`` in that file.

    Returns:
        The figures; None if it reports none.
    """
    return _FIGURES[kind](library, function) if kind in _FIGURES else None


def background_threads(library: Library, mallctl: str) -> bool:
    """Whether jemalloc runs background threads in this process."""
    return bool(_control(library, mallctl, b"background_thread", ctypes.c_bool()))


def start_background_threads(library: Library, mallctl: str) -> bool:
    """Make jemalloc start its background threads; False if it refused."""
    on = ctypes.c_bool(1)
    return not library.call(mallctl, b"background_thread", None, None, ctypes.byref(on), ctypes.sizeof(on))


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",  # taken from the system, without hblkhd
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",  # in separate mappings, one for each large block
            "usmblks",
            "fsmblks",
            "uordblks",  # the part of arena that is in use
            "fordblks",
            "keepcost",
        )
    )


def _glibc_version(library: Library, _: str) -> str | None:
    found = library.call("gnu_get_libc_version", returns=ctypes.c_char_p)
    return None if found is None else found.decode()


def _glibc(library: Library, _: str) -> Figures | None:
    if not library.exports("mallinfo2"):  # before 2.33 there is only mallinfo, whose figures overflow at 2 GB
        return None
    info = library.call("mallinfo2", returns=_Mallinfo2)
    return _figures(info.uordblks + info.hblkhd, None, info.arena + info.hblkhd)


def _jemalloc_version(library: Library, mallctl: str) -> str | None:
    found = _control(library, mallctl, b"version", ctypes.c_char_p())
    return None if found is None else found.decode().partition("-")[0]


def _jemalloc(library: Library, mallctl: str) -> Figures | None:
    # jemalloc updates its figures when a new epoch is written.
    epoch, size = ctypes.c_uint64(1), ctypes.sizeof(ctypes.c_uint64)
    if library.call(mallctl, b"epoch", None, None, ctypes.byref(epoch), size):
        return None
    found = [_control(library, mallctl, b"stats." + name, ctypes.c_size_t()) for name in _STATS]
    return None if None in found else _figures(*found)


_STATS = (b"allocated", b"active", b"resident")


def _control(library: Library, mallctl: str, name: bytes, value: Any) -> Any:
    """Read a value by name; None if this jemalloc was built without it."""
    size = ctypes.c_size_t(ctypes.sizeof(value))
    failed = library.call(mallctl, name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed else value.value


def _mimalloc_version(library: Library, _: str) -> str | None:
    if not library.exports("mi_version"):
        return None
    found = library.call("mi_version")
    base = 100 if found >= _LONG_VERSION else 10
    return f"{found // base**2}.{found // base % base}.{found % base}"


def _mimalloc(library: Library, _: str) -> Figures | None:
    if not (library.exports("mi_process_info") and library.exports("mi_stats_merge")):
        return None
    # Elapsed, user and system time, current and peak resident memory, current and peak committed memory, page faults.
    # On Linux resident memory is the same figure as committed memory.
    found = [ctypes.c_size_t() for _ in range(8)]
    library.call("mi_stats_merge", returns=None)  # adds the calling thread's counters to those of the process
    library.call("mi_process_info", *map(ctypes.byref, found), returns=None)
    committed = found[5].value
    return None if committed >= _BELOW_ZERO else _figures(None, None, committed)


def _tcmalloc_version(library: Library, _: str) -> str | None:
    if not library.exports("tc_version"):
        return None
    major, minor, patch = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
    library.call("tc_version", *map(ctypes.byref, (major, minor, patch)), returns=ctypes.c_char_p)
    return f"{major.value}.{minor.value}{(patch.value or b'').decode()}"


def _tcmalloc(library: Library, _: str) -> Figures | None:
    if not library.exports("MallocExtension_GetNumericProperty"):
        return None
    allocated = _property(library, b"generic.current_allocated_bytes")
    heap, free, unmapped = (_property(library, name) for name in _PAGE_HEAP)
    if allocated is None or heap is None or free is None or unmapped is None:
        return None
    return _figures(allocated, heap - free - unmapped, heap - unmapped)


_PAGE_HEAP = (b"generic.heap_size", b"tcmalloc.pageheap_free_bytes", b"tcmalloc.pageheap_unmapped_bytes")


def _property(library: Library, name: bytes) -> int | None:
    value = ctypes.c_size_t()
    known = library.call("MallocExtension_GetNumericProperty", name, ctypes.byref(value))
    return value.value if known else None


def _figures(allocated: int | None, active: int | None, resident: int) -> Figures:
    # The figures are not read at the same moment, so the difference may be negative while other threads work.
    return Figures(allocated, active, resident, None if allocated is None else max(0, resident - allocated))


_VERSIONS: dict[Kind, Callable[[Library, str], str | None]] = {
    "glibc": _glibc_version,
    "jemalloc": _jemalloc_version,
    "mimalloc": _mimalloc_version,
    "tcmalloc": _tcmalloc_version,
}
_FIGURES: dict[Kind, Callable[[Library, str], Figures | None]] = {
    "glibc": _glibc,
    "jemalloc": _jemalloc,
    "mimalloc": _mimalloc,
    "tcmalloc": _tcmalloc,
}
