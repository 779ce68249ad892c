"""Versions of models that a process shows to whoever reads its ``/proc``, such as ``modelguard top``.

Each is the name of a mapping of one page that is never touched, so it takes no memory. It ends with the process and
leaves no file behind, and a forked child, which has its parent's model, shows it too. The alternatives do less: servers
close descriptors when they start, files stay behind a crash, and the name of a thread has 15 characters.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import suppress

from modelguard.environment._mappings import MemoryMapping

__all__ = ["ShownVersion", "versions_in"]

_PREFIX = "modelguard:"
#: The kernel shows the name of a memory file with this in front.
_MEMORY_FILE = "/memfd:"
#: Bytes of a name of a memory file, from the kernel's mm/memfd.c: NAME_MAX less the prefix.
_LONGEST = 249


class ShownVersion:
    """What this process shows of one guard. Not thread safe.

    Args:
        guard: The guard's name.
    """

    def __init__(self, guard: str) -> None:
        self._guard = _printable(guard).replace("=", "-")
        self._version: str | None = None
        self._address = 0

    def show(self, version: str | None) -> None:
        """Show this version instead of the last one; None shows none. Does nothing where the system cannot."""
        if version == self._version:
            return
        self._version = version
        if self._address:
            _unmap(self._address)
            self._address = 0
        if version is not None and hasattr(os, "memfd_create"):
            with suppress(OSError):
                self._address = _map(f"{_PREFIX}{self._guard}={version}")


def versions_in(mappings: Iterable[MemoryMapping]) -> dict[str, str]:
    """The versions that a process shows, by the name of the guard."""
    found: dict[str, str] = {}
    for mapping in mappings:
        if mapping.name.startswith(_MEMORY_FILE + _PREFIX):
            guard, _, version = mapping.name.removeprefix(_MEMORY_FILE + _PREFIX).partition("=")
            found[_printable(guard)] = _printable(version)  # any program may name a memory file like this
    return found


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _map(name: str) -> int:
    import ctypes  # takes 2 - 3 ms, and only models with a version need it

    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    fd = os.memfd_create(name.encode()[:_LONGEST].decode(errors="ignore"), os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        # Not a mmap object, which would keep a descriptor that servers close behind its back.
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, 0)
    finally:
        os.close(fd)
    failed = ctypes.c_void_p(-1).value  # MAP_FAILED
    return 0 if address in {None, failed} else int(address)


def _unmap(address: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.munmap(address, mmap.PAGESIZE)
