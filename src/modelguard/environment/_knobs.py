"""Environment variables that decide how much memory and how many threads a process takes, as data.

Each one says when it is read, because that decides whether it can still be set: a variable that is set after its
reader has read it silently does nothing.
"""

import re
from dataclasses import dataclass
from typing import Literal

from modelguard.errors import InvalidOption

__all__ = [
    "DEFAULT_ENTRIES",
    "ENTRIES_PER_SHAPE",
    "Knob",
    "When",
    "cuda_check",
    "glibc_memory",
    "grpc_fork_support",
    "jemalloc_memory",
    "onednn_caches",
    "openblas_threads",
    "threads",
    "tokenizers_threads",
]

#: When a variable is read: when the program starts, when the reader's library is loaded, when the reader is first
#: used, or each time that it is needed.
When = Literal["exec", "library load", "first use", "any time"]

#: Room in each of oneDNN's caches where the number of input shapes is not known. From the curve that
#: benchmarks/torch_dynamic_shapes.py prints: memory stays flat, and lengths that do not recur are no slower.
DEFAULT_ENTRIES = 64

#: Room for one input shape. Each convolution layer takes one entry per shape: transformers' VitsModel took 65 for each
#: length. Twice that, because room that is not used takes no memory.
ENTRIES_PER_SHAPE = 128

#: glibc's initial value of both thresholds (mallopt(3)). Set explicitly, they stay there; otherwise each large block
#: that is freed raises them, up to 32 and 64 MiB.
_GLIBC_THRESHOLD = 128 * 1024

#: How many arenas glibc may make. Without it up to 8 per CPU, and each keeps what was freed in it.
_GLIBC_ARENAS = 2

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"


@dataclass(frozen=True, slots=True)
class Knob:
    """One environment variable and its value.

    Attributes:
        name: The variable.
        value: Its value: text without control characters and without spaces at its ends.
        read_at: When its reader reads it.
        reader: The library that reads it, such as ``"oneDNN"``.
        does: What it changes.
        costs: The price of that.
        source: Where this is documented or measured.

    Raises:
        InvalidOption: The name is not that of a variable, or some format of presets could not hold the value.
    """

    name: str
    value: str
    read_at: When
    reader: str
    does: str
    costs: str
    source: str

    def __post_init__(self) -> None:
        if not re.fullmatch(_NAME, self.name):
            why = "it is not the name of a variable"
            raise InvalidOption("name", self.name, why=why, fix="Use letters, digits and underscores, no digit first.")
        if not self.value.isprintable() or self.value != self.value.strip():
            why = "control characters and spaces at the ends do not survive in every format of presets"
            raise InvalidOption("value", self.value, why=why, fix="Use printable text without spaces at its ends.")


def onednn_caches(entries: int) -> tuple[Knob, Knob]:
    """The two caches that grow with every new input shape, where either limit alone does not hold.

    Args:
        entries: Room in each. One convolution layer takes one entry per input shape.
    """
    measured = "400 lengths through 8 convolutions grew by 339 MB without a limit, 77 MB with this one alone"
    return (
        Knob(
            name="ONEDNN_PRIMITIVE_CACHE_CAPACITY",
            value=str(entries),
            read_at="first use",
            reader="oneDNN",
            does=f"keeps at most {entries} compiled operations; each convolution layer takes one per input shape, "
            "and the default is 1024",
            costs="an operation that no longer fits is compiled again, which matters where the same shapes recur",
            source=f"oneDNN developer guide, 'Primitive Cache'; {measured}",
        ),
        Knob(
            name="LRU_CACHE_CAPACITY",
            value=str(entries),
            read_at="first use",
            reader="ideep (torch's layer over oneDNN), once in each thread",
            does=f"keeps at most {entries} descriptions of convolutions per thread; they keep alive what oneDNN's own "
            "cache drops, and the default is 1024",
            costs="a description that no longer fits is made again",
            source="ideep, utils.hpp and lru_cache.hpp; alone it changes almost nothing (319 of 339 MB)",
        ),
    )


def threads(count: int, why: str) -> tuple[Knob, Knob]:
    """Threads for one operation of torch, and of anything else that uses OpenMP or MKL.

    Args:
        count: Threads in one process.
        why: The origin of that number, such as ``"4 CPUs for 2 workers"``.
    """
    costs = "one call alone in the process cannot use the other workers' CPUs"
    return (
        Knob(
            name="OMP_NUM_THREADS",
            value=str(count),
            read_at="library load",
            reader="OpenMP (libgomp, libiomp5, libomp)",
            does=f"runs an operation on {_threads(count)} ({why}); without it on one per CPU that the process may run "
            "on, whatever its quota and however many workers there are",
            costs=costs,
            source="OpenMP 5.2, section 21.1.2; PyTorch, 'CPU threading and TorchScript inference'",
        ),
        Knob(
            name="MKL_NUM_THREADS",
            value=str(count),
            read_at="library load",
            reader="MKL (inside torch on x86)",
            does=f"the same for matrix products by MKL ({why}); torch takes its own number of threads from it",
            costs=costs,
            source="Intel oneMKL developer guide, 'MKL_NUM_THREADS'; PyTorch, aten/src/ATen/ParallelOpenMP.cpp",
        ),
    )


