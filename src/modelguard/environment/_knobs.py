"""Environment variables that determine how much memory and how many threads a process uses, as data.

Each knob states when its variable is read, because this determines whether it can still be set: a variable that is set
after its reader has read it silently has no effect.
"""

import re
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from modelguard import _units
from modelguard.errors import InvalidOption

# How libraries read the values of their variables, and which they do not understand.
#
# Torch's two libraries for convolutions read the capacities of their caches from variables, both by C's ``atoi``: what
# follows a number is ignored, and text without a number is 0. Measured with torch 2.13 on x86-64.


ONEDNN = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
IDEEP = "LRU_CACHE_CAPACITY"
GLIBC = ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

#: oneDNN reads the value into a buffer of this size, and ignores a value that does not fit (src/common/utils.cpp).
_ONEDNN_BUFFER = 12

#: jemalloc's options, 4.0 to 5.3. It skips a pair that it does not know, and after a malformed one all the rest.
_SWITCHES = (
    "abort abort_conf background_thread cache_oblivious confirm_conf experimental_infallible_new hpa junk munmap "
    "prof prof_accum prof_active prof_final prof_gdump prof_leak prof_leak_error prof_stats prof_sys_thread_name "
    "prof_thread_active_init redzone retain stats_print tcache trust_madvise utrace xmalloc zero"
)
_OTHERS = (
    "bin_shards debug_double_free_max_scan dirty_decay_ms dss hpa_dehugification_threshold hpa_dirty_mult "
    "hpa_hugification_threshold hpa_hugification_threshold_ratio hpa_hugify_delay_ms hpa_min_purge_interval_ms "
    "hpa_sec_batch_fill_extra hpa_sec_bytes_after_flush "
    "hpa_sec_max_alloc hpa_sec_max_bytes hpa_sec_nshards hpa_slab_max_alloc lg_chunk lg_dirty_mult "
    "lg_extent_max_active_fit lg_prof_interval lg_prof_sample lg_san_uaf_align lg_tcache_flush_large_div "
    "lg_tcache_flush_small_div lg_tcache_max lg_tcache_nslots_mul max_background_threads metadata_thp muzzy_decay_ms "
    "mutex_max_spin narenas oversize_threshold percpu_arena prof_bt_max prof_prefix prof_recent_alloc_max "
    "prof_time_resolution prof_unbias purge quarantine san_guard_large san_guard_small slab_sizes stats_interval "
    "stats_interval_opts stats_print_opts tcache_gc_delay_bytes tcache_gc_incr_bytes tcache_max tcache_ncached_max "
    "tcache_nslots_large tcache_nslots_small_max tcache_nslots_small_min thp zero_realloc decay_time"
)
_YES_OR_NO = frozenset(_SWITCHES.split())
_OPTIONS = _YES_OR_NO | frozenset(_OTHERS.split())

_NUMBERS = re.compile(r"lg_\w+|\w+_ms|max_background_threads|mutex_max_spin|narenas|oversize_threshold|tcache_max")

#: OpenMP takes a number for each level of nested regions, and libgomp and libiomp5 allow blanks.
_LEVELS = re.compile(r"\s*\+?0*[1-9]\d*\s*(,\s*\+?0*[1-9]\d*\s*)*")
_NUMBER = re.compile(r"\s*[+-]?\d+\s*")
#: As C's strtoul reads it: -1 is the largest number, by which mallopt(3) switches trimming off, and 08 is no octal one.
_SIZE = re.compile(r"\s*[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9]\d*)\s*")

_SYNTAX = {
    "OMP_NUM_THREADS": (_LEVELS, "OpenMP takes a number of at least 1"),
    "MKL_NUM_THREADS": (_NUMBER, "MKL takes a number"),
    "OPENBLAS_NUM_THREADS": (_NUMBER, "OpenBLAS takes a number"),
    "MALLOC_ARENA_MAX": (_SIZE, "glibc takes a number"),
    **dict.fromkeys(GLIBC[1:], (_SIZE, "glibc takes a number of bytes, without a unit")),
}


