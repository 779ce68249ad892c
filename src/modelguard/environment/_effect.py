"""Whether a variable that is set now still takes effect, by what the process has actually done."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from modelguard.environment import _allocator, _knobs
from modelguard.environment._allocator import AllocatorInForce
from modelguard.environment._knobs import Knob
from modelguard.errors import NotSupported
from modelguard.facts import _gpu, _proc
from modelguard.runtime.background import start_thread

if TYPE_CHECKING:
    from modelguard.environment._allocator_files import Kind

#: How far torch has come with CUDA in a process.
Cuda = Literal["not imported", "not built in", "not initialised", "initialised"]

State = Literal["applied", "kept", "invalid", "too late", "needs exec", "not supported"]


# What this process has done so far with the environment variables that presets set.
#
# Nothing here initialises a library: a check that made a library read its variables would change its own answer.

_PRIMITIVES = "_ZZN4dnnl4impl22global_primitive_cacheEvE8capacity"
_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_DESCRIPTORS = (
    "_ZZN5ideep5utils17computation_cacheIN4dnnl19convolution_forward14primitive_descE"
    f"Lm1024E{_STRING}E7t_storeEvE12new_capacity"
)

#: The capacity that ideep uses if its variable is not set: a parameter of the type above.
_DEFAULT_DESCRIPTORS = 1024

_ONEDNN = re.compile(r"/lib(?:torch_cpu|dnnl)\.so[^/]*$")

_OPENMP = re.compile(r"/lib(?:gomp|iomp5|omp)[-.][^/]*$")

#: For each variable that sets a number of threads: the files of the libraries that read it, and the functions that
#: return the number in use.
_THREADS = {
    "OMP_NUM_THREADS": (_OPENMP, ("omp_get_max_threads",)),
    "MKL_NUM_THREADS": (re.compile(r"/lib(?:torch_cpu|mkl_rt|mkl_core)\.so[^/]*$"), ("mkl_get_max_threads",)),
    "OPENBLAS_NUM_THREADS": (
        re.compile(r"/lib(?:scipy_)?openblas[^/]*\.so[^/]*$"),
        ("scipy_openblas_get_num_threads64_", "scipy_openblas_get_num_threads", "openblas_get_num_threads"),
    ),
}


class ThisProcess:
    """What this process has done so far with the environment variables that presets set.

    Its readers raise ``NotSupported`` where that cannot be known.
    """

    def __init__(self, root: Path = _proc.ROOT) -> None:
        self._root = root

    def started_with(self) -> Mapping[str, str] | None:
        """Its variables when the program started; None if they can no longer be read."""
        return _proc.if_readable(_proc.environment, None, self._root) or None

    def malloc(self) -> AllocatorInForce:
        return _allocator.in_force()

    def primitive_cache(self) -> int | None:
        """The capacity of oneDNN's primitive cache, in entries; None if it does not exist yet."""
        return self._capacity(_PRIMITIVES, of_thread=False)

    def descriptor_cache(self) -> int | None:
        """The capacity of the calling thread's cache of convolutions in ideep; None if it does not exist yet."""
        capacity = self._capacity(_DESCRIPTORS, of_thread=True)
        return _DEFAULT_DESCRIPTORS if capacity == 0 else capacity

    def threads(self, name: str) -> Mapping[str, int]:
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
        torch = _gpu.imported_torch()
        read = None if torch is None else getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 - torch shows them nowhere else
        if read is None:
            raise NotSupported("reading the settings of torch's allocator", reason="this torch does not report them")
        return str(read())

    def _capacity(self, variable: str, *, of_thread: bool) -> int | None:
        loaded = self._loaded(_ONEDNN)
        if not loaded:
            return None
        from modelguard.environment import _linker, _loaded_files  # they import ctypes

        try:
            made = [
                _linker.static_of(file, variable, thread_base if of_thread else base)
                for file, base, thread_base in _loaded_files.listed()
                if file in loaded
            ]
        except (LookupError, OSError):
            reason = f"{', '.join(loaded)} has no symbols for its caches"
            raise NotSupported("reading the size of oneDNN's caches", reason=reason) from None
        return next((capacity for capacity in made if capacity is not None), None)

    def _loaded(self, files: re.Pattern[str]) -> list[str]:
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
    library = _open(path)
    function = next((name for name in functions if hasattr(library, name)), None)
    if function is None:
        return None
    found: list[int] = []
    # In a new thread, because OpenMP keeps a number for each thread: it may have been changed in the calling one.
    start_thread(lambda: found.append(int(library[function]())), "modelguard-threads").join()
    return found[0]


