"""The types that describe allocators, and the file names of their libraries."""

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal, Protocol

from modelguard._units import format_bytes

__all__ = ["AllocatorFile", "Figures", "How", "Kind", "Library", "Problem", "ProblemKind", "SmallObjects", "kind_of"]

#: ``"unknown"`` is musl, a sanitizer, or another allocator that modelguard does not know.
Kind = Literal["glibc", "jemalloc", "mimalloc", "tcmalloc", "unknown"]

#: ``"preloaded"`` by ``LD_PRELOAD`` or ``/etc/ld.so.preload``, ``"linked"`` to the program as its C library is, or
#: ``"static"``: a part of the program's own file.
How = Literal["preloaded", "linked", "static"]

#: The allocator of Python's objects of up to 512 bytes, in front of ``malloc``.
SmallObjects = Literal["pymalloc", "mimalloc", "malloc"]

#: ``"placebo"``: a preload that is set and not in force. ``"missing"``: a file to preload that does not exist.
#: ``"private copy"``: an allocator that is loaded but does not serve ``malloc``. ``"two allocators"``: more than one
#: is preloaded. ``"background threads"``: jemalloc's, which no forked child gets. ``"unused setting"``:
#: ``MALLOC_CONF`` without jemalloc.
ProblemKind = Literal["placebo", "missing", "private copy", "two allocators", "background threads", "unused setting"]

_FILE_NAMES: tuple[tuple[Kind, str], ...] = (
    ("glibc", r"libc(?:\.so\.6|-2\.\d+\.so)"),
    # Wheels that bundle a library put a hash into its name: libjemalloc-1a2b3c4d.so.2.
    ("jemalloc", r"libjemalloc(?:_pic)?(?:-[0-9a-f]+)?\.so[.\d]*"),
    ("mimalloc", r"libmimalloc(?:-(?:secure|debug|[0-9a-f]+))*\.so[.\d]*"),
    ("tcmalloc", r"libtcmalloc(?:_[a-z_]+)?(?:-[0-9a-f]+)?\.so[.\d]*"),
)


class Library(Protocol):
    """The file that serves ``malloc``."""

    path: str
    base: int | None

    def exports(self, name: str) -> bool:
        """Whether the function of this name comes from this file."""
        ...

    def call(self, name: str, *arguments: Any, returns: Any = ...) -> Any:
        """Call one of its functions."""
        ...


@dataclass(frozen=True, slots=True)
class Figures:
    """An allocator's figures about itself, in bytes. A field is None if the allocator does not report it.

    Attributes:
        allocated: Memory that the program has allocated and not freed yet.
        active: The pages that contain this memory, including the gaps between allocated blocks.
        resident: Memory that the allocator has taken from the system and not returned. glibc and mimalloc count pages
            that were never touched, and glibc also those that a trim has returned, so for them it is an upper bound.
        retained: ``resident`` minus ``allocated``: freed memory that is kept for the next request, gaps, and the
            allocator's own tables. (jemalloc has a figure of the same name for address space without memory; this is
            a different one.)
    """

    allocated: int | None
    active: int | None
    resident: int | None
    retained: int | None

    def __str__(self) -> str:
        known = ((name, getattr(self, name)) for name in self.__slots__)
        return ", ".join(f"{name} {format_bytes(count)}" for name, count in known if count is not None)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about the allocator that is not as intended.

    Attributes:
        kind: What is wrong: ``"placebo"`` (a preload that is set and not in force), ``"missing"`` (a file to preload
            that does not exist), ``"private copy"`` (an allocator that is loaded but does not serve ``malloc``),
            ``"two allocators"`` (more than one is preloaded), ``"background threads"`` (jemalloc's, which no forked
            child gets) or ``"unused setting"`` (``MALLOC_CONF`` without jemalloc).
        seen: The evidence, in one sentence.
        fix: What to do, in one or two sentences.
    """

    kind: ProblemKind
    seen: str
    fix: str


@dataclass(frozen=True, slots=True)
class AllocatorFile:
    """The library file of an allocator.

    Attributes:
        kind: The allocator, by the file's name.
        path: The file.
    """

    kind: Kind
    path: str


def kind_of(path: str) -> Kind | None:
    """Recognise an allocator by the name of its file.

    Args:
        path: A file, with or without its folder.

    Returns:
        The allocator; None for any other file. The name does not prove that the file serves ``malloc``.
    """
    name = PurePath(path).name
    return next((kind for kind, pattern in _FILE_NAMES if re.fullmatch(pattern, name)), None)