def capacity(name: str, value: str) -> int | None:
    content = value.encode(errors="surrogateescape")
    if name != IDEEP and not 0 < len(content) < _ONEDNN_BUFFER:
        return None
    import ctypes  # takes 2 - 3 ms

    return int(ctypes.CDLL("msvcrt" if sys.platform == "win32" else None).atoi(content))


def why_unusable(name: str, value: str) -> str | None:
    """Why a process must not start with a value, as a clause; None if it may."""
    if name == IDEEP and capacity(name, value) == 0:
        return "is read as 0, and torch crashes at its first convolution on CPU (SIGSEGV)"
    return None


def require_usable(name: str, value: str, argument: str = "") -> None:
    """Reject a value that a process must not start with."""
    if (crash := why_unusable(name, value)) is not None:
        fix = f"Remove it, or set it to 1 or more, such as {DEFAULT_ENTRIES}."
        raise InvalidOption(argument or name, value, why=crash, fix=fix)


def why_not_understood(name: str, value: str) -> str | None:
    """Why the reader of a variable does not understand a value, as a clause; None if it does, or it is empty."""
    if name == "MALLOC_CONF":
        return next(filter(None, map(_why_not_jemallocs, value.split(","))), None) if value else None
    if name not in _SYNTAX or not value.strip():
        return None
    syntax, takes = _SYNTAX[name]
    return None if syntax.fullmatch(value) else takes


def _why_not_jemallocs(pair: str) -> str | None:
    option, colon, value = pair.partition(":")
    if not colon or not re.fullmatch(r"\w+", option, re.ASCII) or not re.fullmatch(r"\S+", value):
        return f"{pair!r} is no pair of an option and its value, such as narenas:2, with commas and without blanks"
    if option not in _OPTIONS:
        return f"jemalloc has no option {option!r}"
    if option in _YES_OR_NO and option != "junk" and value not in ("true", "false"):
        return f"{option} must be true or false"
    if _NUMBERS.fullmatch(option) and not (_SIZE.fullmatch(value) or (option, value) == ("narenas", "default")):
        return f"{option} must be a number"
    return None


#: When a variable is read: when the program starts, when the reading library is loaded, when it is first used, or
#: each time that the value is needed.
When = Literal["exec", "library load", "first use", "any time"]

#: Entries in each of oneDNN's caches if the number of input shapes is unknown. From the matrix that
#: benchmarks/torch_families.py prints. 64 are fewer than one call of a VITS needs (65 convolutions): with inputs of one
#: shape it took 2.1 times the CPU time, and with twelve shapes six transposed convolutions took 2.4 times as long. 256
#: take no longer in both cases, and halve the growth of lengths that do not recur.
DEFAULT_ENTRIES = 256

#: Entries for one input shape. Each convolution layer takes one entry per shape: transformers' VitsModel took 65 for
#: each length. This is about twice as many, because unused capacity takes no memory.
ENTRIES_PER_SHAPE = 128

#: glibc's initial value of both thresholds (mallopt(3)). If set explicitly, they stay there; otherwise each large block
#: that is freed raises them, up to 32 and 64 MiB.
_GLIBC_THRESHOLD = 128 * 1024

#: How many arenas glibc may make. The default is up to 8 per CPU, and each keeps what was freed in it.
_GLIBC_ARENAS = 2