# What follows from it for a variable.


class _Reading(NamedTuple):
    """What has happened to a variable so far."""

    seen: str  # the evidence
    #: Whether its reader uses the value that is wanted; None if it has not read it, as far as is known.
    in_force: bool | None = None


class _Case(NamedTuple):
    """A knob's variable with its current value in this process, None if it is not set."""

    knob: Knob
    value: str | None
    process: ThisProcess

    @property
    def wanted(self) -> str:
        return self.knob.value if self.value is None else self.value

    def was_set_at_start(self) -> bool:
        started_with = self.process.started_with() or {}
        return self.value is not None and started_with.get(self.knob.name) == self.value


_Inspect: TypeAlias = Callable[[_Case], _Reading]


class _NoReader(Exception):
    """Nothing in this process reads the variable."""


def effect_of(knob: Knob, value: str | None, process: ThisProcess) -> tuple[State, str]:
    if value is not None and (crash := _knobs.why_unusable(knob.name, value)) is not None:
        # Whatever has happened so far: ideep reads the variable again in each new thread.
        return "invalid", f"{crash}; remove it, or set it to 1 or more before the program starts"
    case = _Case(knob, value, process)
    inspect = _INSPECTIONS.get(knob.name, _at_start if knob.read_at == "exec" else _unknown)
    try:
        seen, in_force = inspect(case)
    except _NoReader as error:
        return "not supported", str(error)
    except NotSupported as error:
        seen, in_force = f"it is unknown whether {knob.reader} has read it already: {error.reason}", None
    if in_force is not False or case.was_set_at_start():
        return ("applied" if case.wanted == knob.value else "kept"), seen
    no_effect = "" if value is None else f"set to {value!r} inside this process, which has no effect: "
    return ("needs exec" if knob.read_at == "exec" else "too late"), no_effect + seen


def _unknown(case: _Case) -> _Reading:
    if case.knob.read_at == "any time":
        return _Reading(f"{case.knob.reader} reads it each time")
    return _Reading(f"it is unknown whether {case.knob.reader} has read it already")


def _at_start(case: _Case) -> _Reading:
    """Inspect a variable that only has an effect if it is set when the program starts."""
    started_with = case.process.started_with()
    if started_with is not None:
        before = started_with.get(case.knob.name)
        how = "not set" if before is None else "set" if before == case.value else repr(before)
        return _Reading(f"it was {how} when this program started", before == case.wanted)
    if case.value is None:
        return _Reading("it is not set, and it is read only when a program starts", in_force=False)
    return _Reading("/proc/self/environ does not show whether it was set when this program started")


def _by_malloc(kind: Kind) -> _Inspect:
    """Inspect a variable that only this allocator reads."""

    def inspect(case: _Case) -> _Reading:
        try:
            allocator = case.process.malloc()
        except NotSupported as error:
            raise _NoReader(error.reason) from None
        if allocator.kind == kind:
            return _at_start(case)
        name = allocator.path if allocator.kind == "unknown" else f"{allocator.kind} ({allocator.path})"
        raise _NoReader(f"malloc is served by {name}, which does not read it")

    return inspect


def _by_cache(name: str, where: str, capacity: Callable[[ThisProcess], int | None]) -> _Inspect:
    def inspect(case: _Case) -> _Reading:
        entries = capacity(case.process)
        if entries is None:
            return _Reading(f"{name} does not exist yet{where}")
        in_force = entries == _knobs.capacity(case.knob.name, case.wanted)
        return _Reading(f"{name} was made{where} with room for {entries} entries", in_force)

    return inspect


