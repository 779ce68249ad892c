"""The allocators' libraries on this machine, and whether a library may be preloaded.

A preloaded library runs inside the process, before any other code. So files that other users could have written are
rejected. Files that the dynamic linker would skip with only a line on stderr are rejected too.
"""

import mmap
import os
import re
import stat
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, NamedTuple, Protocol

from modelguard import _units
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

ProblemKind = Literal["placebo", "missing", "private copy", "two allocators", "background threads", "unused setting"]

_TCMALLOC = ("libtcmalloc_minimal", "libtcmalloc")


class _Known(NamedTuple):
    """What is known of an allocator's files."""

    kind: Kind
    name: str
    #: How the names of its normal builds begin: nobody should get a debugging or profiling build by accident.
    normal: tuple[str, ...] = ()
    package: str = ""


#: From best to worst, by what reloads leave behind: docs/design/decisions.md has the figures.
_KNOWN = (
    # Wheels that bundle a library put a hash into its name: libjemalloc-1a2b3c4d.so.2.
    _Known("jemalloc", r"libjemalloc(?:_pic)?(?:-[0-9a-f]+)?\.so[.\d]*", ("libjemalloc",), "libjemalloc2"),
    _Known("tcmalloc", r"libtcmalloc(?:_[a-z_]+)?(?:-[0-9a-f]+)?\.so[.\d]*", _TCMALLOC, "libtcmalloc-minimal4"),
    _Known("mimalloc", r"libmimalloc(?:-(?:secure|debug|[0-9a-f]+))*\.so[.\d]*", ("libmimalloc",), "libmimalloc2.0"),
    _Known("glibc", r"libc(?:\.so\.6|-2\.\d+\.so)"),
)

#: The packages of those that can be installed, in Debian and Ubuntu.
PACKAGES: Mapping[str, str] = {known.kind: known.package for known in _KNOWN if known.package}


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
        return ", ".join(f"{name} {_units.format_bytes(count)}" for name, count in known if count is not None)


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
    name = PurePath(path).name
    return next((known.kind for known in _KNOWN if re.fullmatch(known.name, name)), None)


# The little of ELF files (elf(5)) that tells whether a program can load a library, and where it keeps a variable.

_MAGIC = b"\x7fELF"
_BYTE_ORDERS = {1: "<", 2: ">"}  # ELFDATA2LSB, ELFDATA2MSB
_TYPES = {2: "program", 3: "library"}  # ET_EXEC, and ET_DYN, which a position-independent program is too
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_DT_NEEDED, _DT_STRTAB = 1, 5
_SHT_SYMTAB = 2

#: The names of the dynamic linkers of C libraries, and those of the libraries that others need. Alpine names musl's
#: library libc.musl-x86_64.so.1, and musl's own installation libc.so.
_C_LIBRARIES = {
    "musl": r"(?:^|/)ld-musl-|^libc\.musl-|^libc\.so$",
    "glibc": r"(?:^|/)ld(?:-linux[^/]*|64)\.so\.\d+$|^libc\.so\.6",
}


class NotElf(ValueError):
    """The file is not an ELF file, or is truncated."""