@dataclass(frozen=True, slots=True)
class Knob:
    """One environment variable and its value.

    Attributes:
        name: The variable.
        value: Its value: text without control characters, and without spaces at its ends.
        read_at: When it is read.
        reader: The library that reads it, such as ``"oneDNN"``.
        does: Its effect.
        costs: Its disadvantages.
        source: Where this is documented or measured.

    Raises:
        InvalidOption: The name is not valid for a variable, the value cannot be written in every preset format, or its
            reader crashes on it; ``read_at`` is not known, or another attribute is not text.
    """

    name: str
    value: str
    read_at: When
    reader: str
    does: str
    costs: str
    source: str

    def __post_init__(self) -> None:
        for attribute in ("name", "value", "reader", "does", "costs", "source"):
            _units.instance(getattr(self, attribute), attribute, str, "text", fix="Put it into quotes.")
        _units.one_of(self.read_at, "read_at", get_args(When), what="moment")
        if not (self.name.isascii() and self.name.isidentifier()):
            why = "is not a valid name for a variable"
            raise InvalidOption("name", self.name, why=why, fix="Use letters, digits and underscores, no digit first.")
        if not self.value.isprintable() or self.value != self.value.strip():
            why = "must not contain control characters, or spaces at its ends: not every preset format can keep them"
            raise InvalidOption("value", self.value, why=why, fix="Use printable text without spaces at its ends.")
        require_usable(self.name, self.value, "value")


def onednn_caches(entries: int) -> tuple[Knob, Knob]:
    """Limit the two caches that grow with every new input shape; either limit alone is not enough."""
    cache = partial(Knob, value=str(entries), read_at="first use")
    measured = "400 lengths through 8 convolutions grew by 339 MB without a limit, 77 MB with this one alone"
    return (
        cache(
            name=ONEDNN,
            reader="oneDNN",
            does=f"keeps at most {entries} compiled operations; each convolution layer takes one per input shape, "
            "and the default is 1024",
            costs="an operation that no longer fits is compiled again, which doubles the time where the same shapes "
            "recur and do not fit",
            source=f"oneDNN developer guide, 'Primitive Cache'; {measured}",
        ),
        cache(
            name=IDEEP,
            reader="ideep (torch's layer over oneDNN), once in each thread",
            does=f"keeps at most {entries} descriptions of convolutions per thread; they keep alive what oneDNN's own "
            "cache drops, and the default is 1024",
            costs="a description that no longer fits is made again",
            source="ideep, utils.hpp and lru_cache.hpp; alone it changes almost nothing (319 of 339 MB)",
        ),
    )


def threads(count: int, why: str) -> tuple[Knob, Knob]:
    costs = "a single call in the process cannot use the other workers' CPUs"
    of_library = partial(Knob, value=str(count), read_at="library load", costs=costs)
    return (
        of_library(
            name="OMP_NUM_THREADS",
            reader="OpenMP (libgomp, libiomp5, libomp)",
            does=f"runs an operation on {threads_text(count)} ({why}); the default is one per CPU that the process may "
            "run on, regardless of its quota and the number of workers",
            source="OpenMP 5.2, section 21.1.2; PyTorch, 'CPU threading and TorchScript inference'",
        ),
        of_library(
            name="MKL_NUM_THREADS",
            reader="MKL (inside torch on x86)",
            does=f"the same for matrix products by MKL ({why}); torch takes its own number of threads from it",
            source="Intel oneMKL developer guide, 'MKL_NUM_THREADS'; PyTorch, aten/src/ATen/ParallelOpenMP.cpp",
        ),
    )


def openblas_threads(count: int, why: str) -> Knob:
    """Limit the threads for matrix products of numpy and scipy; OpenBLAS starts them when it is loaded."""
    return Knob(
        name="OPENBLAS_NUM_THREADS",
        value=str(count),
        read_at="library load",
        reader="OpenBLAS (inside numpy and scipy)",
        does=f"multiplies on {threads_text(count)} ({why}); the default is one per CPU, started when numpy is imported",
        costs="a large matrix product of numpy or scipy cannot use more CPUs",
        source="OpenBLAS user manual, 'Environment variables'",
    )


#: Check for CUDA without starting it, so that the process can still fork.
CUDA_CHECK = Knob(
    name="PYTORCH_NVML_BASED_CUDA_CHECK",
    value="1",
    read_at="any time",
    reader="torch.cuda.is_available()",
    does="asks the driver's management library instead of starting CUDA, which forked workers could not use",
    costs="a weaker check: a broken driver is detected only at the first use of CUDA",
    source="PyTorch, torch.cuda.is_available and 'Poison fork in multiprocessing'",
)

