"""Which lines of Python allocate what stays: by memray, which sees native memory too, or else by tracemalloc."""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["kept_by_line"]

_FRAMES = 1
_MOST = 20
#: Bytes above which Python asks malloc for an object.
_SMALL = 512
#: A line that keeps fewer blocks for each call has resized a container, which is older than what is traced.
_OFTEN = 0.02


def kept_by_line(run: Callable[[], int]) -> dict[str, Any]:
    """Run calls, and find what they have allocated and not freed. Calls become slower meanwhile.

    Args:
        run: Makes calls; returns how many.

    Returns:
        ``traced`` and ``native``, bytes per call by line; ``large``, those of Python objects for which malloc is asked;
        ``traced_calls``, the number of calls; and ``traced_by``, the tool.
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
        calls = run()
        gc.collect()
        kept = tracemalloc.take_snapshot().traces  # nothing from before is traced
    finally:
        tracemalloc.stop()
    grown: Counter[str] = Counter()
    large: dict[str, _Blocks] = defaultdict(_Blocks)
    for each in kept:
        place = each.traceback[0]
        if place.filename not in (__file__, tracemalloc.__file__):
            line = f"{place.filename}:{place.lineno}"
            grown[line] += each.size
            if each.size > _SMALL:
                large[line].add(1, each.size)
    return _found(grown, {}, large, calls, "tracemalloc")


def _by_memray(run: Callable[[], int]) -> dict[str, Any]:
    memray = importlib.import_module("memray")
    python: Counter[str] = Counter()
    native: Counter[str] = Counter()
    large: dict[str, _Blocks] = defaultdict(_Blocks)
    with tempfile.TemporaryDirectory(prefix="modelguard-") as folder:
        file = Path(folder, "allocations")
        with memray.Tracker(file, trace_python_allocators=True):
            calls = run()
            gc.collect()
        for record in memray.FileReader(file).get_leaked_allocation_records(merge_threads=True):
            stack = record.stack_trace(max_stacks=_FRAMES)
            if stack and stack[0][1] != __file__:
                line = f"{stack[0][1]}:{stack[0][2]}"
                of_python = memray.AllocatorType(record.allocator).name.startswith("PYMALLOC")
                (python if of_python else native)[line] += record.size
                if of_python and record.size > _SMALL * record.n_allocations:
                    large[line].add(record.n_allocations, record.size)
    return _found(python, native, large, calls, "memray")


class _Blocks:
    """How many blocks a line keeps, and of how many bytes."""

    def __init__(self) -> None:
        self.count = self.size = 0

    def add(self, count: int, size: int) -> None:
        self.count += count
        self.size += size


def _found(
    python: Mapping[str, int], native: Mapping[str, int], large: Mapping[str, _Blocks], calls: int, tool: str
) -> dict[str, Any]:
    often = [blocks.size for blocks in large.values() if blocks.count >= _OFTEN * calls]
    return {
        "traced": _per_call(python, calls),
        "native": _per_call(native, calls),
        "large": sum(often) / max(1, calls),
        "traced_calls": calls,
        "traced_by": tool,
    }


def _per_call(sizes: Mapping[str, int], calls: int) -> dict[str, float]:
    """The lines that keep most, in bytes per call."""
    most = sorted(sizes.items(), key=lambda item: -item[1])[:_MOST]
    return {line: size / max(1, calls) for line, size in most}
