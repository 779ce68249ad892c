"""OpenMP's thread count of the calling thread.

The specification makes it a per-thread setting (``nthreads-var``, OpenMP 5.2 section 2.4), so one thread can be
capped while all others keep theirs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_RUNTIME = re.compile(r"/.*/lib(?:gomp|iomp5|omp)[-.][^/\n]*$", re.MULTILINE)


def cap_openmp(count: int) -> list[tuple[Any, int]]:
    """Let parallel regions that the calling thread starts use at most ``count`` threads.

    Only runtimes that this process has already loaded are touched; there is none before torch or the like is imported,
    and none is found where ``/proc`` is missing.

    Returns:
        What :func:`restore_openmp` needs.
    """
    found = []
    for path in loaded_openmp():
        runtime = _open(path)
        if runtime is not None:
            before = runtime.omp_get_max_threads()
            if before > count:
                runtime.omp_set_num_threads(count)
                found.append((runtime, before))
    return found


def restore_openmp(found: list[tuple[Any, int]]) -> None:
    """Undo :func:`cap_openmp` in the same thread."""
    for runtime, before in found:
        runtime.omp_set_num_threads(before)


def loaded_openmp() -> set[str]:
    """The files of the OpenMP runtimes that this process has loaded; none where ``/proc`` is missing."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return set()
    return set(_RUNTIME.findall(maps))


def _open(path: str) -> Any:
    import ctypes

    try:
        runtime = ctypes.CDLL(path)
        return runtime if hasattr(runtime, "omp_set_num_threads") and hasattr(runtime, "omp_get_max_threads") else None
    except OSError:  # replaced on disk since it was loaded
        return None
