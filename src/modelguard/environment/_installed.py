"""The allocators' libraries on this machine, and whether a library may be preloaded.

A preloaded library runs as the process's own code, before anything else of it. So a file that others could have
written is refused, as is one that the dynamic linker would only skip with a line on stderr.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, get_args

from modelguard.environment._known import Found, Kind
from modelguard.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["check_preload", "find"]

#: From best to worst. With 200 lengths of input, eight small Conv1d layers and both oneDNN caches capped, a process
#: grew by 7, 7 and 14 MB, and by 2, 7 and 7 MB after a trim; jemalloc also tells most of itself.
_KINDS: tuple[Kind, ...] = ("jemalloc", "mimalloc", "tcmalloc")

# The plain builds: a debugging or profiling one is never wanted unasked.
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

# The start of an ELF file: magic, class (word size), byte order, ..., type, machine.
_MAGIC = b"\x7fELF"
_CLASS, _ORDER, _TYPE, _MACHINE = slice(4, 5), slice(5, 6), slice(16, 18), slice(18, 20)
_HEADER = 20
_LIBRARY = 3  # ET_DYN
_BYTE_ORDERS: dict[bytes, Literal["little", "big"]] = {b"\x01": "little", b"\x02": "big"}

#: The program that runs now. What it looks like, its libraries must look like.
_PROGRAM = Path("/proc/self/exe")

_SAFER = "Install it where only root may write, or take the right to write from group and others (chmod go-w)."
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def find(
    kind: Kind | None = None,
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    program: Path = _PROGRAM,
) -> tuple[Found, ...]:
    """Find the allocators' libraries that this machine could preload.

    Known are the folders of conda and virtual environments, of Debian and Ubuntu (where the file is
    ``/usr/lib/x86_64-linux-gnu/libjemalloc.so.2`` and has no shorter name), of Alpine, Fedora and Arch, and of
    Homebrew on Linux. Copies that packages bundle for themselves are left out, and so are files for another machine.

    Args:
        kind: The allocator to look for, by default all of them.
        root: Where the folders are found.
        environ: Names the environment by ``CONDA_PREFIX`` and ``VIRTUAL_ENV``, and Homebrew by ``HOMEBREW_PREFIX``.
        program: A program whose file tells what this machine's libraries look like, by default the one that runs now.

    Returns:
        What was found, best first. That is jemalloc, mimalloc, tcmalloc, and of each the file in the environment before
        the system's. :func:`check_preload` says whether a file is safe to preload. Empty for glibc, which is there
        without being preloaded, and away from Linux, whose dynamic linker alone knows ``LD_PRELOAD``.

    Raises:
        InvalidOption: There is no such allocator.
    """
    if kind not in (None, *get_args(Kind)):
        import difflib

        near = difflib.get_close_matches(str(kind), _KINDS, n=1)
        fix = f"Did you mean {near[0]!r}?" if near else f"Write one of {', '.join(_KINDS)}."
        raise InvalidOption("kind", kind, why="no allocator of this name is known", fix=fix)
    start = _start(program)
    wanted: list[tuple[str, Kind]] = [(name, each) for name, each in _FILES if kind in (None, each)]
    found: dict[Path, Found] = {}
    for folder in _folders(root, environ):
        for name, each in wanted:
            for file in _versions(folder, name):
                if _why_foreign(_start(file), start) is None:
                    found.setdefault(file.resolve(), Found(each, str(PurePosixPath("/") / file.relative_to(root))))
    return tuple(sorted(found.values(), key=lambda one: _KINDS.index(one.kind)))


def check_preload(path: str | Path, *, argument: str = "preload", program: Path = _PROGRAM) -> None:
    """Refuse a library that the dynamic linker would skip, or that others could have written.

    Args:
        path: The library.
        argument: The name of the caller's argument, for the error.
        program: A program whose file tells what this machine's libraries look like, by default the one that runs now.

    Raises:
        InvalidOption: It is not the full path of a shared library for this machine; or someone else than root and
            this user owns it or may write to it, to its folder or to a folder above. A library that lies right in a
            sticky folder such as ``/tmp`` is refused too.
    """
    why = _why_unusable(Path(path), program) or _why_unsafe(Path(path))
    if why is not None:
        reason, fix = why
        raise InvalidOption(argument, str(path), why=reason, fix=fix)


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

    Of one version, the name with one number such as ``.so.2`` comes first: it is what programs are linked to, and
    stays over upgrades.
    """
    files = (file for file in folder.glob(f"{name}.so*") if re.fullmatch(r".*\.so(?:\.\d+)*", file.name))
    return sorted(files, key=_rank)


def _rank(file: Path) -> tuple[int, bool, int]:
    numbers = [int(part) for part in file.name.partition(".so")[2].split(".") if part]
    return -(numbers[0] if numbers else 0), len(numbers) != 1, len(numbers)


def _start(file: Path) -> bytes:
    """The part of an ELF file that tells what it is for, empty if it cannot be read."""
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(_HEADER)
    return b""


def _why_foreign(library: bytes, program: bytes) -> str | None:
    """Why a file cannot be loaded by a program, by how both of them start."""
    if len(library) < _HEADER or not library.startswith(_MAGIC):
        return "it is not an ELF file, as shared libraries are"
    # Without a program to compare with, the dynamic linker has the last word.
    if program and any(library[part] != program[part] for part in (_CLASS, _ORDER, _MACHINE)):
        return "it was built for another kind of machine"
    if int.from_bytes(library[_TYPE], _BYTE_ORDERS[library[_ORDER]]) != _LIBRARY:
        return "it is not a shared library"
    return None


def _why_unusable(path: Path, program: Path) -> tuple[str, str] | None:
    name, installed = str(path), "modelguard's allocator.find() names what is installed."
    if not path.is_absolute():
        return (
            "it is not a full path, so each program would look for it elsewhere",
            "Give the full path of the library.",
        )
    if re.search(r"[\s:]", name):
        return "the dynamic linker takes blanks and colons for the end of a name", "Link to it under a plainer name."
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"it cannot be found ({error.strerror})", f"Correct the path; {installed}"
    if not stat.S_ISREG(mode):
        return "it is not a regular file", f"Name the library itself; {installed}"
    if not os.access(path, os.R_OK):
        return "this user may not read it", "Give the user that runs the service the right to read it."
    foreign = _why_foreign(_start(path), _start(program))
    return None if foreign is None else (foreign, f"Name a shared library for this machine; {installed}")


def _why_unsafe(path: Path) -> tuple[str, str] | None:
    file = path.resolve()
    # A name may be a link: who can write to the link's folder chooses the file.
    nearest = {path.parent, file.parent}
    for each in dict.fromkeys([file, *nearest, *path.parents, *file.parents]):
        state = each.stat()
        if state.st_uid not in (0, os.geteuid()):
            return f"{each} belongs to another user (number {state.st_uid})", _SAFER
        sticky = bool(state.st_mode & stat.S_ISVTX) and each not in nearest
        if state.st_mode & _OTHERS_WRITE and not sticky:
            return f"others may write to {each}", _SAFER
    return None
