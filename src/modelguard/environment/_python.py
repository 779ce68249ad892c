"""What serves Python's own small objects, in front of ``malloc``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from modelguard.environment._known import SmallObjects

__all__ = ["small_objects"]


_NAMES: dict[str, SmallObjects] = {"pymalloc": "pymalloc", "mimalloc": "mimalloc", "malloc": "malloc"}


def small_objects(name: str | None = None, environ: Mapping[str, str] = os.environ) -> SmallObjects:
    """Tell what serves Python's small objects.

    Args:
        name: What CPython says is set up, such as ``"pymalloc_debug"``, by default asked of it.
        environ: Where ``PYTHONMALLOC`` is found. It decides only where CPython does not tell.

    Returns:
        The allocator. Under ``"malloc"`` every object comes from the library that serves ``malloc``.
    """
    told = _NAMES.get((name or _told() or "").removesuffix("_debug"))
    if told is not None:
        return told
    # A profiler such as tracemalloc sits in front, and CPython does not say of what. pymalloc counts its blocks.
    if sys.getallocatedblocks():
        return "pymalloc"
    return "mimalloc" if environ.get("PYTHONMALLOC", "").startswith("mimalloc") else "malloc"


def _told() -> str | None:
    """What CPython says, None if it does not."""
    import ctypes

    name = getattr(ctypes.pythonapi, "_PyMem_GetCurrentAllocatorName", None)
    if name is None:
        return None
    name.restype = ctypes.c_char_p
    told = name()
    return None if told is None else str(told.decode())
