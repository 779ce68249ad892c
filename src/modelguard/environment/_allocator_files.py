"""The allocators' libraries on this machine, and whether a library may be preloaded.

A preloaded library runs inside the process, before any other code. So files that other users could have written are
rejected. Files that the dynamic linker would skip with only a line on stderr are rejected too.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, Protocol, get_args

from modelguard._units import format_bytes
from modelguard.environment import _elf
from modelguard.errors import InvalidOption
from modelguard.facts import _proc

# The types that describe allocators, and the file names of their libraries.


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


#: From best to worst. A guard that reloads 200 MB of 8 kB blocks, one in 200 of which survives, held 226, 244 and
#: 424 MB after 8 reloads, and its releases returned 205, 181 - 195 and 0 - 1 MB (jemalloc 5.3.0, tcmalloc 2.10,
#: mimalloc 2.0.9; glibc: 216 and 199 - 200 MB). With 200 lengths of input, eight small Conv1d layers and both oneDNN
#: caches capped, a process grew by 9, 15 and 8 MB, and by 4, 10 and 8 MB after a trim, at the same CPU time.
_KINDS: tuple[Kind, ...] = ("jemalloc", "tcmalloc", "mimalloc")

# Normal builds only: nobody should get a debugging or profiling build by accident.
_FILES: tuple[tuple[str, Kind], ...] = (
    ("libjemalloc", "jemalloc"),
    ("libtcmalloc_minimal", "tcmalloc"),
    ("libtcmalloc", "tcmalloc"),
    ("libmimalloc", "mimalloc"),
)

_SYSTEM = (
    "usr/local/lib",
    "usr/local/lib64",
    "usr/lib/*-linux-*",  # Debian and Ubuntu, one folder for each kind of machine
    "lib/*-linux-*",
    "usr/lib64",  # Fedora, SUSE
    "usr/lib",  # Alpine, Arch
    "lib",
    "home/linuxbrew/.linuxbrew/lib",
)

#: The running program. Libraries must be built for the same kind of machine and the same C library.
RUNNING = _proc.folder() / "exe"

_SAFER = "Install it where only root may write, or remove write permission for group and others (chmod go-w)."
_INSTALLED = "modelguard.allocator.find() lists the installed libraries."
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def find(
    kind: Kind | None = None,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    program: Path = RUNNING,
) -> tuple[AllocatorFile, ...]:
    """Find the allocators' libraries that can be preloaded on this machine.

    The search covers the folders of conda and virtual environments, of Debian and Ubuntu (where the file is
    ``/usr/lib/x86_64-linux-gnu/libjemalloc.so.2`` and has no shorter name), of Alpine, Fedora and Arch, and of
    Homebrew on Linux. It leaves out the private copies that packages bundle, and files for another kind of
    machine or another C library.

    Args:
        kind: The allocator to find. Default: all of them.
        root: The folder below which to search.
        environ: The variables ``CONDA_PREFIX``, ``VIRTUAL_ENV`` and ``HOMEBREW_PREFIX``.
        program: The program to preload them into. They must be built for the same kind of machine and the same C
            library. Default: the running one.

    Returns:
        The libraries, best first: jemalloc, tcmalloc, mimalloc, and for each allocator the file in the environment
        before the system's. :func:`check_preload` checks whether a file is safe to preload. Empty for glibc, which
        needs no preload, and on systems other than Linux, whose dynamic linkers have no ``LD_PRELOAD``.

    Raises:
        InvalidOption: ``kind`` is not a known allocator.
    """
    if kind not in (None, *get_args(Kind)):
        import difflib

        near = difflib.get_close_matches(str(kind), _KINDS, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else f"Write one of {', '.join(_KINDS)}."
        raise InvalidOption("kind", kind, why="is not a known allocator", fix=fix)
    wanted: list[tuple[str, Kind]] = [(name, each) for name, each in _FILES if kind in (None, each)]
    found: dict[Path, AllocatorFile] = {}
    for folder in _folders(root, environ):
        for name, each in wanted:
            for file in _versions(folder, name):
                if _why_unloadable(file, program) is None:
                    path = str(PurePosixPath("/") / file.relative_to(root))
                    found.setdefault(file.resolve(), AllocatorFile(each, path))
    return tuple(sorted(found.values(), key=lambda file: _KINDS.index(file.kind)))


def check_preload(path: str | Path, *, argument: str = "preload", program: Path = RUNNING) -> None:
    """Reject a library that the dynamic linker would skip, or that other users could have written.

    Args:
        path: The library.
        argument: The name of the caller's argument, for the error.
        program: The program to preload it into. It must be built for the same kind of machine and the same C library.
            Default: the running one.

    Raises:
        InvalidOption: It is not the full path of a shared library for this machine; or a user other than root and
            this one owns it or may write to it, to its folder or to a folder above. A library directly in a sticky
            folder such as ``/tmp`` is rejected too.
    """
    problem = _why_unusable(Path(path), program) or _why_unsafe(Path(path))
    if problem is not None:
        why, fix = problem
        raise InvalidOption(argument, str(path), why=why, fix=fix)


def _folders(root: Path, environ: Mapping[str, str]) -> Iterator[Path]:
    if not sys.platform.startswith("linux"):
        return
    for prefix in (environ.get("CONDA_PREFIX"), environ.get("VIRTUAL_ENV"), sys.prefix):
        if prefix:
            yield root / prefix.lstrip("/") / "lib"
    for pattern in _SYSTEM:
        yield from sorted(root.glob(pattern))
    if "HOMEBREW_PREFIX" in environ:
        yield root / environ["HOMEBREW_PREFIX"].lstrip("/") / "lib"


def _versions(folder: Path, name: str) -> list[Path]:
    """The files of a library in a folder, the newest first.

    Among the names of one version, the one with a single number such as ``.so.2`` comes first: programs are linked to
    it, and upgrades keep it.
    """
    files = (file for file in folder.glob(f"{name}.so*") if re.fullmatch(r".*\.so(?:\.\d+)*", file.name))
    return sorted(files, key=_rank)


def _rank(file: Path) -> tuple[int, bool, int]:
    numbers = [int(part) for part in file.name.partition(".so")[2].split(".") if part]
    return -(numbers[0] if numbers else 0), len(numbers) != 1, len(numbers)


def _why_unloadable(library: Path, program: Path) -> str | None:
    """Why a program cannot load a file; None if it can."""
    try:
        with _elf.opened(library) as file:
            # Without a program to compare with, the dynamic linker decides.
            if (foreign := _why_foreign(file, program)) is not None:
                return foreign
            return None if file.type == "shared" else "is not a shared library"
    except (_elf.NotElf, OSError):
        return "is not a shared library: it is not an ELF file"


def _why_foreign(library: _elf.ElfFile, program: Path) -> str | None:
    with suppress(_elf.NotElf, OSError), _elf.opened(program) as running:
        if not library.fits(running):
            return "was built for another kind of machine"
        own, other = library.c_library, running.c_library
        if own is not None and other is not None and own != other:
            return f"was built for another C library: it needs {own}, and the program runs on {other}"
    return None


def _why_unusable(path: Path, program: Path) -> tuple[str, str] | None:
    """Why the dynamic linker would not load a file, and what to do."""
    if not path.is_absolute():
        why = "must be a full path: each program would search for another file"
        return why, "Give the full path of the library."
    if re.search(r"[\s:]", str(path)):
        why = "must not contain spaces or colons, which end a name in LD_PRELOAD"
        return why, "Make a link to it under a name without them."
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"cannot be found ({error.strerror})", f"Correct the path; {_INSTALLED}"
    if not stat.S_ISREG(mode):
        return "is not a regular file", f"Name the library itself; {_INSTALLED}"
    if not os.access(path, os.R_OK):
        return "is not readable by this user", "Give the user that runs the service permission to read it."
    why_unloadable = _why_unloadable(path, program)
    return None if why_unloadable is None else (why_unloadable, f"Name a library for this machine; {_INSTALLED}")


def _why_unsafe(path: Path) -> tuple[str, str] | None:
    """Why another user could have written a file, and what to do."""
    file = path.resolve()
    # The path may be a link: users who can write to the link's folder choose the file.
    nearest = {path.parent, file.parent}
    for each in dict.fromkeys([file, *nearest, *path.parents, *file.parents]):
        state = each.stat()
        if state.st_uid not in (0, os.geteuid()):
            return f"is not safe: {each} belongs to another user (id {state.st_uid})", _SAFER
        sticky = bool(state.st_mode & stat.S_ISVTX) and each not in nearest
        if state.st_mode & _OTHERS_WRITE and not sticky:
            return f"is not safe: other users may write to {each}", _SAFER
    return None
