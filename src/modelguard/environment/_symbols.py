"""Variables inside a loaded library that it does not export, read where they lie.

oneDNN offers no way to ask whether its cache exists without making it: the question itself reads the environment. But
a wheel's libraries keep the table of their local names (``.symtab``), which tells where the cache's own variables are.
They are only ever read.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Image", "images"]

_ELF64_LITTLE = b"\x7fELF\x02\x01"
_SYMTAB = 2
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr: name, type, flags, address, offset, size, link, ...


class Image(NamedTuple):
    """One file as the dynamic linker has loaded it.

    Attributes:
        path: The file.
        base: Where its addresses begin.
        thread_base: Where the calling thread's own variables of this file begin; None where it has none yet.
    """

    path: str
    base: int
    thread_base: int | None

    def static(self, variable: str) -> int | None:
        """Read a whole number that a function keeps in a ``static`` variable.

        Args:
            variable: Its mangled name, ``_ZZ...``.

        Returns:
            The number; None where the function has not run yet.

        Raises:
            LookupError: The file does not tell where the variable is.
            OSError, ValueError, struct.error: It cannot be read, or is not what it seems.
        """
        return self._read(variable, self.base)

    def thread_static(self, variable: str) -> int | None:
        """Read the same for a ``static thread_local`` variable of the calling thread."""
        return self._read(variable, self.thread_base)

    def _read(self, variable: str, base: int | None) -> int | None:
        value, made = _offset(self.path, variable), _offset(self.path, variable.replace("_ZZ", "_ZGVZ", 1))
        # The first byte of a guard variable tells whether the other has been given its value (Itanium C++ ABI, 3.3.3).
        if base is None or not ctypes.c_uint8.from_address(base + made).value:
            return None
        return ctypes.c_int32.from_address(base + value).value


class _Info(ctypes.Structure):
    """``struct dl_phdr_info`` of link.h."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("header_count", ctypes.c_uint16),
        ("added", ctypes.c_ulonglong),
        ("removed", ctypes.c_ulonglong),
        ("tls_module", ctypes.c_size_t),
        ("tls_data", ctypes.c_void_p),
    )


def images() -> list[Image]:
    """List what the dynamic linker has loaded, as the calling thread sees it."""
    found: list[Image] = []

    def note(info: ctypes._Pointer[_Info], _size: int, _data: int | None) -> int:
        loaded = info.contents
        found.append(Image((loaded.name or b"").decode(errors="surrogateescape"), loaded.address or 0, loaded.tls_data))
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_size_t, ctypes.c_void_p)
    # PyDLL keeps the GIL. Given away, it could be with a thread in dlopen that waits for the lock which this holds.
    ctypes.PyDLL(None).dl_iterate_phdr(kind(note), None)
    return found


@cache
def _offset(path: str, name: str) -> int:
    """Where a local variable lies, counted from where its file begins in memory (or in a thread's own block)."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for symbols, names in _tables(data):
            at = data.find(b"\0" + name.encode() + b"\0", names.start, names.stop)
            if at >= 0:
                for entry in _entries(data, symbols, at + 1 - names.start):
                    return entry
    raise LookupError(name)


def _tables(data: mmap.mmap) -> Iterator[tuple[range, range]]:
    """Where the table of all symbols is, and that of their names."""
    if data[: len(_ELF64_LITTLE)] != _ELF64_LITTLE:
        return
    start = struct.unpack_from("<Q", data, 0x28)[0]
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [_SECTION.unpack_from(data, start + number * size) for number in range(count)]
    for section in sections:
        if section[1] == _SYMTAB:
            yield _extent(section), _extent(sections[section[6]])


def _extent(section: tuple[int, ...]) -> range:
    return range(section[4], section[4] + section[5])


def _entries(data: mmap.mmap, symbols: range, name: int) -> Iterator[int]:
    """The values of the symbols with this name, which is told by its place in the table of names."""
    needle = struct.pack("<I", name)
    at = data.find(needle, symbols.start, symbols.stop)
    while at >= 0:
        if (at - symbols.start) % _SYMBOL.size == 0:
            yield _SYMBOL.unpack_from(data, at)[4]
        at = data.find(needle, at + 1, symbols.stop)
