"""The library that serves ``malloc`` in this process, and how to make it give free memory back.

Which one it is cannot be told by names: ``LD_PRELOAD`` may be set and not in force, and a package may bring a private
copy of jemalloc that serves nobody else. So the dynamic linker is asked what ``malloc`` resolves to, and an allocator
is recognised by functions that come out of that very file. A function that comes from anywhere else is never called:
``malloc_trim`` of a glibc that does not serve ``malloc`` does nothing at best.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from modelguard.environment import memory
from modelguard.errors import NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Kind", "Library", "Serving", "serving", "trim"]

Kind = Literal["glibc", "jemalloc", "mimalloc", "tcmalloc", "unknown"]

_TRIMMING = "giving freed memory back to the system"


@dataclass(frozen=True, slots=True)
class Serving:
    """The library that serves ``malloc`` in this process.

    Attributes:
        kind: Which allocator it is; ``"unknown"`` is musl, a sanitizer, or another one that is not known here.
        path: The file it comes from, as the dynamic linker names it. For the executable itself this is often just
            the command.
    """

    kind: Kind
    path: str


class Library(Protocol):
    """The file that serves ``malloc``, as the rest of this module sees it."""

    path: str

    def exports(self, name: str) -> bool:
        """Whether a function of this name comes out of this very file."""
        ...

    def call(self, name: str, *arguments: bytes | int | None) -> int:
        """Call one of its functions."""
        ...


def serving(library: Library | None = None) -> Serving:
    """Find the library that serves ``malloc``.

    Args:
        library: The file to judge, by default the one that the dynamic linker names.

    Returns:
        Its kind and path.

    Raises:
        NotSupported: This is not Linux.
    """
    library = library or _malloc_library()
    found = _recognise(library)
    return Serving("unknown" if found is None else found.kind, library.path)


def trim(library: Library | None = None, *, private: Callable[[], int] | None = None) -> int:
    """Give memory that was freed back to the operating system.

    Allocators keep freed memory for the next request. This makes the one in force return it: glibc by
    ``malloc_trim(0)``, jemalloc by a purge of all arenas, tcmalloc by ``MallocExtension_ReleaseFreeMemory``, mimalloc
    by ``mi_collect`` (the calling thread's share, and some of it only a moment later).

    Args:
        library: The file that serves ``malloc``, by default the one that the dynamic linker names.
        private: Reads private memory in bytes, by default a fresh :func:`modelguard.environment.memory.private`.

    Returns:
        Bytes given back: private memory before less private memory after, or 0 if other threads took more meanwhile.

    Raises:
        NotSupported: This is not Linux, the allocator in force is not known, or it refused. Nothing was given back.
    """
    library = library or _malloc_library()
    private = private or _fresh
    found = _recognise(library)
    if found is None:
        raise NotSupported(_TRIMMING, reason=f"malloc is served by an unknown allocator ({library.path})")
    before = private()
    found.release(library, found.function)
    return max(0, before - private())


class _Allocator(NamedTuple):
    """How an allocator is recognised and trimmed.

    Attributes:
        kind: Its name.
        telltale: A function that only this allocator exports.
        function: The one that gives memory back.
        release: Calls it.
    """

    kind: Kind
    telltale: str
    function: str
    release: Callable[[Library, str], None]


def _trim_glibc(library: Library, malloc_trim: str) -> None:
    library.call(malloc_trim, 0)


def _purge(library: Library, mallctl: str) -> None:
    # 4096 stands for all arenas at once since jemalloc 5.0: MALLCTL_ARENAS_ALL in jemalloc.h.
    code = library.call(mallctl, b"arena.4096.purge", None, None, None, 0)
    if code:
        raise NotSupported(_TRIMMING, reason=f"jemalloc ({library.path}) refused to purge its arenas: error {code}")


def _collect(library: Library, mi_collect: str) -> None:
    force = True
    library.call(mi_collect, force)


def _release_free(library: Library, release_free_memory: str) -> None:
    library.call(release_free_memory)


_ALLOCATORS = (
    _Allocator("glibc", "gnu_get_libc_version", "malloc_trim", _trim_glibc),
    _Allocator("jemalloc", "mallctl", "mallctl", _purge),
    # Linked into a program, its own functions may have a prefix while malloc has none.
    _Allocator("jemalloc", "je_mallctl", "je_mallctl", _purge),
    _Allocator("jemalloc", "_rjem_mallctl", "_rjem_mallctl", _purge),
    _Allocator("mimalloc", "mi_collect", "mi_collect", _collect),
    _Allocator("tcmalloc", "MallocExtension_ReleaseFreeMemory", "MallocExtension_ReleaseFreeMemory", _release_free),
)


def _recognise(library: Library) -> _Allocator | None:
    for allocator in _ALLOCATORS:
        if library.exports(allocator.telltale) and library.exports(allocator.function):
            return allocator
    return None


def _malloc_library() -> Library:
    if not sys.platform.startswith("linux"):
        raise NotSupported(_TRIMMING, reason=f"it is known for Linux only, and this is {sys.platform}")
    from modelguard.environment import _linker  # imports ctypes, which takes 2 - 3 ms

    return _linker.MallocLibrary()


def _fresh() -> int:
    return memory.private(fresh=True)
