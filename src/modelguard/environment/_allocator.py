"""The library that serves ``malloc`` in this process, and how to make it return free memory to the system.

File names do not show which library it is: ``LD_PRELOAD`` may be set and not in force, and a package may bundle a
private copy of jemalloc that nothing else uses. So this module asks the dynamic linker what ``malloc`` resolves to, and
recognises the allocator by the functions of that file. It never calls functions of any other file: ``malloc_trim`` of a
glibc that does not serve ``malloc`` does nothing at best.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from modelguard.errors import NotSupported
from modelguard.facts import _memory, _proc
from modelguard.runtime import fork_hooks

if TYPE_CHECKING:  # a service that only guards a model needs none of them
    from modelguard.environment._allocator_files import Figures, How, Kind, Library, Problem, SmallObjects
    from modelguard.environment._linker import Allocator

# Parameters of mallopt, of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: Bytes of glibc's thresholds, for trimming and for mappings, at the start of a process.
_INITIAL = 2**17, 2**17
#: And the highest that glibc sets them to by itself, on machines of 64 bits, as blocks of that size are freed.
_USUAL = 2**24, 2**25
#: Whoever sets one of these has set the thresholds, or keeps glibc from adjusting them.
_THRESHOLDS = ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "TOP_PAD", "MMAP_MAX")


@dataclass(frozen=True, slots=True)
class AllocatorInForce:
    """The library that serves ``malloc`` in this process.

    Attributes:
        kind: The allocator; ``"unknown"`` is musl, a sanitizer, or another one that modelguard does not know.
        path: Its file, as the dynamic linker names it. For the executable itself this is often just the command.
    """

    kind: Kind
    path: str


@dataclass(frozen=True, slots=True)
class AllocatorInfo:
    """The allocator of this process in detail. ``print()`` shows it as text.

    Attributes:
        kind: The allocator that serves ``malloc``; ``"unknown"`` is musl, a sanitizer, or another one that modelguard
            does not know.
        path: Its file.
        how: ``"preloaded"`` by ``LD_PRELOAD`` or ``/etc/ld.so.preload``, ``"linked"`` to the program as its C library
            is, or ``"static"``: a part of the program's own file.
        version: The version that it reports, such as ``"5.3.0"``; None if it reports none.
        python: The allocator of Python's objects of up to 512 bytes, in front of ``malloc``; ``PYTHONMALLOC`` chooses
            it.
        figures: Its figures; None if it reports none.
        problems: What is not as intended.
    """

    kind: Kind
    path: str
    how: How
    version: str | None
    python: SmallObjects
    figures: Figures | None
    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        version = "" if self.version is None else f" {self.version}"
        lines = [f"malloc: {self.kind}{version}, {self.how} ({self.path})", f"Python's small objects: {self.python}"]
        if self.figures is not None:
            lines.append(f"figures: {self.figures}")
        lines += [f"{problem.kind}: {problem.seen}. {problem.fix}" for problem in self.problems]
        return "\n".join(lines)


def detect(
    library: Library | None = None, *, root: Path = _proc.ROOT, environ: Mapping[str, str] = os.environ
) -> AllocatorInfo:
    """Describe the allocator of this process.

    Args:
        library: The file that serves ``malloc``. Default: the one that the dynamic linker names.
        root: The folder that holds ``proc`` and ``etc``.
        environ: The variables of this process as they are now.

    Returns:
        The allocator, how it was loaded, its version, its figures and its problems. Only functions of the file that
        serves ``malloc`` are called. This takes about a millisecond, plus about 20 for imports the first time. Under
        glibc it takes longer, the more free blocks there are.

    Raises:
        NotSupported: This is not Linux.
    """
    from modelguard.environment import _allocator_problems

    allocator = _serving(library)
    process = _allocator_problems.this_process(root)
    path = process.file_at(allocator.library.base) or allocator.library.path
    threads = [_allocator_problems.background_threads()] if allocator.has_threads() else []
    return AllocatorInfo(
        kind=allocator.kind,
        path=path,
        how=_allocator_problems.how(process, environ, path),
        version=allocator.version(),
        python=_allocator_problems.small_objects(),
        figures=allocator.figures(),
        problems=(*_allocator_problems.problems(process, environ, allocator.kind, path), *threads),
    )


def stats(library: Library | None = None) -> Figures:
    """Read the figures of the allocator that serves ``malloc``.

    Args:
        library: The file that serves ``malloc``. Default: the one that the dynamic linker names.

    Returns:
        The figures of the whole process.

    Raises:
        NotSupported: This is not Linux, or the allocator in force reports no figures: modelguard does not know it, or
            it is a glibc before 2.33, a jemalloc built without statistics, or a mimalloc before 1.7.
    """
    allocator = _serving(library)
    found = allocator.figures()
    if found is None:
        reason = f"{allocator.kind} ({allocator.library.path}) serves malloc and reports no figures"
        raise NotSupported("figures of the allocator", reason=reason)
    return found


def in_force(library: Library | None = None) -> AllocatorInForce:
    """Find the library that serves ``malloc``.

    Args:
        library: The file to recognise. Default: the one that the dynamic linker names.

    Returns:
        Its kind and path.

    Raises:
        NotSupported: This is not Linux.
    """
    allocator = _serving(library)
    return AllocatorInForce(allocator.kind, allocator.library.path)


def trim(library: Library | None = None, *, private: Callable[[], int] | None = None) -> int:
    """Return freed memory to the operating system.

    Allocators keep freed memory for the next request. This function makes the allocator in force return it: glibc by
    ``malloc_trim(0)``, jemalloc by a purge of all arenas, tcmalloc by ``MallocExtension_ReleaseFreeMemory``, mimalloc
    by ``mi_collect``. mimalloc returns whole free segments of 32 MB at once, and few of the free pages between blocks
    that are in use, whichever thread collects: of 200 MB in blocks of 8 kB, one in 200 of which is still in use, 2.0.9
    returned 0 - 1 MB, and 198 MB if ``MIMALLOC_RESET_DELAY=0`` was set when the program started.

    Args:
        library: The file that serves ``malloc``. Default: the one that the dynamic linker names.
        private: Reads private memory in bytes. Default: a fresh :func:`modelguard.memory.private`.

    Returns:
        Bytes returned: private memory before minus private memory after, or 0 if other threads took more meanwhile.

    Raises:
        NotSupported: This is not Linux, the allocator in force is unknown, or it refused. Nothing was returned.
    """
    allocator = _serving(library)
    private = private or (lambda: _memory.private(fresh=True))
    before = private()
    allocator.trim()
    return max(0, before - private())


def restart_threads(library: Library | None = None) -> None:
    """Make jemalloc start its background threads again: a forked child has none, whatever the setting is.

    Args:
        library: The file that serves ``malloc``. Default: the one that the dynamic linker names.

    Raises:
        NotSupported: jemalloc does not serve ``malloc`` here, or it refused.
    """
    _serving(library).restart_threads()


class Thresholds:
    """glibc's thresholds, kept low as long as models are loaded or released.

    As a program frees larger blocks, glibc takes blocks of up to 32 MB from the heap of the thread that asks, and keeps
    up to 64 MB that are free at the top of each heap. ``malloc_trim`` cuts the top of the main heap alone. So of a
    model in large blocks much stays where it was loaded, as often as there are loading threads. With low thresholds
    large blocks are mapped one by one, and go back when they are freed, also by another thread and later. Calls would
    pay for that with page faults; so between loads the thresholds are where glibc's own adjusting ends.
    """

    def __init__(self, library: Callable[[], Library | None]) -> None:
        self._library = library
        self._glibc = cache(self._adjustable)  # no cached_property: on 3.11 its lock would not survive a fork
        self._blocks = 0
        self._lock = threading.Lock()

    @contextmanager
    def low(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        if self._blocks:
            self._blocks = 0
            self._set(_USUAL)

    def _count(self, change: int) -> None:
        with self._lock:
            before = self._blocks
            self._blocks = max(0, before + change)  # the child of a fork in a block leaves it
            if not before or not self._blocks:
                self._set(_INITIAL if self._blocks else _USUAL)

    def _set(self, thresholds: tuple[int, int]) -> None:
        if (glibc := self._glibc()) is not None:
            for parameter, value in zip((_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD), thresholds, strict=True):
                glibc.call("mallopt", parameter, value)

    def _adjustable(self) -> Library | None:
        """The glibc that serves ``malloc``; None if it is another allocator, or if the user has set a threshold."""
        tunables = os.environ.get("GLIBC_TUNABLES", "")
        if any(f"MALLOC_{name}_" in os.environ or f"glibc.malloc.{name.lower()}" in tunables for name in _THRESHOLDS):
            return None
        library = self._library()
        if library is None or sys.maxsize < 2**32 or not library.exports("mallopt"):
            return None
        return library if in_force(library).kind == "glibc" else None


_thresholds = Thresholds(lambda: _serving().library if sys.platform.startswith("linux") else None)
fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_thresholds.after_fork_in_child)

#: A block in which what is freed goes back to the system: see :class:`Thresholds`.
returning = _thresholds.low


def _serving(library: Library | None = None) -> Allocator:
    if library is None and not sys.platform.startswith("linux"):
        reason = f"it requires Linux, and this is {sys.platform}"
        raise NotSupported("finding the library that serves malloc", reason=reason)
    from modelguard.environment import _linker  # imports ctypes, which takes 2 - 3 ms

    return _linker.recognise(library or _linker.malloc_library())
