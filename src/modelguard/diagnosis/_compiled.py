"""Machine code that libraries have compiled at run time, as oneDNN does for each input shape."""

from __future__ import annotations

from collections.abc import Iterable

from modelguard.environment import _proc
from modelguard.environment._mappings import MemoryMapping

__all__ = ["compiled", "compiled_in"]


def compiled(pid: int | None = None) -> int:
    """Bytes of machine code that a process has compiled and written.

    Args:
        pid: The process. Default: this one.
    """
    return compiled_in(_proc.if_readable(_proc.smaps, pid) or [])


def compiled_in(mappings: Iterable[MemoryMapping]) -> int:
    """The same in these mappings: executable memory without a file. Address space that was only reserved is none."""
    return sum(
        mapping.sizes.get("Private_Dirty", 0) + mapping.sizes.get("Shared_Dirty", 0)
        for mapping in mappings
        if "x" in mapping.access and not mapping.is_file and not mapping.name.startswith("[v")  # [vdso], [vsyscall]
    )