GRPC_FORK_SUPPORT = Knob(
    name="GRPC_ENABLE_FORK_SUPPORT",
    value="1",
    read_at="library load",
    reader="gRPC (grpcio)",
    does="stops gRPC's threads for a fork and restarts them after it; without it workers may hang in their first "
    "call. The default has changed several times between releases",
    costs="a fork waits for running gRPC calls; works with the polling strategies epoll1 and poll only",
    source="grpc/grpc, doc/fork_support.md and issues 41725 and 41768",
)

#: Keep Hugging Face's tokenizers from starting threads, which do not survive a fork.
TOKENIZERS_THREADS = Knob(
    name="TOKENIZERS_PARALLELISM",
    value="false",
    read_at="any time",
    reader="tokenizers (Hugging Face)",
    does="encodes a batch on the calling thread, so that a fork loses no threads and no worker prints a warning "
    "about it",
    costs="a batch of many texts is encoded on one CPU",
    source="huggingface/tokenizers, utils/parallelism.rs",
)

_OF_MALLOC = partial(Knob, read_at="exec", reader="glibc's malloc", source="mallopt(3)")
GLIBC_MEMORY = (
    _OF_MALLOC(
        name="MALLOC_ARENA_MAX",
        value=str(_GLIBC_ARENAS),
        does=f"shares {_GLIBC_ARENAS} heaps among all threads; by default there are up to 8 per CPU, and each "
        "keeps what was freed in it",
        costs="threads that allocate at the same moment wait for each other",
    ),
    _OF_MALLOC(
        name="MALLOC_TRIM_THRESHOLD_",
        value=str(_GLIBC_THRESHOLD),
        does="always returns the free end of the heap once it exceeds 128 KiB; by default the limit grows with "
        "the blocks that are freed, up to 64 MiB",
        costs="memory that is needed again is requested from the kernel again",
    ),
    _OF_MALLOC(
        name="MALLOC_MMAP_THRESHOLD_",
        value=str(_GLIBC_THRESHOLD),
        does="maps every block of 128 KiB or more separately, so that freeing it returns it; by default the limit "
        "grows with the blocks that are freed, up to 32 MiB",
        costs="the kernel maps and zeroes each large block, such as a tensor, every time: 8 small convolutions "
        "(64 channels, 3000 long) took 1.15 s instead of 0.8 s of CPU time",
        source="mallopt(3); with both thresholds 400 lengths through 8 convolutions grew by 111 MB, "
        "without them by 339 MB",
    ),
)

JEMALLOC_MEMORY = Knob(
    name="MALLOC_CONF",
    value="background_thread:false,dirty_decay_ms:1000,muzzy_decay_ms:0",
    read_at="exec",
    reader="jemalloc",
    does="returns freed pages after one second instead of ten, and starts no threads of its own: a fork would "
    "lose them, and a child would then keep freed memory",
    costs="pages that are needed again are requested from the kernel again; without its own threads jemalloc "
    "returns memory only while the process allocates",
    source="jemalloc(3), TUNING.md",
)


