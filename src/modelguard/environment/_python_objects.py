"""Which allocator serves Python's own small objects, in front of ``malloc``."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache

from modelguard.environment._allocator_kinds import SmallObjects

__all__ = ["in_use", "small_objects"]

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


def in_use() -> int | None:
    """Bytes that pymalloc has handed out, None if it does not serve small objects.

    CPython tells them only as text, as ``sys._debugmallocstats`` prints it. It counts pools of 16 KB, not objects: that
    takes about a millisecond for 300 MB.
    """
    report = _report()
    found = None if report is None else re.search(rb"# bytes in allocated blocks +=\s+([0-9,]+)", report())
    return None if found is None else int(found[1].replace(b",", b""))


@cache
def _report() -> Callable[[], bytes] | None:
    """What writes the figures of pymalloc; None where it cannot be asked."""
    import ctypes

    c = ctypes.CDLL(None)
    if not hasattr(ctypes.pythonapi, "_PyObject_DebugMallocStats") or not hasattr(c, "open_memstream"):
        return None
    c.open_memstream.restype = ctypes.c_void_p

    def report() -> bytes:
        text, size = ctypes.c_void_p(), ctypes.c_size_t()
        stream = c.open_memstream(ctypes.byref(text), ctypes.byref(size))
        if stream is None:
            return b""
        ctypes.pythonapi._PyObject_DebugMallocStats(ctypes.c_void_p(stream))  # noqa: SLF001 - see above
        c.fclose(ctypes.c_void_p(stream))
        written = ctypes.string_at(text, size.value)
        c.free(text)
        return written

    return report


def _reported() -> str | None:
    """The allocator that CPython reports; None if it reports none."""
    import ctypes

    name = getattr(ctypes.pythonapi, "_PyMem_GetCurrentAllocatorName", None)
    if name is None:
        return None
    name.restype = ctypes.c_char_p
    found = name()
    return None if found is None else str(found.decode())
