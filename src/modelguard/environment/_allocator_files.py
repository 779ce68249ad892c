"""The allocators' libraries on this machine, and whether a library may be preloaded.

A preloaded library runs as the process's own code, before any other code of it. So a file that others could have
written is refused, and so is one that the dynamic linker would skip with no more than a line on stderr.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, get_args

from modelguard.environment import _elf, _proc
from modelguard.environment._allocator_kinds import AllocatorFile, Kind
from modelguard.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["check_preload", "find"]

#: From best to worst. With 200 lengths of input, eight small Conv1d layers and both oneDNN caches capped, a process
#: grew by 7, 7 and 14 MB, and by 2, 7 and 7 MB after a trim; jemalloc also reports the most figures.
_KINDS: tuple[Kind, ...] = ("jemalloc", "mimalloc", "tcmalloc")

# The plain builds: a debugging or profiling build is only used by choice.
_FILES: tuple[tuple[str, Kind], ...] = (
    ("libjemalloc", "jemalloc"),
    ("libmimalloc", "mimalloc"),
    ("libtcmalloc_minimal", "tcmalloc"),
    ("libtcmalloc", "tcmalloc"),
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

#: The program that runs now. Libraries must be built for the same kind of machine.
_PROGRAM = _proc.folder() / "exe"

_SAFER = "Install it where only root may write, or remove write permission for group and others (chmod go-w)."
_INSTALLED = "modelguard's allocator.find() lists what is installed."
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def find(
    kind: Kind | None = None,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    program: Path = _PROGRAM,
) -> tuple[AllocatorFile, ...]:
    """Find the allocators' libraries that this machine could preload.

    The search covers the folders of conda and virtual environments, of Debian and Ubuntu (where the file is
    ``/usr/lib/x86_64-linux-gnu/libjemalloc.so.2`` and has no shorter name), of Alpine, Fedora and Arch, and of
    Homebrew on Linux. Copies that packages bundle for themselves are left out, and so are files for another machine.

    Args:
        kind: The allocator to look for. Default: all of them.
        root: The folder in which the others are found.
        environ: Names the environment by ``CONDA_PREFIX`` and ``VIRTUAL_ENV``, and Homebrew by ``HOMEBREW_PREFIX``.
        program: A program that was built for this machine, to compare libraries with. Default: the running one.

    Returns:
        What was found, best first: jemalloc, mimalloc, tcmalloc, and of each the file in the environment before the
        system's. :func:`check_preload` says whether a file is safe to preload. Empty for glibc, which needs no
        preload, and on systems other than Linux, whose dynamic linkers have no ``LD_PRELOAD``.

    Raises:
        InvalidOption: There is no such allocator.
    """
    if kind not in (None, *get_args(Kind)):
        import difflib

        near = difflib.get_close_matches(str(kind), _KINDS, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else f"Write one of {', '.join(_KINDS)}."
        raise InvalidOption("kind", kind, why="there is no allocator of this name", fix=fix)
    wanted: list[tuple[str, Kind]] = [(name, each) for name, each in _FILES if kind in (None, each)]
    found: dict[Path, AllocatorFile] = {}
    for folder in _folders(root, environ):
        for name, each in wanted:
            for file in _versions(folder, name):
                if _why_unloadable(file, program) is None:
                    path = str(PurePosixPath("/") / file.relative_to(root))
                    found.setdefault(file.resolve(), AllocatorFile(each, path))
    return tuple(sorted(found.values(), key=lambda one: _KINDS.index(one.kind)))


def check_preload(path: str | Path, *, argument: str = "preload", program: Path = _PROGRAM) -> None:
    """Reject a library that the dynamic linker would skip, or that others could have written.

    Args:
        path: The library.
        argument: The name of the caller's argument, for the error.
        program: A program that was built for this machine, to compare the library with. Default: the running one.

    Raises:
        InvalidOption: It is not the full path of a shared library for this machine; or someone other than root and
            this user owns it or may write to it, to its folder or to a folder above. A library that lies directly in
            a sticky folder such as ``/tmp`` is rejected too.
    """
    refusal = _unusable(Path(path), program) or _unsafe(Path(path))
    if refusal is not None:
        why, fix = refusal
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

    Of one version, the name with one number such as ``.so.2`` comes first: programs are linked to it, and it stays
    over upgrades.
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
            if _is_foreign(file, program):
                return "it was built for another kind of machine"
            return None if file.type == "shared" else "it is not a shared library"
    except (_elf.NotElf, OSError):
        return "it is not an ELF file, as shared libraries are"


def _is_foreign(library: _elf.ElfFile, program: Path) -> bool:
    with suppress(_elf.NotElf, OSError), _elf.opened(program) as running:
        return not library.fits(running)
    return False


def _unusable(path: Path, program: Path) -> tuple[str, str] | None:
    """Why the dynamic linker would not load a file, and what to do."""
    if not path.is_absolute():
        why = "it is not a full path, so each program would look for it elsewhere"
        return why, "Give the full path of the library."
    if re.search(r"[\s:]", str(path)):
        why = "the dynamic linker takes blanks and colons for the end of a name"
        return why, "Link to it under a name without them."
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"it cannot be found ({error.strerror})", f"Correct the path; {_INSTALLED}"
    if not stat.S_ISREG(mode):
        return "it is not a regular file", f"Name the library itself; {_INSTALLED}"
    if not os.access(path, os.R_OK):
        return "this user may not read it", "Give the user that runs the service permission to read it."
    why_unloadable = _why_unloadable(path, program)
    return None if why_unloadable is None else (why_unloadable, f"Name a library for this machine; {_INSTALLED}")


def _unsafe(path: Path) -> tuple[str, str] | None:
    """Who else could have written a file, and what to do."""
    file = path.resolve()
    # A name may be a link: whoever can write to the link's folder chooses the file.
    nearest = {path.parent, file.parent}
    for each in dict.fromkeys([file, *nearest, *path.parents, *file.parents]):
        state = each.stat()
        if state.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to another user (number {state.st_uid})", _SAFER
        sticky = bool(state.st_mode & stat.S_ISVTX) and each not in nearest
        if state.st_mode & _OTHERS_WRITE and not sticky:
            return f"others may write to {each}", _SAFER
    return None
