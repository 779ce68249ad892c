"""The dynamic linker's view of this process: the file that ``malloc`` comes from, its allocator, and the loaded files.

Separate from :mod:`modelguard.environment._allocator` because importing ctypes takes 2 - 3 ms, and it is not needed
before the first trim.
"""

import ctypes
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from modelguard.environment import _loaded_files
from modelguard.environment._allocator_files import Figures, Kind, Library, NotElf, opened
from modelguard.errors import NotSupported

TRIMMING = "returning freed memory to the system"
_THREADS = "restarting jemalloc's background threads"


class MallocLibrary:
    """The file that serves ``malloc`` in this process.

    Attributes:
        path: Its name for the dynamic linker. For the executable itself this is often just the command.
        base: Where it begins in memory.
    """

    def __init__(self) -> None:
        # The scope of the whole program, searched in the order in which calls to malloc are bound.
        self._program = ctypes.CDLL(None)
        self._functions: dict[tuple[str, Any], Any] = {}
        self._exports: dict[str, bool] = {}
        self.base, self.path = _loaded_files.file_of("malloc")

    def exports(self, name: str) -> bool:
        if name not in self._exports:
            self._exports[name] = hasattr(self._program, name) and _loaded_files.file_of(name)[0] == self.base
        return self._exports[name]

    def call(self, name: str, *arguments: Any, returns: Any = ctypes.c_int) -> Any:
        function = self._functions.get((name, returns))
        if function is None:
            # The lookup by index makes a new function object, so no other code sees its result type. It is kept: what
            # each lookup of a load leaves behind would lie among the model's objects, and keep their arenas.
            function = self._program[name]
            function.restype = returns
            self._functions[name, returns] = function
        # Of an int, ctypes would make an int of C; this is a size_t.
        return function(*(ctypes.c_size_t(one) if isinstance(one, int) else one for one in arguments))


@cache
def malloc_library() -> MallocLibrary:
    """The file that serves ``malloc`` in this process; it stays the same."""
    return MallocLibrary()


def static_of(file: str, variable: str, base: int | None) -> int | None:
    """A static variable of a function in a loaded file, read in memory; None if it has no value yet.

    It is found because libraries in wheels keep the table of their local names (``.symtab``).

    Args:
        file: The program or library.
        variable: Its name in that table.
        base: Where the file's addresses begin, or the calling thread's variables of this file; None if it has none yet.
    """
    value, guard = _offset(file, variable), _offset(file, variable.replace("_ZZ", "_ZGVZ", 1))
    # The first byte of a guard variable shows whether the variable is initialised (Itanium C++ ABI, 3.3.3).
    if base is None or not ctypes.c_uint8.from_address(base + guard).value:
        return None
    return ctypes.c_int32.from_address(base + value).value


@cache
def _offset(path: str, name: str) -> int:
    try:
        with opened(path) as file:
            address = file.address_of(name)
    except NotElf as error:
        raise LookupError(name) from error
    if address is None:
        raise LookupError(name)
    return address


# What is known of each allocator: how to recognise it, to make it return what was freed, and what it reports.
#
# A function is called only if the file that serves ``malloc`` exports it: a function of another file would report
# memory that this process does not use, or crash.

#: The sum of what threads have allocated and freed may be negative, which is a huge number as an unsigned integer.
_BELOW_ZERO = 2**62

# mimalloc reports its version as 209 for 2.0.9, and since 2.2.6 as 20206.
_LONG_VERSION = 10_000