def _by_threads(case: _Case) -> _Reading:
    """Inspect a number of threads: a loaded library has already read it."""
    loaded = case.process.threads(case.knob.name)
    if not loaded:
        return _Reading("no library that reads it is loaded yet")
    # In a value such as "4,2" for nested regions, the first number is the one that libraries report.
    in_force = all(str(count) == case.wanted.split(",")[0].strip() for count in loaded.values())
    seen = "; ".join(f"{path} is loaded and uses {_knobs.threads_text(count)}" for path, count in loaded.items())
    return _Reading(seen, in_force)


def _by_grpc(case: _Case) -> _Reading:
    forks = case.process.grpc_forks()
    if forks is None:
        return _Reading("grpc has not been imported yet")
    in_force = forks == (case.wanted.lower() in ("1", "true", "yes"))
    return _Reading(f"grpc was imported {'with' if forks else 'without'} fork support", in_force)


def _by_cuda(read: _Inspect) -> _Inspect:
    def inspect(case: _Case) -> _Reading:
        state = case.process.cuda()
        if state == "not built in":
            raise _NoReader("the torch in this process was built without CUDA")
        if state == "not imported":
            return _Reading("torch has not been imported yet")
        return read(case) if state == "initialised" else _Reading("torch has not initialised CUDA yet")

    return inspect


def _by_cuda_allocator(case: _Case) -> _Reading:
    settings = case.process.cuda_allocator()
    seen = f"torch's allocator uses {settings!r}" if settings else "torch's allocator uses its defaults"
    return _Reading(seen, settings == case.wanted)


_INSPECTIONS: dict[str, _Inspect] = {
    _knobs.ONEDNN: _by_cache("oneDNN's primitive cache", "", lambda process: process.primitive_cache()),
    _knobs.IDEEP: _by_cache("ideep's cache of convolutions", " in this thread", lambda one: one.descriptor_cache()),
    **dict.fromkeys(_THREADS, _by_threads),
    "GRPC_ENABLE_FORK_SUPPORT": _by_grpc,
    **dict.fromkeys(_knobs.GLIBC, _by_malloc("glibc")),
    "MALLOC_CONF": _by_malloc("jemalloc"),
    _knobs.ALLOCATOR: _by_cuda(_by_cuda_allocator),
    _knobs.MODULES: _by_cuda(lambda _: _Reading("CUDA is initialised, and its driver has read it", in_force=False)),
    _knobs.PLANS: _by_cuda(lambda _: _Reading("CUDA is initialised; whether cuDNN was used is unknown")),
}


# The calling thread's OpenMP settings: its number of threads, and its thread pool.
#
# In the specification each thread has its own number of threads (``nthreads-var``, OpenMP 5.2 section 2.4), so the
# number can be capped in one thread without any effect on others.

#: ``omp_pause_soft``: settings made by ``omp_set_num_threads`` and similar functions stay.
_SOFT = 1


def cap_openmp(count: int) -> None:
    """Limit parallel regions that the calling thread starts to ``count`` threads.

    This changes only runtimes that the process has already loaded. There is none before torch or a similar library is
    imported, and none is found without ``/proc``.
    """
    for path in loaded_openmp():
        runtime = _open(path)
        if hasattr(runtime, "omp_set_num_threads") and runtime.omp_get_max_threads() > count:
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
        runtime: Any = _open(path) if "/libgomp" in path else None
        if hasattr(runtime, "omp_pause_resource_all"):
            runtime.omp_pause_resource_all(_SOFT)


def loaded_openmp() -> set[str]:
    """The files of the OpenMP runtimes that this process has loaded; empty without ``/proc``."""
    mappings = _proc.if_readable(_proc.maps) or ()
    return {mapping.name for mapping in mappings if _OPENMP.search(mapping.name)}


def _open(path: str) -> Any:
    """A library that is loaded; None if it was replaced on disk since."""
    import ctypes

    try:
        return ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
