"""The environment variables that are kept of any service. No other variable's value is looked at or shown."""

from __future__ import annotations

from collections.abc import Mapping

from modelguard.diagnosis._facts import Variable

__all__ = ["KNOWN", "THREAD_VARIABLES", "known_variables"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KNOWN = frozenset(
    {
        *THREAD_VARIABLES,
        "DNNL_PRIMITIVE_CACHE_CAPACITY",
        "LD_PRELOAD",
        "LRU_CACHE_CAPACITY",
        "MALLOC_ARENA_MAX",
        "MALLOC_CONF",
        "MALLOC_MMAP_THRESHOLD_",
        "MALLOC_TRIM_THRESHOLD_",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
        "PROMETHEUS_MULTIPROC_DIR",
        "PYTHONMALLOC",
        "PYTHON_PYMALLOC_HUGEPAGES",
    }
)


def known_variables(environ: Mapping[str, str], where: str) -> tuple[Variable, ...]:
    """Keep of an environment what modelguard knows."""
    return tuple(Variable(name, environ[name], "exec", where) for name in sorted(KNOWN & environ.keys()))
