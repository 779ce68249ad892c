"""Environment variables that determine how much memory and how many threads a process uses, as data.

Each knob states when its variable is read, because this determines whether it can still be set: a variable that is set
after its reader has read it silently has no effect.
"""

import re
from dataclasses import dataclass
from typing import Literal

from modelguard.environment import _capacities
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

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"


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
            reader crashes on it.
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
            why = "is not a valid name for a variable"
            raise InvalidOption("name", self.name, why=why, fix="Use letters, digits and underscores, no digit first.")
        if not self.value.isprintable() or self.value != self.value.strip():
            why = "must not contain control characters, or spaces at its ends: not every preset format can keep them"
            raise InvalidOption("value", self.value, why=why, fix="Use printable text without spaces at its ends.")
        if (crash := _capacities.why_unusable(self.name, self.value)) is not None:
            raise InvalidOption("value", self.value, why=crash, fix="Use a whole number of at least 1.")


def onednn_caches(entries: int) -> tuple[Knob, Knob]:
    """Limit the two caches that grow with every new input shape; either limit alone is not enough.

    Args:
        entries: Entries in each. One convolution layer takes one entry per input shape.
    """
    measured = "400 lengths through 8 convolutions grew by 339 MB without a limit, 77 MB with this one alone"
    return (
        Knob(
            name=_capacities.ONEDNN,
            value=str(entries),
            read_at="first use",
            reader="oneDNN",
            does=f"keeps at most {entries} compiled operations; each convolution layer takes one per input shape, "
            "and the default is 1024",
            costs="an operation that no longer fits is compiled again, which doubles the time where the same shapes "
            "recur and do not fit",
            source=f"oneDNN developer guide, 'Primitive Cache'; {measured}",
        ),
        Knob(
            name=_capacities.IDEEP,
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
    """Limit the threads of one operation of torch, and of any other library that uses OpenMP or MKL.

    Args:
        count: Threads in one process.
        why: The reason for that number, such as ``"4 CPUs for 2 workers"``.
    """
    costs = "a single call in the process cannot use the other workers' CPUs"
    return (
        Knob(
            name="OMP_NUM_THREADS",
            value=str(count),
            read_at="library load",
            reader="OpenMP (libgomp, libiomp5, libomp)",
            does=f"runs an operation on {_threads(count)} ({why}); the default is one per CPU that the process may run "
            "on, regardless of its quota and the number of workers",
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
    """Limit the threads for matrix products of numpy and scipy; OpenBLAS starts them when it is loaded.

    Args:
        count: Threads in one process.
        why: The reason for that number.
    """
    return Knob(
        name="OPENBLAS_NUM_THREADS",
        value=str(count),
        read_at="library load",
        reader="OpenBLAS (inside numpy and scipy)",
        does=f"multiplies on {_threads(count)} ({why}); the default is one per CPU, started when numpy is imported",
        costs="a large matrix product of numpy or scipy cannot use more CPUs",
        source="OpenBLAS user manual, 'Environment variables'",
    )


def cuda_check() -> Knob:
    """Check for CUDA without starting it, so that the process can still fork."""
    return Knob(
        name="PYTORCH_NVML_BASED_CUDA_CHECK",
        value="1",
        read_at="any time",
        reader="torch.cuda.is_available()",
        does="asks the driver's management library instead of starting CUDA, which forked workers could not use",
        costs="a weaker check: a broken driver is detected only at the first use of CUDA",
        source="PyTorch, torch.cuda.is_available and 'Poison fork in multiprocessing'",
    )


def grpc_fork_support() -> Knob:
    """Allow a process that has used gRPC to fork."""
    return Knob(
        name="GRPC_ENABLE_FORK_SUPPORT",
        value="1",
        read_at="library load",
        reader="gRPC (grpcio)",
        does="stops gRPC's threads for a fork and restarts them after it; without it workers may hang in their first "
        "call. The default has changed several times between releases",
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
    """Make glibc keep less freed memory."""
    source = "mallopt(3)"
    return (
        Knob(
            name="MALLOC_ARENA_MAX",
            value=str(_GLIBC_ARENAS),
            read_at="exec",
            reader="glibc's malloc",
            does=f"shares {_GLIBC_ARENAS} heaps among all threads; by default there are up to 8 per CPU, and each "
            "keeps what was freed in it",
            costs="threads that allocate at the same moment wait for each other",
            source=source,
        ),
        Knob(
            name="MALLOC_TRIM_THRESHOLD_",
            value=str(_GLIBC_THRESHOLD),
            read_at="exec",
            reader="glibc's malloc",
            does="always returns the free end of the heap once it exceeds 128 KiB; by default the limit grows with "
            "the blocks that are freed, up to 64 MiB",
            costs="memory that is needed again is requested from the kernel again",
            source=source,
        ),
        Knob(
            name="MALLOC_MMAP_THRESHOLD_",
            value=str(_GLIBC_THRESHOLD),
            read_at="exec",
            reader="glibc's malloc",
            does="maps every block of 128 KiB or more separately, so that freeing it returns it; by default the limit "
            "grows with the blocks that are freed, up to 32 MiB",
            costs="the kernel maps and zeroes each large block, such as a tensor, every time: 8 small convolutions "
            "(64 channels, 3000 long) took 1.15 s instead of 0.8 s of CPU time",
            source=f"{source}; with both thresholds 400 lengths through 8 convolutions grew by 111 MB, "
            "without them by 339 MB",
        ),
    )


def jemalloc_memory() -> Knob:
    """Make jemalloc, if it serves malloc, return memory within a second, and start no threads."""
    return Knob(
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


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