def openblas_threads(count: int, why: str) -> Knob:
    """Threads for matrix products of numpy and scipy; OpenBLAS starts them when it is loaded.

    Args:
        count: Threads in one process.
        why: The origin of that number.
    """
    return Knob(
        name="OPENBLAS_NUM_THREADS",
        value=str(count),
        read_at="library load",
        reader="OpenBLAS (inside numpy and scipy)",
        does=f"multiplies on {_threads(count)} ({why}); without it on one per CPU, which start when numpy is imported",
        costs="a large matrix product of numpy or scipy cannot use more CPUs",
        source="OpenBLAS user manual, 'Environment variables'",
    )


def cuda_check() -> Knob:
    """Ask for CUDA without starting it, so that a fork can still follow."""
    return Knob(
        name="PYTORCH_NVML_BASED_CUDA_CHECK",
        value="1",
        read_at="any time",
        reader="torch.cuda.is_available()",
        does="asks the driver's management library instead of starting CUDA, which forked workers could not use",
        costs="a weaker check: a broken driver is noticed only at the first use of CUDA",
        source="PyTorch, torch.cuda.is_available and 'Poison fork in multiprocessing'",
    )


def grpc_fork_support() -> Knob:
    """Let a process that has used gRPC fork."""
    return Knob(
        name="GRPC_ENABLE_FORK_SUPPORT",
        value="1",
        read_at="library load",
        reader="gRPC (grpcio)",
        does="stops gRPC's threads for a fork and restarts them after it; without it workers may hang in their first "
        "call. Which releases do this by default has changed several times",
        costs="a fork waits for running gRPC calls; works with the polling strategies epoll1 and poll only",
        source="grpc/grpc, doc/fork_support.md and issues 41725 and 41768",
    )


def tokenizers_threads() -> Knob:
    """Keep Hugging Face's tokenizers from starting threads, which do not survive a fork."""
    return Knob(
        name="TOKENIZERS_PARALLELISM",
        value="false",
        read_at="any time",
        reader="tokenizers (Hugging Face)",
        does="encodes a batch on the calling thread, so that a fork loses no threads and no worker prints a warning "
        "about it",
        costs="a batch of many texts is encoded on one CPU",
        source="huggingface/tokenizers, utils/parallelism.rs",
    )


def glibc_memory() -> tuple[Knob, Knob, Knob]:
    """Make glibc keep less of what was freed."""
    source = "mallopt(3)"
    return (
        Knob(
            name="MALLOC_ARENA_MAX",
            value=str(_GLIBC_ARENAS),
            read_at="exec",
            reader="glibc's malloc",
            does=f"shares {_GLIBC_ARENAS} heaps among all threads; without it there are up to 8 per CPU, and each "
            "keeps what was freed in it",
            costs="threads that allocate at the same moment wait for each other",
            source=source,
        ),
        Knob(
            name="MALLOC_TRIM_THRESHOLD_",
            value=str(_GLIBC_THRESHOLD),
            read_at="exec",
            reader="glibc's malloc",
            does="always gives the free end of the heap back once it exceeds 128 KiB; without it the limit grows with "
            "the blocks that are freed, up to 64 MiB",
            costs="memory that is needed again is requested from the kernel again",
            source=source,
        ),
        Knob(
            name="MALLOC_MMAP_THRESHOLD_",
            value=str(_GLIBC_THRESHOLD),
            read_at="exec",
            reader="glibc's malloc",
            does="maps every block of 128 KiB or more by itself, so that it goes back when it is freed; without it the "
            "limit grows with the blocks that are freed, up to 32 MiB",
            costs="the kernel maps and zeroes each large block, such as a tensor, every time: 8 small convolutions "
            "(64 channels, 3000 long) took 1.15 s instead of 0.8 s of CPU time",
            source=f"{source}; with both thresholds 400 lengths through 8 convolutions grew by 111 MB, "
            "without them by 339 MB",
        ),
    )


def jemalloc_memory() -> Knob:
    """Make jemalloc, where it serves malloc, give memory back within a second, and start no thread."""
    return Knob(
        name="MALLOC_CONF",
        value="background_thread:false,dirty_decay_ms:1000,muzzy_decay_ms:0",
        read_at="exec",
        reader="jemalloc",
        does="gives freed pages back after one second instead of ten, and starts no threads of its own: a fork would "
        "lose them, and a child would then keep freed memory",
        costs="pages that are needed again are requested from the kernel again; without its own threads jemalloc gives "
        "memory back only while the process allocates",
        source="jemalloc(3), TUNING.md",
    )


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
