"""Environment variables that determine how torch uses GPU memory, as data. None was measured on a GPU here."""

from modelguard.environment._knobs import Knob

__all__ = [
    "ALLOCATOR",
    "CUDNN_DEFAULT_ENTRIES",
    "CUDNN_MOST_ENTRIES",
    "MODULES",
    "PLANS",
    "cudnn_plans",
    "eager_modules",
    "expandable_segments",
    "fraction",
    "lazy_modules",
    "reclaiming",
]

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

_READER = "torch's CUDA allocator"


def expandable_segments() -> Knob:
    """Let segments of the GPU's memory grow, so that inputs of new sizes do not leave holes."""
    return Knob(
        name=ALLOCATOR,
        value="expandable_segments:True",
        read_at="first use",
        reader=_READER,
        does="maps memory into segments that grow, instead of one segment for each large block; sizes that change "
        "from call to call then leave fewer holes that nothing fits into",
        costs="no CUDA IPC where processes may not use pidfd_getfd, as in most containers: sharing a tensor on the "
        "GPU between processes fails there (pytorch#165685); garbage_collection_threshold does not free such "
        "segments (pytorch#134338). PYTORCH_CUDA_ALLOC_CONF, the older name, wins if it is set as well (torch 2.13)",
        source="PyTorch, 'CUDA semantics', 'Optimizing memory usage with PYTORCH_ALLOC_CONF'",
    )


def reclaiming() -> Knob:
    """Free old cached blocks early, so that no call waits until all of them are freed."""
    return Knob(
        name=ALLOCATOR,
        value="garbage_collection_threshold:0.8",
        read_at="first use",
        reader=_READER,
        does="from 80 % of the process's part of the GPU on, frees the cached blocks that were not used for longest; "
        "otherwise the call that finds no memory waits for the GPU, and frees the whole cache",
        costs="blocks that are needed again are requested from the driver again; a torch without pytorch#161035 "
        "(2025) does it only after torch.cuda.set_per_process_memory_fraction()",
        source="PyTorch, 'CUDA semantics', and c10/cuda/CUDACachingAllocator.cpp",
    )


def fraction(workers: int) -> Knob:
    """Bound the part of the GPU that one of several processes takes.

    Args:
        workers: How many processes share it.
    """
    part = int((1 - _CONTEXTS) / workers * 1000) / 1000
    return Knob(
        name=ALLOCATOR,
        value=f"per_process_memory_fraction:{part:g},garbage_collection_threshold:0.8",
        read_at="first use",
        reader=_READER,
        does=f"a process that asks for more than {part:g} of the GPU gets an OutOfMemoryError, and not its neighbours; "
        f"from 80 % of that on, old cached blocks are freed. {_CONTEXTS:g} of the GPU is left for CUDA contexts, which "
        "the fraction does not count",
        costs="memory that one process does not use is no use to the others; a torch without pytorch#161035 (2025) "
        "rejects the option with an error. Expandable segments are left out: in most containers they exclude CUDA IPC",
        source="pytorch#161035 and pytorch#58466",
    )


def cudnn_plans(entries: int) -> Knob:
    """Bound cuDNN's cache of compiled convolutions, which grows with every new input shape.

    Args:
        entries: Plans in each thread's cache.
    """
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


def eager_modules() -> Knob:
    """Load all GPU code when CUDA starts, and not in the first calls."""
    return Knob(
        name=MODULES,
        value="EAGER",
        read_at="first use",
        reader="the CUDA driver, when CUDA is initialised",
        does="no call waits for the GPU code of an operation that none has used before; a warm-up with typical inputs "
        "does the same for the operations that it uses",
        costs="a longer start, and memory on the GPU for code that is never used: 667 MB instead of 287 MB with "
        "torch 1.13 (pytorch#86509)",
        source="NVIDIA, CUDA programming guide, 'Lazy Loading'",
    )


def lazy_modules() -> Knob:
    """Load GPU code when it is first used, so that each process's context is small."""
    return Knob(
        name=MODULES,
        value="LAZY",
        read_at="first use",
        reader="the CUDA driver, when CUDA is initialised",
        does="the context of each process holds only the GPU code that it has used; the default since CUDA 12.2, and "
        "set by torch",
        costs="the first call of each operation loads its code",
        source="NVIDIA, CUDA programming guide, 'Lazy Loading'; pytorch#86509",
    )
