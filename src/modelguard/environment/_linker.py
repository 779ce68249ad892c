"""The dynamic linker's view of this process: the file that ``malloc`` comes from, and the files that are loaded.

Separate from :mod:`modelguard.environment._allocator` because importing ctypes takes 2 - 3 ms, and only the first trim
needs it.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Argument", "LoadedFile", "MallocLibrary", "loaded_files"]

#: Bytes go to C as ``char *``, bool as ``bool``, int as ``size_t``, None as a null pointer, ctypes' own as they are.
Argument: TypeAlias = Any


class _DlInfo(ctypes.Structure):
    """``Dl_info`` of dlfcn.h."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


class MallocLibrary:
    """The file that serves ``malloc`` in this process.

    Attributes:
        path: Its name as the dynamic linker gives it. For the executable itself this is often just the command.
        base: Where it begins in memory.
    """

    def __init__(self) -> None:
        # The scope of the whole program, searched in the order in which calls to malloc are bound.
        self._program = ctypes.CDLL(None)
        self.base, self.path = self._home("malloc")

    def exports(self, name: str) -> bool:
        """Whether the program's function of this name comes from the very file that serves ``malloc``."""
        return hasattr(self._program, name) and self._home(name)[0] == self.base

    def call(self, name: str, *arguments: Argument, returns: Any = ctypes.c_int) -> Any:
        """Call one of its functions, and return its result (meaningless for a ``void`` function).

        Args:
            name: A function that it exports.
            arguments: Its arguments.
            returns: The type of its result.
        """
        # Looked up by index, a function is made anew each time, so its type is used by nobody else.
        function = self._program[name]
        function.restype = returns
        return function(*map(_to_c, arguments))

    def _home(self, name: str) -> tuple[int | None, str]:
        """Where the file that a function comes from begins in memory, and its name."""
        info = _DlInfo()
        address = ctypes.cast(self._program[name], ctypes.c_void_p)
        self._program.dladdr(address, ctypes.byref(info))
        return info.dli_fbase, os.fsdecode(info.dli_fname or b"")


class LoadedFile(NamedTuple):
    """A program or library as the dynamic linker has loaded it.

    Its local variables can be read where they lie: a wheel's libraries keep the table of their local names
    (``.symtab``). They are only ever read.

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
            LookupError: The file does not say where the variable is.
            OSError: The file cannot be read.
        """
        return self._read(variable, self.base)

    def thread_static(self, variable: str) -> int | None:
        """Read the same from a ``static thread_local`` variable of the calling thread."""
        return self._read(variable, self.thread_base)

    def _read(self, variable: str, base: int | None) -> int | None:
        value, guard = _offset(self.path, variable), _offset(self.path, variable.replace("_ZZ", "_ZGVZ", 1))
        # The first byte of a guard variable says whether the other one has its value (Itanium C++ ABI, 3.3.3).
        if base is None or not ctypes.c_uint8.from_address(base + guard).value:
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


def loaded_files() -> list[LoadedFile]:
    """List what the dynamic linker has loaded, as the calling thread sees it."""
    found: list[LoadedFile] = []

    def note(info: ctypes._Pointer[_Info], _size: int, _data: int | None) -> int:
        loaded = info.contents
        path = (loaded.name or b"").decode(errors="surrogateescape")
        found.append(LoadedFile(path, loaded.address or 0, loaded.tls_data))
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_size_t, ctypes.c_void_p)
    # PyDLL keeps the GIL. A thread in dlopen could otherwise take it and wait for the lock that this call holds.
    ctypes.PyDLL(None).dl_iterate_phdr(kind(note), None)
    return found


@cache
def _offset(path: str, name: str) -> int:
    """Where a local variable lies, from where its file begins in memory, or from where the thread's block begins."""
    from modelguard.environment import _elf  # not needed by a trim

    try:
        with _elf.opened(path) as file:
            symbol = file.local_symbol(name)
    except _elf.NotElf as error:
        raise LookupError(name) from error
    if symbol is None:
        raise LookupError(name)
    return symbol.value


def _to_c(value: Argument) -> Any:
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    if isinstance(value, int):
        return ctypes.c_size_t(value)
    if value is None or isinstance(value, bytes):
        return ctypes.c_char_p(value)
    return value
