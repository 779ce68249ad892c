"""Which lines of Python allocate what stays: by memray, which sees native memory too, or else by tracemalloc."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["kept_by_line"]

_FRAMES = 1
_MOST = 20


def kept_by_line(run: Callable[[], int]) -> dict[str, Any]:
    """Run calls, and find what they have allocated and not freed. Calls become slower meanwhile.

    Args:
        run: Makes calls; returns how many.

    Returns:
        ``traced`` and ``native``, bytes per call by line; ``traced_calls``, their number; and ``traced_by``, the tool.
    """
    gc.collect()
    if importlib.util.find_spec("memray") is None:
        return _by_tracemalloc(run)
    try:
        return _by_memray(run)
    except (AttributeError, ImportError, OSError, RuntimeError):  # a folder of that name, or a profiler that is active
        return _by_tracemalloc(run)


def _by_tracemalloc(run: Callable[[], int]) -> dict[str, Any]:
    tracemalloc.start(_FRAMES)
    try:
        before = tracemalloc.take_snapshot()
        calls = run()
        gc.collect()
        changed = tracemalloc.take_snapshot().compare_to(before, "lineno")
    finally:
        tracemalloc.stop()
    grown = {
        f"{line.traceback[0].filename}:{line.traceback[0].lineno}": line.size_diff
        for line in changed
        if line.size_diff > 0 and line.traceback[0].filename not in (__file__, tracemalloc.__file__)
    }
    return {"traced": _per_call(grown, calls), "native": {}, "traced_calls": calls, "traced_by": "tracemalloc"}


def _by_memray(run: Callable[[], int]) -> dict[str, Any]:
    memray = importlib.import_module("memray")
    python: Counter[str] = Counter()
    native: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="modelguard-") as folder:
        file = Path(folder, "allocations")
        with memray.Tracker(file, trace_python_allocators=True):
            calls = run()
            gc.collect()
        for record in memray.FileReader(file).get_leaked_allocation_records(merge_threads=True):
            stack = record.stack_trace(max_stacks=_FRAMES)
            if stack and stack[0][1] != __file__:
                name = memray.AllocatorType(record.allocator).name
                (python if name.startswith("PYMALLOC") else native)[f"{stack[0][1]}:{stack[0][2]}"] += record.size
    found = {"traced": _per_call(python, calls), "native": _per_call(native, calls)}
    return {**found, "traced_calls": calls, "traced_by": "memray"}


def _per_call(sizes: Mapping[str, int], calls: int) -> dict[str, float]:
    """The lines that keep most, in bytes per call."""
    most = sorted(sizes.items(), key=lambda item: -item[1])[:_MOST]
    return {line: size / max(1, calls) for line, size in most}
