"""What this process has done so far, as far as it bears on variables: looked up from inside.

Nothing here makes a library do what it has not done yet: a question that itself reads the environment would decide
what it asks about.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from modelguard.environment import allocator
from modelguard.environment.allocator import Serving
from modelguard.errors import NotSupported

__all__ = ["ThisProcess"]

_ROOT = Path("/proc/self")

#: How the kernel marks a mapped file whose name is gone or means another file now.
_REPLACED = " (deleted)"

_PRIMITIVES = "_ZZN4dnnl4impl22global_primitive_cacheEvE8capacity"
_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_DESCRIPTORS = (
    "_ZZN5ideep5utils17computation_cacheIN4dnnl19convolution_forward14primitive_descE"
    f"Lm1024E{_STRING}E7t_storeEvE12new_capacity"
)

#: What ideep takes where its variable is not set: a parameter of the type above.
_DEFAULT_DESCRIPTORS = 1024

_ONEDNN = re.compile(r"/lib(?:torch_cpu|dnnl)\.so[^/]*$")

#: Who reads a variable of threads: what their files are called, and the functions that tell how many they use.
_THREADS = {
    "OMP_NUM_THREADS": (re.compile(r"/lib(?:gomp|iomp5|omp)[-.][^/]*$"), ("omp_get_max_threads",)),
    "MKL_NUM_THREADS": (re.compile(r"/lib(?:torch_cpu|mkl_rt|mkl_core)\.so[^/]*$"), ("mkl_get_max_threads",)),
    "OPENBLAS_NUM_THREADS": (
        re.compile(r"/lib(?:scipy_)?openblas[^/]*\.so[^/]*$"),
        ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads", "openblas_get_num_threads"),
    ),
}


class ThisProcess:
    """This process, as :class:`modelguard.environment.evidence.Process` asks for it."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root

    def started_with(self) -> Mapping[str, str] | None:
        """Its variables when the program started; None where they cannot be read any more."""
        try:
            text = (self._root / "environ").read_bytes()
        except OSError:
            return None
        pairs = [entry.partition(b"=") for entry in text.split(b"\0") if entry]
        # Programs that change how they are shown in ps (gunicorn with setproctitle) write over this place.
        if not pairs or not all(name and equals for name, equals, _ in pairs):
            return None
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}

    def malloc(self) -> Serving:
        """Who serves ``malloc``."""
        return allocator.serving()

    def primitive_cache(self) -> int | None:
        """How many entries oneDNN's primitive cache was made for; None where there is none yet."""
        return self._capacity("static", _PRIMITIVES)

    def descriptor_cache(self) -> int | None:
        """The same for the calling thread's cache of convolutions in ideep."""
        capacity = self._capacity("thread_static", _DESCRIPTORS)
        return _DEFAULT_DESCRIPTORS if capacity == 0 else capacity

    def threads(self, name: str) -> Mapping[str, int]:
        """How many threads each loaded library uses that reads the variable of this name."""
        files, functions = _THREADS[name]
        counts = {path: _ask(path, functions) for path in self._loaded(files)}
        return {path: count for path, count in counts.items() if count is not None}

    def grpc_forks(self) -> bool | None:
        """Whether gRPC was imported with support for forks; None where it has not been imported."""
        module = sys.modules.get("grpc._cython.cygrpc")
        return None if module is None else bool(getattr(module, "_GRPC_ENABLE_FORK_SUPPORT", False))

    def _capacity(self, kind: str, variable: str) -> int | None:
        loaded = self._loaded(_ONEDNN)
        if not loaded:
            return None
        from modelguard.environment import _symbols

        try:
            made = [getattr(image, kind)(variable) for image in _symbols.images() if image.path in loaded]
        except (LookupError, OSError, ValueError, struct.error):
            reason = f"{', '.join(loaded)} does not tell where its variables are"
            raise NotSupported("looking into oneDNN", reason=reason) from None
        return next((capacity for capacity in made if capacity is not None), None)

    def _loaded(self, files: re.Pattern[str]) -> list[str]:
        """The loaded files of these names."""
        try:
            maps = (self._root / "maps").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            raise NotSupported("telling what is loaded", reason="/proc/self/maps cannot be read") from None
        paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line)
        found = [path for path in paths if files.search(path.removesuffix(_REPLACED))]
        if any(path.endswith(_REPLACED) for path in found):
            # The file of that name is another one now: its table would point anywhere, and opening it would load it.
            reason = f"{found[0].removesuffix(_REPLACED)} was replaced since it was loaded"
            raise NotSupported("looking into a loaded library", reason=reason)
        return found


def _ask(path: str, functions: tuple[str, ...]) -> int | None:
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
    # A fresh thread, because OpenMP's number is each thread's own: code may have changed it for the calling one.
    asking = threading.Thread(target=lambda: found.append(int(library[function]())), name="modelguard-threads")
    asking.start()
    asking.join()
    return found[0]
