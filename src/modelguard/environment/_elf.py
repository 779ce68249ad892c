"""The only module that reads ELF files: programs and shared libraries (elf(5)).

It reads 32-bit and 64-bit files in both byte orders, and only the parts that are needed, so large libraries cost
little. A truncated or malformed file raises :class:`NotElf`.
"""

from __future__ import annotations

import itertools
import mmap
import operator
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from modelguard.errors import CannotRun

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The content of the file: a shared library (or a position-independent program), or a program at a fixed address.
FileType: TypeAlias = Literal["shared", "fixed", "other"]

#: The C library that a file was linked to.
CLibrary: TypeAlias = Literal["glibc", "musl"]

_MAGIC = b"\x7fELF"
_WIDE = {1: False, 2: True}  # ELFCLASS32, ELFCLASS64
_BYTE_ORDERS: dict[int, Literal["<", ">"]] = {1: "<", 2: ">"}  # ELFDATA2LSB, ELFDATA2MSB
_TYPES: dict[int, FileType] = {2: "fixed", 3: "shared"}  # ET_EXEC, ET_DYN

#: The names of their dynamic linkers, and those of the libraries that others need. Alpine names musl's library
#: libc.musl-x86_64.so.1, and musl's own installation libc.so.
_C_LIBRARIES: tuple[tuple[CLibrary, str], ...] = (
    ("musl", r"(?:^|/)ld-musl-|^libc\.musl-|^libc\.so$"),
    ("glibc", r"(?:^|/)ld(?:-linux[^/]*|64)\.so\.\d+$|^libc\.so\.6"),
)

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_DT_NEEDED, _DT_STRTAB, _DT_SYMTAB, _DT_SONAME = 1, 5, 6, 14
_DT_RELA, _DT_RELASZ, _DT_REL, _DT_RELSZ = 7, 8, 17, 18
_DT_PLTRELSZ, _DT_PLTREL, _DT_JMPREL = 2, 20, 23
_UNDEFINED = 0  # SHN_UNDEF


class NotElf(ValueError):
    """The file is not an ELF file, or is truncated."""


class Segment(NamedTuple):
    """A program header.

    Attributes:
        kind: Its type, PT_LOAD and so on.
        offset: Where it begins in the file.
        address: Where it begins in memory, relative to the address at which the file is loaded.
        size: Bytes in the file.
    """

    kind: int
    offset: int
    address: int
    size: int


class Section(NamedTuple):
    """A section header.

    Attributes:
        kind: Its type, SHT_SYMTAB and so on.
        offset: Where it begins in the file.
        size: Bytes in the file.
        link: The number of a related section; for symbols the section with their names.
    """

    kind: int
    offset: int
    size: int
    link: int


class Symbol(NamedTuple):
    """A function or variable.

    Attributes:
        name: Its name for the linker: C++ names are mangled.
        value: Its address, relative to the address at which the file is loaded; for a thread-local variable its offset
            in the thread's block. In a program at a fixed address an undefined function may have an address too: its
            entry in the procedure linkage table, which calls the function of a library.
        defined: Whether this file defines it; otherwise another file must.
    """

    name: str
    value: int
    defined: bool


class Relocation(NamedTuple):
    """A place that the dynamic linker fills in.

    Attributes:
        offset: Its address, relative to the address at which the file is loaded.
        kind: Its type, which depends on the machine (R_X86_64_JUMP_SLOT and so on).
        symbol: The function or variable whose address is written there; empty if there is none.
        addend: A number that is added to that address; 0 if the place itself contains it.
    """

    offset: int
    kind: int
    symbol: str
    addend: int


@contextmanager
def opened(path: str | Path) -> Iterator[ElfFile]:
    """Map a file for reading, for the length of a ``with`` block.

    Args:
        path: The file.

    Raises:
        NotElf: It is not an ELF file, or a part that the block reads is missing.
        OSError: It cannot be read.
    """
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


