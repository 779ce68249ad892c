"""The file that the dynamic linker takes ``malloc`` from, and its functions.

Apart from :mod:`modelguard.environment.allocator` because importing ctypes takes 2 - 3 ms, and only a
first trim needs it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, TypeAlias

__all__ = ["Argument", "MallocLibrary"]

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
        path: Its name as the dynamic linker tells it. For the executable itself this is often just the command.
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
        """Call one of its functions, and give what it returns (of no meaning for a ``void`` function).

        Args:
            name: A function that it exports.
            arguments: What it is given.
            returns: The type of what it returns.
        """
        # Looked up by index, a function is made anew each time, so its type is nobody else's.
        function = self._program[name]
        function.restype = returns
        return function(*map(_to_c, arguments))

    def _home(self, name: str) -> tuple[int | None, str]:
        """Where the file that a function comes from begins in memory, and its name."""
        info = _DlInfo()
        address = ctypes.cast(self._program[name], ctypes.c_void_p)
        self._program.dladdr(address, ctypes.byref(info))
        return info.dli_fbase, os.fsdecode(info.dli_fname or b"")


def _to_c(value: Argument) -> Any:
    if isinstance(value, bool):
        return ctypes.c_bool(value)
    if isinstance(value, int):
        return ctypes.c_size_t(value)
    if value is None or isinstance(value, bytes):
        return ctypes.c_char_p(value)
    return value