def threads_text(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


# Environment variables that determine how torch uses GPU memory, as data. None was measured on a GPU here.

ALLOCATOR = "PYTORCH_ALLOC_CONF"
PLANS = "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"
MODULES = "CUDA_MODULE_LOADING"

#: Plans in each thread's cache if the number of input shapes is unknown: about 200 MiB, at the 200 KiB for each that
#: torch's own comment gives (pytorch#104369). A cache that is too small is worse than none: an object detector with 156
#: convolutions took ten times as long with room for one.
CUDNN_DEFAULT_ENTRIES = 1024

#: torch's own limit, which it estimates at 2 GiB.
CUDNN_MOST_ENTRIES = 10_000

#: The part of a GPU that processes which share it leave for their CUDA contexts, which no fraction counts
#: (pytorch#58466: half a gigabyte each).
_CONTEXTS = 0.1

_CUDA_ALLOCATOR = partial(Knob, ALLOCATOR, read_at="first use", reader="torch's CUDA allocator")


#: Let segments of the GPU's memory grow, so that inputs of new sizes do not leave holes.
EXPANDABLE_SEGMENTS = _CUDA_ALLOCATOR(
    value="expandable_segments:True",
    does="maps memory into segments that grow, instead of one segment for each large block; sizes that change "
    "from call to call then leave fewer holes that nothing fits into",
    costs="no CUDA IPC where processes may not use pidfd_getfd, as in most containers: sharing a tensor on the "
    "GPU between processes fails there (pytorch#165685); garbage_collection_threshold does not free such "
    "segments (pytorch#134338). PYTORCH_CUDA_ALLOC_CONF, the older name, wins if it is set as well (torch 2.13)",
    source="PyTorch, 'CUDA semantics', 'Optimizing memory usage with PYTORCH_ALLOC_CONF'",
)

#: Free old cached blocks early, so that no call waits until all of them are freed.
RECLAIMING = _CUDA_ALLOCATOR(
    value="garbage_collection_threshold:0.8",
    does="from 80 % of the process's part of the GPU on, frees the cached blocks that were not used for longest; "
    "otherwise the call that finds no memory waits for the GPU, and frees the whole cache",
    costs="blocks that are needed again are requested from the driver again; a torch without pytorch#161035 "
    "(2025) does it only after torch.cuda.set_per_process_memory_fraction()",
    source="PyTorch, 'CUDA semantics', and c10/cuda/CUDACachingAllocator.cpp",
)


def fraction(workers: int) -> Knob:
    fix = "Give the number of processes that share one GPU."
    _units.whole_number(workers, "workers", most=int(1000 * (1 - _CONTEXTS)), fix=fix)  # a thousandth each
    part = int((1 - _CONTEXTS) / workers * 1000) / 1000
    return _CUDA_ALLOCATOR(
        value=f"per_process_memory_fraction:{part:g},garbage_collection_threshold:0.8",
        does=f"a process that asks for more than {part:g} of the GPU gets an OutOfMemoryError, and not its neighbours; "
        f"from 80 % of that on, old cached blocks are freed. {_CONTEXTS:g} of the GPU is left for CUDA contexts, which "
        "the fraction does not count",
        costs="memory that one process does not use is no use to the others; a torch without pytorch#161035 (2025) "
        "rejects the option with an error. Expandable segments are left out: in most containers they exclude CUDA IPC",
        source="pytorch#161035 and pytorch#58466",
    )


def cudnn_plans(entries: int) -> Knob:
    return Knob(
        name=PLANS,
        value=str(entries),
        read_at="first use",
        reader="torch, at the first convolution by cuDNN",
        does=f"keeps at most {entries} plans per thread; each convolution layer takes one per input shape, about "
        f"200 KiB of host memory, and the default is {CUDNN_MOST_ENTRIES}",
        costs="a plan that no longer fits is made again: with room for too few, calls take many times as long",
        source="pytorch#104369 and pytorch#104701 (one cache in each thread); PyTorch, 'CUDA Environment Variables'",
    )


#: Load GPU code when it is first used, so that each process's context is small.
LAZY_MODULES = Knob(
    name=MODULES,
    value="LAZY",
    read_at="first use",
    reader="the CUDA driver, when CUDA is initialised",
    does="the context of each process holds only the GPU code that it has used; the default since CUDA 12.2, and "
    "set by torch",
    costs="the first call of each operation loads its code, unless a warm-up has. EAGER is worse: on an H200, "
    "benchmarks/gpu_presets.py started in 2.6 s instead of 0.3, answered its first call in 2.1 s instead of 0.2, and "
    "took 1,000 MB of the GPU instead of 541",
    source="NVIDIA, CUDA programming guide, 'Lazy Loading'; pytorch#86509",
)