class ElfFile:
    """A file of 32 or 64 bits, in either byte order; only what is asked for is read."""

    def __init__(self, data: mmap.mmap) -> None:
        if data[:4] != _MAGIC or data[4] not in (1, 2) or data[5] not in _BYTE_ORDERS:
            raise NotElf("the file does not begin with an ELF header")
        self._data = data
        self._wide, self._order = data[4] == 2, _BYTE_ORDERS[data[5]]  # noqa: PLR2004 - ELFCLASS64
        self._word = "Q" if self._wide else "I"
        # Type, machine, version, entry, places of the two tables, flags, size of this header, and of the entries of the
        # tables their size and number each.
        header = self._unpack(f"HHI{self._word * 3}I5H", 16)
        self.type = _TYPES.get(header[0], "other")
        self.machine = self._wide, self._order, header[1]
        self._segment_table, self._section_table = (header[4], *header[8:10]), (header[5], *header[10:12])

    @property
    def c_library(self) -> str | None:
        """That which it was linked to; None if that is another one, or none, as in a static program."""
        names = (self.interpreter or "", *self.needed)
        found = (library for name in names for library, known in _C_LIBRARIES.items() if re.search(known, name))
        return next(found, None)

    @property
    def interpreter(self) -> str | None:
        """The dynamic linker of a program; None if it is statically linked, or a library."""
        return next((self._text(offset) for kind, offset, *_ in self._segments() if kind == _PT_INTERP), None)

    @property
    def needed(self) -> tuple[str, ...]:
        entries = list(self._dynamic())
        names = next((self._in_file(value) for tag, value in entries if tag == _DT_STRTAB), None)
        return () if names is None else tuple(self._text(names + value) for tag, value in entries if tag == _DT_NEEDED)

    def address_of(self, name: str) -> int | None:
        """The address of a variable relative to where the file is loaded, or of a thread's variable to its block.

        It need not be exported. None if there is none, or if the table of local names was stripped from the file.
        """
        headers = [*self._entries(self._section_table, f"II{self._word * 4}I")]
        for _, kind, _, _, begin, size, link in headers:
            if kind == _SHT_SYMTAB:
                names, length = headers[link][4:6]
                # Searched as bytes: such a table may have a million entries.
                text = self._data.find(b"\0" + name.encode() + b"\0", names, names + length)
                if text >= 0 and (found := self._symbol_named(begin, size, text + 1 - names)) is not None:
                    return found
        return None

    def _symbol_named(self, begin: int, size: int, text: int) -> int | None:
        needle, entry = struct.pack(f"{self._order}I", text), 24 if self._wide else 16
        at = self._data.find(needle, begin, begin + size)
        while at >= 0:
            if (at - begin) % entry == 0:
                # Elf64_Sym: name, info, other, section, value, size. Elf32_Sym: name, value, ...
                return self._unpack(self._word, at + (8 if self._wide else 4))[0]
            at = self._data.find(needle, at + 1, begin + size)
        return None

    def _dynamic(self) -> Iterator[tuple[int, int]]:
        """The tags and values of the dynamic section; none in a statically linked program."""
        entry = 16 if self._wide else 8
        for kind, offset, _, size in self._segments():
            for at in range(offset, offset + size, entry) if kind == _PT_DYNAMIC else ():
                tag, value = self._unpack(self._word * 2, at)
                if not tag:
                    return
                yield tag, value

    def _in_file(self, address: int) -> int:
        for kind, offset, start, size in self._segments():
            if kind == _PT_LOAD and start <= address < start + size:
                return address - start + offset
        raise NotElf(f"nothing is loaded at address {address:#x}")

    def _segments(self) -> Iterator[tuple[int, int, int, int]]:
        """The kind, offset, address and size of each."""
        # Elf64_Phdr: type, flags, offset, address, physical, size, ... Elf32_Phdr: type, offset, address, ...
        for kind, *_, offset, address, _, size in self._entries(self._segment_table, "IIQQQQ" if self._wide else "5I"):
            yield kind, offset, address, size

    def _entries(self, table: tuple[int, ...], code: str) -> Iterator[tuple[int, ...]]:
        start, size, count = table
        return (self._unpack(code, start + size * number) for number in range(count))

    def _unpack(self, code: str, at: int) -> tuple[int, ...]:
        return struct.unpack_from(f"{self._order}{code}", self._data, at)

    def _text(self, at: int) -> str:
        end = self._data.find(b"\0", at)
        if end < 0:
            raise NotElf("a name has no end")
        return self._data[at:end].decode(errors="surrogateescape")


@contextmanager
def opened(path: str | Path) -> Iterator[ElfFile]:
    """Map a file; in the ``with`` block :class:`NotElf` is raised where a part of it is missing, or is malformed."""
    with Path(path).open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise NotElf("the file is empty") from error
        with data:
            try:
                yield ElfFile(data)
            except (struct.error, IndexError, OverflowError) as error:  # reading beyond the end
                raise NotElf("the file is truncated or malformed") from error


def is_static(file: str) -> bool:
    """Whether a binary names no dynamic linker; False for what is not an ELF file, or cannot be read."""
    try:
        with opened(file) as program:
            return program.interpreter is None
    except (NotElf, OSError):
        return False


# The libraries of this machine, and whether one may be preloaded.

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
    if kind not in (None, "glibc", "unknown"):
        _units.one_of(kind, "kind", PACKAGES, what="allocator")
    found: dict[Path, AllocatorFile] = {}
    folders = [*_folders(root, environ)]
    for known in _KNOWN:
        files = (file for folder in folders for name in known.normal for file in _versions(folder, name))
        for file in files if kind in (None, known.kind) else ():
            if _why_unloadable(file, program) is None:
                path = str(PurePosixPath("/") / file.relative_to(root))
                found.setdefault(file.resolve(), AllocatorFile(known.kind, path))
    return tuple(found.values())


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
    _units.instance(path, argument, str | Path, "a path", fix="Give the full path of the library.")  # type: ignore[arg-type] # or
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
        with opened(library) as file:
            # Without a program to compare with, the dynamic linker decides.
            if (foreign := _why_foreign(file, program)) is not None:
                return foreign
            return None if file.type == "library" else "is not a shared library"
    except (NotElf, OSError):
        return "is not a shared library: it is not an ELF file"


def _why_foreign(library: ElfFile, program: Path) -> str | None:
    with suppress(NotElf, OSError), opened(program) as running:
        if library.machine != running.machine:
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