class Allocator:
    """The allocator that serves ``malloc``; this class is one that modelguard does not know.

    Args:
        library: The file that serves ``malloc``.
        function: The function by which it was recognised.
    """

    kind: Kind = "unknown"

    def __init__(self, library: Library, function: str = "") -> None:
        self.library = library
        self._function = function

    def trim(self) -> None:
        """Return freed memory to the system."""
        raise NotSupported(TRIMMING, reason=f"malloc is served by an unknown allocator ({self.library.path})")

    def version(self) -> str | None:
        return None

    def figures(self) -> Figures | None:
        return None

    def has_threads(self) -> bool:
        return False

    def restart_threads(self) -> None:
        """Make jemalloc start its background threads again.

        Raises:
            NotSupported: It is another allocator, or it refused.
        """
        raise NotSupported(_THREADS, reason=f"malloc is served by {self.kind} ({self.library.path})")


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h.

    ``arena`` was taken from the system, without ``hblkhd``, which is in separate mappings, one for each large block;
    ``uordblks`` is the part of ``arena`` that is in use.
    """

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


class _Glibc(Allocator):
    kind = "glibc"

    def trim(self) -> None:
        self.library.call("malloc_trim", 0)

    def version(self) -> str | None:
        found = self.library.call("gnu_get_libc_version", returns=ctypes.c_char_p)
        return None if found is None else found.decode()

    def figures(self) -> Figures | None:
        if not self.library.exports("mallinfo2"):  # before 2.33 there is only mallinfo, whose figures overflow at 2 GB
            return None
        info = self.library.call("mallinfo2", returns=_Mallinfo2)
        return _figures(info.uordblks + info.hblkhd, None, info.arena + info.hblkhd)


class _Jemalloc(Allocator):
    kind = "jemalloc"

    def trim(self) -> None:
        # 4096 stands for all arenas at once since jemalloc 5.0: MALLCTL_ARENAS_ALL in jemalloc.h.
        code = self._call(b"arena.4096.purge")
        if code:
            reason = f"jemalloc ({self.library.path}) refused to purge its arenas: error {code}"
            raise NotSupported(TRIMMING, reason=reason)

    def version(self) -> str | None:
        found = self._read(b"version", ctypes.c_char_p())
        return None if found is None else found.decode().partition("-")[0]

    def figures(self) -> Figures | None:
        if self._call(b"epoch", ctypes.c_uint64(1)):  # it updates its figures when a new epoch is written
            return None
        found = [self._read(b"stats." + name, ctypes.c_size_t()) for name in (b"allocated", b"active", b"resident")]
        return None if None in found else _figures(*found)

    def has_threads(self) -> bool:
        return bool(self._read(b"background_thread", ctypes.c_bool()))

    def restart_threads(self) -> None:
        if self._call(b"background_thread", ctypes.c_bool(1)):
            raise NotSupported(_THREADS, reason=f"jemalloc ({self.library.path}) refused to start them")

    def _call(self, name: bytes, value: Any = None) -> int:
        """Write a value by its name, or do what the name says; the code of an error, or 0."""
        given = (None, 0) if value is None else (ctypes.byref(value), ctypes.sizeof(value))
        return int(self.library.call(self._function, name, None, None, *given))

    def _read(self, name: bytes, value: Any) -> Any:
        """Read a value by its name; None if this jemalloc was built without it."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        failed = self.library.call(self._function, name, ctypes.byref(value), ctypes.byref(size), None, 0)
        return None if failed else value.value


class _Mimalloc(Allocator):
    kind = "mimalloc"

    def trim(self) -> None:
        self.library.call("mi_collect", True)  # noqa: FBT003 - by force

    def version(self) -> str | None:
        if not self.library.exports("mi_version"):
            return None
        found = self.library.call("mi_version")
        base = 100 if found >= _LONG_VERSION else 10
        return f"{found // base**2}.{found // base % base}.{found % base}"

    def figures(self) -> Figures | None:
        if not (self.library.exports("mi_process_info") and self.library.exports("mi_stats_merge")):
            return None
        # Elapsed, user and system time, current and peak resident memory, current and peak committed memory, page
        # faults. On Linux resident memory is the same figure as committed memory.
        found = [ctypes.c_size_t() for _ in range(8)]
        self.library.call("mi_stats_merge", returns=None)  # adds the calling thread's counters to those of the process
        self.library.call("mi_process_info", *map(ctypes.byref, found), returns=None)
        committed = found[5].value
        return None if committed >= _BELOW_ZERO else _figures(None, None, committed)


