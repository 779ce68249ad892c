"""What a process shows of its guards to whoever reads its ``/proc``, such as ``modelguard top``: versions and pauses.

Each is the name of a mapping of one page that is never touched, so it takes no memory. It ends with the process and
leaves no file behind, and a forked child, which has its parent's models and pauses, shows it too. The alternatives do
less: servers close descriptors when they start, files stay behind a crash, and the name of a thread has 15 characters.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from modelguard.environment._mappings import MemoryMapping

__all__ = ["ShownPause", "ShownVersion", "paused_in", "versions_in"]

_VERSION = "modelguard:"
_PAUSE = "modelguard-paused:"
#: The kernel shows the name of a memory file with this in front.
_MEMORY_FILE = "/memfd:"
#: Bytes of a name of a memory file, from the kernel's mm/memfd.c: NAME_MAX less the prefix.
_LONGEST = 249


class ShownVersion:
    """The version of one guard's model. Not thread safe.

    Args:
        guard: The guard's name.
    """

    def __init__(self, guard: str) -> None:
        self._guard = _printable(guard).replace("=", "-")
        self._text = _ShownText()

    def show(self, version: str | None) -> None:
        """Show this version instead of the last one; None shows none. Does nothing where the system cannot."""
        self._text.show(None if version is None else f"{_VERSION}{self._guard}={version}")


class ShownPause:
    """Whether one guard is paused. Not thread safe.

    Args:
        guard: The guard's name.
    """

    def __init__(self, guard: str) -> None:
        self._guard = _printable(guard)
        self._text = _ShownText()

    def show(self, *, paused: bool) -> None:
        """Show that it is paused, or show nothing. Does nothing where the system cannot."""
        self._text.show(f"{_PAUSE}{self._guard}" if paused else None)


def versions_in(mappings: Iterable[MemoryMapping]) -> dict[str, str]:
    """The versions that a process shows, by the name of the guard."""
    pairs = (text.partition("=") for text in _shown(mappings, _VERSION))
    return {_printable(guard): _printable(version) for guard, _, version in pairs}


def paused_in(mappings: Iterable[MemoryMapping]) -> tuple[str, ...]:
    """The names of the guards that a process shows as paused."""
    return tuple(sorted({_printable(guard) for guard in _shown(mappings, _PAUSE)}))


def _shown(mappings: Iterable[MemoryMapping], kind: str) -> Iterator[str]:
    """What stands behind this prefix. Any program may name a memory file like this."""
    prefix = _MEMORY_FILE + kind
    return (one.name.removeprefix(prefix) for one in mappings if one.name.startswith(prefix))


class _ShownText:
    """One text at a time."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._address = 0

    def show(self, text: str | None) -> None:
        """Show this text instead of the last one; None shows none."""
        if text == self._text:
            return
        self._text = text
        if self._address:
            _unmap(self._address)
            self._address = 0
        if text is not None and hasattr(os, "memfd_create"):
            with suppress(OSError):
                self._address = _map(text)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _map(name: str) -> int:
    import ctypes  # takes 2 - 3 ms, and only models with a version and paused guards need it

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
