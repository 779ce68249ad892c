"""The calling thread's OpenMP settings: its number of threads, and its thread pool.

In the specification each thread has its own number of threads (``nthreads-var``, OpenMP 5.2 section 2.4), so the number
can be capped in one thread without any effect on others.
"""

from __future__ import annotations

import re
from typing import Any

from modelguard.environment import _proc

__all__ = ["cap_openmp", "end_openmp_pool", "loaded_openmp"]

_RUNTIME = re.compile(r"/lib(?:gomp|iomp5|omp)[-.][^/]*$")

#: ``omp_pause_soft``: settings made by ``omp_set_num_threads`` and similar functions stay.
_SOFT = 1


def cap_openmp(count: int) -> None:
    """Limit parallel regions that the calling thread starts to ``count`` threads.

    This changes only runtimes that the process has already loaded. There is none before torch or a similar library is
    imported, and none is found without ``/proc``.
    """
    for path in loaded_openmp():
        runtime = _open(path)
        if runtime is not None and runtime.omp_get_max_threads() > count:
            runtime.omp_set_num_threads(count)


def end_openmp_pool() -> None:
    """End the threads that wait for the calling thread's next parallel region.

    A thread that runs no more parallel regions should not leave them behind: GNU's runtime counts all its threads, and
    if there are more threads than cores, the threads of every pool spin less and sleep sooner. A MiniLM call took
    7.8 ms instead of 6.0 while a thread existed that had once loaded a model. This applies to GNU's runtime only, where
    each pool belongs to one thread (``omp_pause_resource_all``, OpenMP 5.0; other runtimes would end the pools of all
    threads).
    """
    for path in loaded_openmp():
        runtime = _open(path) if "/libgomp" in path else None
        if runtime is not None and hasattr(runtime, "omp_pause_resource_all"):
            runtime.omp_pause_resource_all(_SOFT)


def loaded_openmp() -> set[str]:
    """The files of the OpenMP runtimes that this process has loaded; empty without ``/proc``."""
    mappings = _proc.if_readable(_proc.maps) or ()
    return {mapping.name for mapping in mappings if _RUNTIME.search(mapping.name)}


def _open(path: str) -> Any:
    import ctypes

    try:
        runtime = ctypes.CDLL(path)
        return runtime if hasattr(runtime, "omp_set_num_threads") and hasattr(runtime, "omp_get_max_threads") else None
    except OSError:  # replaced on disk since it was loaded
        return None
