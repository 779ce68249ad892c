"""What this process has done so far with the environment variables that presets set.

Nothing here initialises a library: a check that made a library read its variables would change its own answer.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from modelguard.environment import _allocator, _gpu, _proc
from modelguard.environment._allocator import AllocatorInForce
from modelguard.environment._effect import Cuda
from modelguard.errors import NotSupported

__all__ = ["ThisProcess"]

_PRIMITIVES = "_ZZN4dnnl4impl22global_primitive_cacheEvE8capacity"
_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_DESCRIPTORS = (
    "_ZZN5ideep5utils17computation_cacheIN4dnnl19convolution_forward14primitive_descE"
    f"Lm1024E{_STRING}E7t_storeEvE12new_capacity"
)

#: The capacity that ideep uses if its variable is not set: a parameter of the type above.
_DEFAULT_DESCRIPTORS = 1024

_ONEDNN = re.compile(r"/lib(?:torch_cpu|dnnl)\.so[^/]*$")

#: For each variable that sets a number of threads: the files of the libraries that read it, and the functions that
#: return the number in use.
_THREADS = {
    "OMP_NUM_THREADS": (re.compile(r"/lib(?:gomp|iomp5|omp)[-.][^/]*$"), ("omp_get_max_threads",)),
    "MKL_NUM_THREADS": (re.compile(r"/lib(?:torch_cpu|mkl_rt|mkl_core)\.so[^/]*$"), ("mkl_get_max_threads",)),
    "OPENBLAS_NUM_THREADS": (
        re.compile(r"/lib(?:scipy_)?openblas[^/]*\.so[^/]*$"),
        ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads", "openblas_get_num_threads"),
    ),
}


class ThisProcess:
    """This process, as :class:`modelguard.environment._effect.ProcessHistory` describes it.

    Args:
        root: The folder that holds ``proc``.
    """

    def __init__(self, root: Path = _proc.ROOT) -> None:
        self._root = root

    def started_with(self) -> Mapping[str, str] | None:
        """Its variables when the program started; None if they can no longer be read."""
        return _proc.if_readable(_proc.environment, None, self._root) or None

    def malloc(self) -> AllocatorInForce:
        """The library that serves ``malloc``."""
        return _allocator.in_force()

    def primitive_cache(self) -> int | None:
        """The capacity of oneDNN's primitive cache, in entries; None if it does not exist yet."""
        return self._capacity(_PRIMITIVES, of_thread=False)

    def descriptor_cache(self) -> int | None:
        """The capacity of the calling thread's cache of convolutions in ideep; None if it does not exist yet."""
        capacity = self._capacity(_DESCRIPTORS, of_thread=True)
        return _DEFAULT_DESCRIPTORS if capacity == 0 else capacity

    def threads(self, name: str) -> Mapping[str, int]:
        """The number of threads of each loaded library that reads the variable of this name, by library file."""
        files, functions = _THREADS[name]
        counts = {path: _thread_count(path, functions) for path in self._loaded(files)}
        return {path: count for path, count in counts.items() if count is not None}

    def grpc_forks(self) -> bool | None:
        """Whether gRPC was imported with fork support; None if it has not been imported."""
        module = sys.modules.get("grpc._cython.cygrpc")
        return None if module is None else bool(getattr(module, "_GRPC_ENABLE_FORK_SUPPORT", False))

    def cuda(self) -> Cuda:
        """How far torch has come with CUDA. In a child of a process that had initialised it: as far as that."""
        torch = _gpu.imported_torch()
        if torch is None:
            return "not imported"
        if torch.version.cuda is None and torch.version.hip is None:
            return "not built in"
        started = torch.cuda.is_initialized() or _gpu.is_bad_fork(torch)
        return "initialised" if started else "not initialised"

    def cuda_allocator(self) -> str:
        """The settings that torch's allocator has parsed last."""
        torch = _gpu.imported_torch()
        read = None if torch is None else getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 - torch shows them nowhere else
        if read is None:
            raise NotSupported("reading the settings of torch's allocator", reason="this torch does not report them")
        return str(read())

    def _capacity(self, variable: str, *, of_thread: bool) -> int | None:
        loaded = self._loaded(_ONEDNN)
        if not loaded:
            return None
        from modelguard.environment import _linker  # imports ctypes

        try:
            files = [file for file in _linker.loaded_files() if file.path in loaded]
            made = [file.thread_static(variable) if of_thread else file.static(variable) for file in files]
        except (LookupError, OSError):
            reason = f"{', '.join(loaded)} has no symbols for its caches"
            raise NotSupported("reading the size of oneDNN's caches", reason=reason) from None
        return next((capacity for capacity in made if capacity is not None), None)

    def _loaded(self, files: re.Pattern[str]) -> list[str]:
        """The loaded files whose names match."""
        mappings = _proc.if_readable(_proc.maps, None, self._root)
        if mappings is None:
            raise NotSupported("listing loaded libraries", reason="/proc/self/maps cannot be read")
        found = [mapping for mapping in mappings if files.search(mapping.name)]
        replaced = next((mapping.name for mapping in found if mapping.deleted), None)
        if replaced is not None:
            # The file of that name is now a different one: its symbols would be wrong, and opening it would load it.
            raise NotSupported("inspecting a loaded library", reason=f"{replaced} was replaced since it was loaded")
        return list(dict.fromkeys(mapping.name for mapping in found))


def _thread_count(path: str, functions: tuple[str, ...]) -> int | None:
    """Ask a loaded library for its number of threads."""
    import ctypes

    try:
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    function = next((name for name in functions if hasattr(library, name)), None)
    if function is None:
        return None
    found: list[int] = []
    # In a new thread, because OpenMP keeps a number for each thread: it may have been changed in the calling one.
    thread = threading.Thread(target=lambda: found.append(int(library[function]())), name="modelguard-threads")
    thread.start()
    thread.join()
    return found[0]