class _Tcmalloc(Allocator):
    kind = "tcmalloc"

    def trim(self) -> None:
        self.library.call(_RELEASE)

    def version(self) -> str | None:
        if not self.library.exports("tc_version"):
            return None
        major, minor, patch = ctypes.c_int(), ctypes.c_int(), ctypes.c_char_p()
        self.library.call("tc_version", *map(ctypes.byref, (major, minor, patch)), returns=ctypes.c_char_p)
        return f"{major.value}.{minor.value}{(patch.value or b'').decode()}"

    def figures(self) -> Figures | None:
        found: list[Any] = [None]
        if self.library.exports(_PROPERTY):
            found = [self._property(name) for name in _PROPERTIES]
        if None in found:
            return None
        allocated, heap, free, unmapped = found
        return _figures(allocated, heap - free - unmapped, heap - unmapped)

    def _property(self, name: bytes) -> Any:
        value = ctypes.c_size_t()
        known = self.library.call(_PROPERTY, name, ctypes.byref(value))
        return value.value if known else None


_RELEASE, _PROPERTY = "MallocExtension_ReleaseFreeMemory", "MallocExtension_GetNumericProperty"
_PROPERTIES = (
    b"generic.current_allocated_bytes",
    b"generic.heap_size",
    b"tcmalloc.pageheap_free_bytes",
    b"tcmalloc.pageheap_unmapped_bytes",
)


def _figures(allocated: int | None, active: int | None, resident: int) -> Figures:
    # The figures are not read at the same moment, so the difference may be negative while other threads work.
    return Figures(allocated, active, resident, None if allocated is None else max(0, resident - allocated))


#: Each allocator, after the functions that its file exports; the first of them no other file has.
_ALLOCATORS: tuple[tuple[tuple[str, ...], type[Allocator]], ...] = (
    (("gnu_get_libc_version", "malloc_trim"), _Glibc),
    (("mallctl",), _Jemalloc),
    # When jemalloc is linked into a program, its own functions may have a prefix although malloc has none.
    (("je_mallctl",), _Jemalloc),
    (("_rjem_mallctl",), _Jemalloc),
    (("mi_collect",), _Mimalloc),
    ((_RELEASE,), _Tcmalloc),
)


def recognise(library: Library) -> Allocator:
    for functions, allocator in _ALLOCATORS:
        if all(map(library.exports, functions)):
            return allocator(library, functions[0])
    return Allocator(library)


# Python's own allocator of small objects, in front of malloc


def python_in_use() -> int | None:
    """Bytes that pymalloc has handed out, None if it does not serve small objects.

    CPython tells them only as text, as ``sys._debugmallocstats`` prints it. It counts pools of 16 KB, not objects: that
    takes about a millisecond for 300 MB.
    """
    report = _report()
    found = None if report is None else re.search(rb"# bytes in allocated blocks +=\s+([0-9,]+)", report())
    return None if found is None else int(found[1].replace(b",", b""))


@cache
def _report() -> Callable[[], bytes] | None:
    """What writes the figures of pymalloc; None where it cannot be asked."""
    c = ctypes.CDLL(None)
    if not hasattr(ctypes.pythonapi, "_PyObject_DebugMallocStats") or not hasattr(c, "open_memstream"):
        return None
    c.open_memstream.restype = ctypes.c_void_p

    def report() -> bytes:
        text, size = ctypes.c_void_p(), ctypes.c_size_t()
        stream = c.open_memstream(ctypes.byref(text), ctypes.byref(size))
        if stream is None:
            return b""
        ctypes.pythonapi._PyObject_DebugMallocStats(ctypes.c_void_p(stream))  # noqa: SLF001 - see above
        c.fclose(ctypes.c_void_p(stream))
        written = ctypes.string_at(text, size.value)
        c.free(text)
        return written

    return report