class ElfFile:
    """An ELF file that :func:`opened` has mapped.

    Attributes:
        wide: Whether it is a 64-bit file.
        byte_order: In the notation of ``struct``: ``"<"`` for little-endian, ``">"`` for big-endian.
        machine: The number of the machine that it was built for (EM_X86_64 and so on).
        type: The content of the file.
    """

    def __init__(self, data: mmap.mmap) -> None:
        if data[:4] != _MAGIC or data[4] not in _WIDE or data[5] not in _BYTE_ORDERS:
            raise NotElf("the file does not begin with an ELF header")
        self._data = data
        self.wide = _WIDE[data[4]]
        self.byte_order = _BYTE_ORDERS[data[5]]
        kind, self.machine = self._unpack("HH", 16)
        self.type: FileType = _TYPES.get(kind, "other")

    def fits(self, other: ElfFile) -> bool:
        """Whether both were built for the same kind of machine, so that one can be loaded into the other."""
        return (self.wide, self.byte_order, self.machine) == (other.wide, other.byte_order, other.machine)

    @property
    def c_library(self) -> CLibrary | None:
        """The C library that it was linked to; None if that is another one, or none, as in a static program."""
        for name in (self.interpreter or "", *self.needed):
            for library, pattern in _C_LIBRARIES:
                if re.search(pattern, name):
                    return library
        return None

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The program headers."""
        offset, size, count = self._table(32 if self.wide else 28, 54 if self.wide else 42)
        return tuple(self._segment(offset + size * number) for number in range(count))

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The section headers; empty if they were stripped from the file."""
        offset, size, count = self._table(40 if self.wide else 32, 58 if self.wide else 46)
        return tuple(self._section(offset + size * number) for number in range(count))

    @property
    def interpreter(self) -> str | None:
        """The dynamic linker of a program; None if it is statically linked, or a library."""
        found = next((segment for segment in self.segments if segment.kind == _PT_INTERP), None)
        return None if found is None else self._text(found.offset)

    @cached_property
    def dynamic(self) -> tuple[tuple[int, int], ...]:
        """The tags and values of the dynamic section; empty in a statically linked program."""
        found = next((segment for segment in self.segments if segment.kind == _PT_DYNAMIC), None)
        if found is None:
            return ()
        code = "QQ" if self.wide else "II"
        size = struct.calcsize(f"{self.byte_order}{code}")
        entries = (self._unpack(code, found.offset + at) for at in range(0, found.size, size))
        return tuple((tag, value) for tag, value in itertools.takewhile(operator.itemgetter(0), entries))

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of the libraries that it needs, in the order in which they are searched for symbols."""
        return tuple(self._dynamic_text(value) for tag, value in self.dynamic if tag == _DT_NEEDED)

    @property
    def soname(self) -> str | None:
        """The name by which programs refer to this library."""
        name = self._tag(_DT_SONAME)
        return None if name is None else self._dynamic_text(name)

    def dynamic_symbols(self) -> Iterator[Symbol]:
        """The symbols that the dynamic linker sees: those that the file defines, and those that it needs."""
        for symbols, names in self._symbol_tables(_SHT_DYNSYM):
            size = struct.calcsize(self._symbol_code)
            for at in range(symbols.offset, symbols.offset + symbols.size, size):
                symbol = self._symbol(at, names.offset)
                if symbol.name:
                    yield symbol

    def local_symbol(self, name: str) -> Symbol | None:
        """Find a symbol in the table of all symbols, including those that the file does not export.

        Args:
            name: Its full name.

        Returns:
            The symbol; None if there is none, or if the table was stripped from the file.
        """
        for symbols, names in self._symbol_tables(_SHT_SYMTAB):
            # Searched as bytes: such a table may have a million entries.
            text = self._data.find(b"\0" + name.encode() + b"\0", names.offset, names.offset + names.size)
            if text >= 0:
                found = self._symbol_named(symbols, names, text + 1 - names.offset)
                if found is not None:
                    return found
        return None

    def relocations(self) -> Iterator[Relocation]:
        """The places that the dynamic linker fills in when it loads the file, or when a function is first called."""
        tables = [
            (self._tag(_DT_RELA), self._tag(_DT_RELASZ), True),
            (self._tag(_DT_REL), self._tag(_DT_RELSZ), False),
            (self._tag(_DT_JMPREL), self._tag(_DT_PLTRELSZ), self._tag(_DT_PLTREL) == _DT_RELA),
        ]
        for address, size, addends in tables:
            if address is not None and size:
                yield from self._relocation_table(self._file_offset(address), size, addends=addends)

    def _relocation_table(self, start: int, length: int, *, addends: bool) -> Iterator[Relocation]:
        code = ("QQq" if self.wide else "IIi") if addends else ("QQ" if self.wide else "II")
        for at in range(start, start + length, struct.calcsize(f"{self.byte_order}{code}")):
            offset, info, *addend = self._unpack(code, at)
            number, kind = (info >> 32, info & 0xFFFFFFFF) if self.wide else (info >> 8, info & 0xFF)
            yield Relocation(offset, kind, self._symbol_name(number), addend[0] if addend else 0)

    def _symbol_name(self, number: int) -> str:
        """The name of a dynamic symbol, by its index."""
        symbols = self._tag(_DT_SYMTAB)
        if not number or symbols is None:
            return ""
        at = self._file_offset(symbols) + number * struct.calcsize(self._symbol_code)
        return self._dynamic_text(self._unpack("I", at)[0])

    def _dynamic_text(self, offset: int) -> str:
        table = self._tag(_DT_STRTAB)
        return "" if table is None else self._text(self._file_offset(table) + offset)

    def _tag(self, tag: int) -> int | None:
        return next((value for found, value in self.dynamic if found == tag), None)

    def _file_offset(self, address: int) -> int:
        """The offset in the file of the byte that is loaded at an address."""
        for segment in self.segments:
            if segment.kind == _PT_LOAD and segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        raise NotElf(f"nothing is loaded at address {address:#x}")

    def _symbol_tables(self, kind: int) -> Iterator[tuple[Section, Section]]:
        """The symbol tables, each with the table of their names."""
        for section in self.sections:
            if section.kind == kind:
                yield section, self.sections[section.link]

    def _symbol_named(self, symbols: Section, names: Section, text: int) -> Symbol | None:
        """The symbol whose name is at this offset in the table of names."""
        needle = struct.pack(f"{self.byte_order}I", text)
        size, end = struct.calcsize(self._symbol_code), symbols.offset + symbols.size
        at = self._data.find(needle, symbols.offset, end)
        while at >= 0:
            if (at - symbols.offset) % size == 0:
                return self._symbol(at, names.offset)
            at = self._data.find(needle, at + 1, end)
        return None

    @property
    def _symbol_code(self) -> str:
        return f"{self.byte_order}{'IBBHQQ' if self.wide else 'IIIBBH'}"

    def _symbol(self, at: int, names: int) -> Symbol:
        fields = struct.unpack_from(self._symbol_code, self._data, at)
        # Elf64_Sym: name, info, other, section, value, size. Elf32_Sym: name, value, size, info, other, section.
        section, value = (fields[3], fields[4]) if self.wide else (fields[5], fields[1])
        return Symbol(self._text(names + fields[0]), value, section != _UNDEFINED)

    def _segment(self, at: int) -> Segment:
        # Elf64_Phdr: type, flags, offset, address, physical, size, ... Elf32_Phdr: type, offset, address, ...
        if self.wide:
            kind, _, offset, address, _, size = self._unpack("IIQQQQ", at)
        else:
            kind, offset, address, _, size = self._unpack("IIIII", at)
        return Segment(kind, offset, address, size)

    def _section(self, at: int) -> Section:
        # Elf64_Shdr and Elf32_Shdr: name, type, flags, address, offset, size, link, ...
        _, kind, _, _, offset, size, link = self._unpack("IIQQQQI" if self.wide else "IIIIIII", at)
        return Section(kind, offset, size, link)

    def _table(self, offset: int, size: int) -> tuple[int, int, int]:
        """Where a table of headers begins, the size of an entry, and how many there are."""
        (start,), (length, count) = self._unpack("Q" if self.wide else "I", offset), self._unpack("HH", size)
        return start, length, count

    def _unpack(self, code: str, at: int) -> tuple[int, ...]:
        return struct.unpack_from(f"{self.byte_order}{code}", self._data, at)

    def _text(self, at: int) -> str:
        end = self._data.find(b"\0", at)
        if end < 0:
            raise NotElf("a name has no end")
        return self._data[at:end].decode(errors="surrogateescape")


# The program that a command starts: its file, and whether ``LD_PRELOAD`` has an effect in it.


#: A shell's exit statuses for commands that cannot be executed or found (POSIX, Shell Command Language 2.8.2).
NOT_EXECUTABLE = 126
NOT_FOUND = 127

#: How many #! lines the kernel follows (fs/exec.c, exec_binprm), and how long such a line may be (BINPRM_BUF_SIZE).
_SCRIPTS = 5
_LINE = 256


def locate(command: str, environ: Mapping[str, str]) -> str:
    """Find the file of a command, as a shell does.

    Args:
        command: A path if it has a slash in it, otherwise a name to search in the folders of ``PATH``.
        environ: The variables, for ``PATH``.

    Returns:
        The file.

    Raises:
        CannotRun: There is none, or it is not executable.
    """
    # Strings, not Paths, which would change "./run" to "run": a script sees the name by which it was called.
    candidates = (
        [command] if os.sep in command else [f"{folder or '.'}/{command}" for folder in os.get_exec_path(environ)]
    )
    # Skip folders, and files that are not executable if an executable one follows.
    files = [candidate for candidate in candidates if Path(candidate).is_file()]
    for file in files:
        if os.access(file, os.X_OK):
            return file
    if files:
        fix = f"Make it executable (chmod +x), or start it through its interpreter, such as: python {files[0]}."
        raise CannotRun(command, why="is not executable", fix=fix, status=NOT_EXECUTABLE)
    if os.sep in command and Path(command).is_dir():
        raise CannotRun(command, why="is a folder", fix="Name a program.", status=NOT_EXECUTABLE)
    why = "does not exist" if os.sep in command else "was not found in any folder on PATH"
    raise CannotRun(command, why=why, fix=_fix_missing(command), status=NOT_FOUND)


def ignores_preload(
    path: str, *, starts_others: bool = False, user: int | None = None, group: int | None = None
) -> str | None:
    """Find out why ``LD_PRELOAD`` would have no effect in a program.

    Args:
        path: An executable file. For a script, its interpreter is checked.
        starts_others: Whether the effect in the programs that this one starts counts too. A static program ignores the
            variable, but passes it on.
        user: The id of the user that starts it. Default: that of this process.
        group: The id of the group. Default: that of this process.

    Returns:
        The reason as a clause; None if ``LD_PRELOAD`` works, or if the file cannot be read.

    Raises:
        CannotRun: The interpreter of a script is missing.
    """
    file = binary(path)
    if _is_privileged(file, os.getuid() if user is None else user, os.getgid() if group is None else group):
        return f"{file} runs with more privileges than its caller, so the dynamic linker ignores LD_PRELOAD"
    if not starts_others and is_static(file):
        return f"{file} is statically linked, so nothing reads LD_PRELOAD"
    return None


def _fix_missing(command: str) -> str:
    first = command.split(maxsplit=1)[:1]
    if first and first[0] != command:
        return f"Write it without quotes around the whole command: -- {command}"
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*=", command):
        return f"To set a variable, write env before it: -- env {command} ..."
    return "Correct the name, install it, or give its path."


def binary(path: str) -> str:
    """The binary that is executed in the end: for a script its interpreter, which may be a script itself.

    Args:
        path: An executable file.

    Raises:
        CannotRun: The interpreter of a script is missing.
    """
    file = path
    for _ in range(_SCRIPTS):
        line = _first_line(file)
        if not line.startswith(b"#!"):
            break
        words = re.match(rb"#![ \t]*([^ \t\n]*)", line)  # a carriage return is part of the name, as in the kernel
        interpreter = os.fsdecode(words[1]) if words else ""
        if not Path(interpreter).is_file():
            why = f"names an interpreter that does not exist: {interpreter!r}"
            fix = "Correct its first line, or install the interpreter."
            raise CannotRun(path, why=why, fix=fix, status=NOT_EXECUTABLE)
        file = interpreter
    return file


def _first_line(file: str) -> bytes:
    try:
        with Path(file).open("rb") as stream:
            return stream.readline(_LINE)
    except OSError:  # a file may be executable without being readable
        return b""


def _is_privileged(file: str, user: int, group: int) -> bool:
    """Whether the kernel starts it in what ld.so(8) calls secure-execution mode."""
    state = Path(file).stat()
    if state.st_mode & stat.S_ISUID and state.st_uid != user:
        return True
    # On a file that its group may not execute, the bit means mandatory locking.
    if state.st_mode & stat.S_ISGID and state.st_mode & stat.S_IXGRP and state.st_gid != group:
        return True
    return user != 0 and _has_capabilities(file)


def _has_capabilities(file: str) -> bool:
    try:
        return bool(os.getxattr(file, "security.capability"))
    except (OSError, AttributeError):  # the file has none, or the system does not support them
        return False


def is_static(file: str) -> bool:
    """Whether a binary names no dynamic linker; False for what is not an ELF file, or cannot be read."""
    try:
        with opened(file) as program:
            return program.interpreter is None
    except (NotElf, OSError):
        return False
