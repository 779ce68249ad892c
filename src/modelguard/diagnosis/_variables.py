"""The environment variables that are kept of any service. No other variable's value is looked at or shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from modelguard.diagnosis._facts import Misspelt, Variable

__all__ = ["KNOWN", "THREAD_VARIABLES", "known_variables", "misspelt_variables"]

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
KNOWN = frozenset(
    {
        *THREAD_VARIABLES,
        "DNNL_PRIMITIVE_CACHE_CAPACITY",
        "GLIBC_TUNABLES",
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

#: What is read of each family of variables that decide on memory and threads, behind the family's first word. A name
#: that is close to one of them, and is none of them, is misspelt.
_READ = {
    "MALLOC_": "ARENA_MAX ARENA_TEST CHECK_ CONF MMAP_MAX_ MMAP_THRESHOLD_ PERTURB_ TOP_PAD_ TRACE TRIM_THRESHOLD_",
    "MIMALLOC_": "ABANDONED_PAGE_PURGE ABANDONED_PAGE_RESET ALLOW_DECOMMIT ALLOW_LARGE_OS_PAGES ARENA_EAGER_COMMIT "
    "ARENA_PURGE_MULT ARENA_RESERVE DECOMMIT_DELAY DECOMMIT_EXTEND_DELAY DISALLOW_ARENA_ALLOC DISALLOW_OS_ALLOC "
    "EAGER_COMMIT EAGER_COMMIT_DELAY EAGER_REGION_COMMIT LARGE_OS_PAGES LIMIT_OS_ALLOC MAX_ERRORS MAX_SEGMENT_RECLAIM "
    "MAX_WARNINGS OS_TAG PAGE_RESET PURGE_DECOMMITS PURGE_DELAY PURGE_EXTEND_DELAY RESERVE_HUGE_OS_PAGES "
    "RESERVE_HUGE_OS_PAGES_AT RESERVE_OS_MEMORY RESET_DECOMMITS RESET_DELAY RETRY_ON_OOM SEGMENT_CACHE SEGMENT_RESET "
    "SHOW_ERRORS SHOW_STATS TARGET_SEGMENTS_PER_THREAD USE_NUMA_NODES VERBOSE VISIT_ABANDONED",
    "TCMALLOC_": "AGGRESSIVE_DECOMMIT DISABLE_MEMORY_RELEASE HEAP_LIMIT_MB LARGE_ALLOC_REPORT_THRESHOLD "
    "MAX_PER_CPU_CACHE_SIZE MAX_TOTAL_THREAD_CACHE_BYTES OVERRIDE_PAGESIZE RELEASE_RATE SAMPLE_PARAMETER SKIP_MMAP "
    "SKIP_SBRK STACKTRACE_METHOD",
    "OMP_": "AFFINITY_FORMAT ALLOCATOR AVAILABLE_DEVICES CANCELLATION DEBUG DEFAULT_DEVICE DISPLAY_AFFINITY "
    "DISPLAY_ENV DYNAMIC "
    "MAX_ACTIVE_LEVELS MAX_TASK_PRIORITY NESTED NUM_TEAMS NUM_THREADS PLACES PROC_BIND SCHEDULE STACKSIZE "
    "TARGET_OFFLOAD TEAMS_THREAD_LIMIT THREAD_LIMIT TOOL TOOL_LIBRARIES TOOL_VERBOSE_INIT WAIT_POLICY",
    "MKL_": "CBWR DEBUG_CPU_TYPE DISABLE_FAST_MM DOMAIN_NUM_THREADS DYNAMIC ENABLE_INSTRUCTIONS FAST_MEMORY_LIMIT "
    "INTERFACE_LAYER NUM_STRIPES NUM_THREADS SERVICE_FORCE_INTEL THREADING_LAYER VERBOSE",
    "OPENBLAS_": "CORETYPE DEFAULT_NUM_THREADS MAIN_FREE NUM_THREADS THREAD_TIMEOUT VERBOSE",
    "ONEDNN_": "CPU_ISA_HINTS DEFAULT_FPMATH_MODE JIT_DUMP JIT_PROFILE MAX_CPU_ISA PRIMITIVE_CACHE_CAPACITY VERBOSE",
    "DNNL_": "CPU_ISA_HINTS DEFAULT_FPMATH_MODE JIT_DUMP JIT_PROFILE MAX_CPU_ISA PRIMITIVE_CACHE_CAPACITY VERBOSE",
    "PYTORCH_": "ALLOC_CONF CUDA_ALLOC_CONF HIP_ALLOC_CONF JIT NO_CUDA_MEMORY_CACHING NVML_BASED_CUDA_CHECK",
    "PYTHON": "ASYNCIODEBUG BREAKPOINT COERCECLOCALE DEBUG DEVMODE DONTWRITEBYTECODE DUMPREFS EXECUTABLE FAULTHANDLER "
    "HASHSEED HOME INSPECT INTMAXSTRDIGITS IOENCODING MALLOC MALLOCSTATS NODEBUGRANGES NOUSERSITE OPTIMIZE PATH "
    "PERFSUPPORT PLATLIBDIR PROFILEIMPORTTIME PYCACHEPREFIX SAFEPATH STARTUP TRACEMALLOC UNBUFFERED USERBASE UTF8 "
    "VERBOSE WARNDEFAULTENCODING WARNINGS",
    "PYTHON_": "BASIC_REPL COLORS CONTEXT_AWARE_WARNINGS CPU_COUNT DISABLE_REMOTE_DEBUG FROZEN_MODULES GIL HISTORY JIT "
    "LAZY_IMPORTS PERF_JIT_SUPPORT PRESITE PYMALLOC_HUGEPAGES THREAD_INHERIT_CONTEXT TLBC",
    "MODELGUARD_": "FREEZE IMMORTALIZE ON_HAZARD PROBE RUNTIME_DIR WARM_TIMEOUT",
    "": "GLIBC_TUNABLES GRPC_ENABLE_FORK_SUPPORT LD_PRELOAD LRU_CACHE_CAPACITY NUMEXPR_MAX_THREADS NUMEXPR_NUM_THREADS "
    "PROMETHEUS_MULTIPROC_DIR TOKENIZERS_PARALLELISM TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT CUDA_MODULE_LOADING",
}
#: Names that other programs read: CMake, Spark, Gradle and the like.
_OF_OTHERS = frozenset({"PYTHON_EXECUTABLE", "PYTHON_HOME", "PYTHON_PATH"})
_NAMES = tuple(f"{family}{name}" for family, names in _READ.items() for name in names.split())

#: The most letters that a misspelt name may differ by: two where a long name makes a coincidence unlikely.
_FAR, _LONG = 2, 14

#: From this length on, one wrong letter in a name's first word is a slip, and not another program's own prefix.
_WORD = 5


def known_variables(environ: Mapping[str, str], where: str) -> tuple[Variable, ...]:
    """Keep of an environment what modelguard knows."""
    return tuple(Variable(name, environ[name], "exec", where) for name in sorted(KNOWN & environ.keys()))


def misspelt_variables(environ: Mapping[str, str], where: str) -> Iterator[Misspelt]:
    """The names in an environment that nothing reads, and that one letter or two make into a name that is read.

    Only a value of digits is kept: of any other it is not known what it is.
    """
    for name in sorted(environ.keys() - {*_NAMES, *_OF_OTHERS}):
        meant = _meant(name)
        if meant is not None and meant not in environ:
            value = environ[name]
            yield Misspelt(name, meant, value if value.isascii() and value.isdecimal() else "", where)


def _meant(name: str) -> str | None:
    if name.rstrip("0123456789") in _NAMES:  # PYTHONPATH2: put aside, not misspelt
        return None
    near = [(distance, each) for each in _NAMES if (distance := _distance(name, each)) <= _allowed(name, each)]
    return min(near, default=(0, None))[1]


def _allowed(name: str, meant: str) -> int:
    first, first_meant = name.partition("_")[0], meant.partition("_")[0]
    if first == first_meant or sorted(first) == sorted(first_meant):
        return _FAR if len(meant) >= _LONG else 1
    return 1 if len(first_meant) >= _WORD and name[0] == meant[0] else 0


def _distance(one: str, other: str) -> int:
    """How many letters differ: inserted, left out, replaced, or exchanged with their neighbour."""
    if abs(len(one) - len(other)) > _FAR:
        return _FAR + 1
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                least = min(least, last[j - 2] + 1)
            row.append(least)
    return row[-1]
