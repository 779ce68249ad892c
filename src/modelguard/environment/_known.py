"""What is said of allocators, and the names of their files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from modelguard._units import format_bytes

__all__ = ["Figures", "Found", "How", "Kind", "Problem", "SmallObjects", "kind_of"]

Kind = Literal["glibc", "jemalloc", "mimalloc", "tcmalloc", "unknown"]
How = Literal["preloaded", "linked", "static"]
SmallObjects = Literal["pymalloc", "mimalloc", "malloc"]

_NAMES: tuple[tuple[Kind, str], ...] = (
    ("glibc", r"libc(?:\.so\.6|-2\.\d+\.so)"),
    # Wheels that bring a library put a hash into its name: libjemalloc-1a2b3c4d.so.2.
    ("jemalloc", r"libjemalloc(?:_pic)?(?:-[0-9a-f]+)?\.so[.\d]*"),
    ("mimalloc", r"libmimalloc(?:-(?:secure|debug|[0-9a-f]+))*\.so[.\d]*"),
    ("tcmalloc", r"libtcmalloc(?:_[a-z_]+)?(?:-[0-9a-f]+)?\.so[.\d]*"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What an allocator says of itself, in bytes. A field is None where the allocator does not tell.

    Attributes:
        allocated: What the program holds: asked for, and not freed yet.
        active: The pages that hold it, with the holes between what is in use.
        resident: What the allocator has taken from the system and not given back. glibc and mimalloc count pages that
            were never touched, and glibc also those that a trim gave back, so there it is an upper bound.
        retained: ``resident`` less ``allocated``: freed memory that is kept for the next request, holes, and the
            allocator's own tables. (jemalloc has a figure of the same name for address space without memory; it is
            not that.)
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
    """Something about the allocator that is not as it was meant.

    Attributes:
        kind: One of ``"placebo"`` (a preload that is set and not in force), ``"missing"`` (a file to preload that is
            not there), ``"private copy"`` (an allocator that is loaded and serves malloc to nobody), ``"two
            allocators"`` (more than one preloaded), ``"background threads"`` (jemalloc's, which no forked child
            gets) and ``"unused setting"`` (``MALLOC_CONF`` without jemalloc).
        seen: The evidence, in one sentence.
        fix: What to do, in one sentence or two.
    """

    kind: str
    seen: str
    fix: str


@dataclass(frozen=True, slots=True)
class Found:
    """An allocator's library in a file.

    Attributes:
        kind: Which allocator its name says it is.
        path: Where it is.
    """

    kind: Kind
    path: str


def kind_of(path: str) -> Kind | None:
    """Tell an allocator by the name of its file.

    Args:
        path: A file, with or without its folder.

    Returns:
        The allocator, None if the name is that of none. A name proves nothing about who serves ``malloc``.
    """
    name = PurePath(path).name
    return next((kind for kind, pattern in _NAMES if re.fullmatch(pattern, name)), None)
