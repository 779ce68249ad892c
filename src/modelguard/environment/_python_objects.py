"""Which allocator serves Python's own small objects, in front of ``malloc``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from modelguard.environment._allocator_kinds import SmallObjects

__all__ = ["small_objects"]

_NAMES: dict[str, SmallObjects] = {"pymalloc": "pymalloc", "mimalloc": "mimalloc", "malloc": "malloc"}


def small_objects(name: str | None = None, environ: Mapping[str, str] = os.environ) -> SmallObjects:
    """Find the allocator of Python's small objects.

    Args:
        name: The allocator that CPython reports, such as ``"pymalloc_debug"``. Default: ask CPython.
        environ: The variables with ``PYTHONMALLOC``, which is used only if CPython reports nothing.

    Returns:
        The allocator. ``"malloc"`` means that every object comes from the library that serves ``malloc``.
    """
    known = _NAMES.get((name or _reported() or "").removesuffix("_debug"))
    if known is not None:
        return known
    # A profiler such as tracemalloc hides the allocator behind it. Only pymalloc counts its blocks.
    if sys.getallocatedblocks():
        return "pymalloc"
    return "mimalloc" if environ.get("PYTHONMALLOC", "").startswith("mimalloc") else "malloc"


def _reported() -> str | None:
    """The allocator that CPython reports; None if it reports none."""
    import ctypes

    name = getattr(ctypes.pythonapi, "_PyMem_GetCurrentAllocatorName", None)
    if name is None:
        return None
    name.restype = ctypes.c_char_p
    found = name()
    return None if found is None else str(found.decode())
