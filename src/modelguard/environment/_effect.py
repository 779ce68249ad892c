"""Decide whether a variable that is set now still takes effect, by what the process has actually done.

The facts come from :class:`modelguard.environment._self.ThisProcess`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from modelguard.environment import _capacities, _knobs_cuda
from modelguard.environment._knobs import Knob
from modelguard.errors import NotSupported

if TYPE_CHECKING:
    from modelguard.environment._allocator import AllocatorInForce
    from modelguard.environment._allocator_kinds import Kind

__all__ = ["Cuda", "ProcessHistory", "State", "effect_of"]

#: How far torch has come with CUDA in a process.
Cuda = Literal["not imported", "not built in", "not initialised", "initialised"]

State = Literal["applied", "kept", "invalid", "too late", "needs exec", "not supported"]


class ProcessHistory(Protocol):
    """What a process has done so far with the environment variables that presets set."""

    def started_with(self) -> Mapping[str, str] | None:
        """Its variables when the program started; None if they can no longer be read."""
        ...

    def malloc(self) -> AllocatorInForce:
        """The library that serves ``malloc``.

        Raises:
            NotSupported: The library cannot be determined here.
        """
        ...

    def primitive_cache(self) -> int | None:
        """The capacity of oneDNN's primitive cache, in entries; None if it does not exist yet.

        Raises:
            NotSupported: oneDNN is loaded, but this build has no symbol for its cache.
        """
        ...

    def descriptor_cache(self) -> int | None:
        """The capacity of the calling thread's cache of convolutions in ideep; None if it does not exist yet."""
        ...

    def threads(self, name: str) -> Mapping[str, int]:
        """The number of threads of each loaded library that reads the variable of this name, by library file.

        Raises:
            NotSupported: The loaded libraries cannot be listed here.
        """
        ...

    def grpc_forks(self) -> bool | None:
        """Whether gRPC was imported with fork support; None if it has not been imported."""
        ...

    def cuda(self) -> Cuda:
        """How far torch has come with CUDA."""
        ...

    def cuda_allocator(self) -> str:
        """The settings that torch's allocator has read, in the notation of its variable. Only once CUDA is initialised.

        Raises:
            NotSupported: This torch does not report them.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Reading:
    """What has happened to a variable so far.

    Attributes:
        seen: The evidence, as text for users.
        read: Whether its reader has read it. This cannot be undone.
        in_force: The value that the reader uses, in the variable's notation; None if it found none.
    """

    seen: str
    read: bool = False
    in_force: str | None = None


#: Finds out what has happened to a knob's variable, given its current value.
_Inspect: TypeAlias = Callable[[Knob, str | None, ProcessHistory], _Reading]


class _NoReader(Exception):
    """Nothing in this process reads the variable."""


def effect_of(knob: Knob, value: str | None, process: ProcessHistory) -> tuple[State, str]:
    """Decide whether a knob takes effect in a process.

    Args:
        knob: The knob.
        value: The current value of its variable; None if it is not set.
        process: What the process has done so far.

    Returns:
        The state and the evidence. ``"applied"`` means that the variable may be set now if it is not set yet.
    """
    if value is not None and (crash := _capacities.why_unusable(knob.name, value)) is not None:
        # Whatever has happened so far: ideep reads the variable again in each new thread.
        return "invalid", f"{crash}; remove it, or set it to 1 or more before the program starts"
    inspect = _INSPECTIONS.get(knob.name, _inspect_start if knob.read_at == "exec" else _inspect_unknown)
    try:
        reading = inspect(knob, value, process)
    except _NoReader as error:
        return "not supported", str(error)
    except NotSupported as error:
        reading = _Reading(f"it is unknown whether {knob.reader} has read it already: {error.reason}")
    wanted = knob.value if value is None else value
    if not reading.read or reading.in_force == wanted or _was_set_at_start(knob, value, process):
        return ("applied" if wanted == knob.value else "kept"), reading.seen
    no_effect = "" if value is None else f"set to {value!r} inside this process, which has no effect: "
    return ("needs exec" if knob.read_at == "exec" else "too late"), no_effect + reading.seen


def _was_set_at_start(knob: Knob, value: str | None, process: ProcessHistory) -> bool:
    """Whether the variable held this value when the program started, in time for every reader."""
    started_with = process.started_with()
    return value is not None and started_with is not None and started_with.get(knob.name) == value


def _inspect_unknown(knob: Knob, _value: str | None, _process: ProcessHistory) -> _Reading:
    if knob.read_at == "any time":
        return _Reading(f"{knob.reader} reads it each time")
    return _Reading(f"it is unknown whether {knob.reader} has read it already")


def _inspect_start(knob: Knob, value: str | None, process: ProcessHistory) -> _Reading:
    """Inspect a variable that only has an effect if it is set when the program starts."""
    started_with = process.started_with()
    if started_with is not None:
        before = started_with.get(knob.name)
        seen = "it was not set when this program started" if before is None else "it was set when this program started"
        if before not in (None, value):
            seen = f"it was {before!r} when this program started"
        return _Reading(seen, read=True, in_force=before)
    if value is None:
        return _Reading("it is not set, and it is read only when a program starts", read=True)
    return _Reading("/proc/self/environ does not show whether it was set when this program started")


def _inspect_malloc(kind: Kind) -> _Inspect:
    """Inspect a variable that only this allocator reads."""

    def inspect(knob: Knob, value: str | None, process: ProcessHistory) -> _Reading:
        try:
            allocator = process.malloc()
        except NotSupported as error:
            raise _NoReader(error.reason) from None
        if allocator.kind != kind:
            raise _NoReader(f"malloc is served by {_name(allocator)}, which does not read it")
        return _inspect_start(knob, value, process)

    return inspect


def _name(allocator: AllocatorInForce) -> str:
    return f"{allocator.kind} ({allocator.path})" if allocator.kind != "unknown" else allocator.path


def _inspect_cache(name: str, where: str, capacity: Callable[[ProcessHistory], int | None]) -> _Inspect:
    """Inspect the capacity of one of oneDNN's caches."""

    def inspect(knob: Knob, value: str | None, process: ProcessHistory) -> _Reading:
        entries = capacity(process)
        if entries is None:
            return _Reading(f"{name} does not exist yet{where}")
        wanted = knob.value if value is None else value
        as_wanted = entries == _capacities.capacity(knob.name, wanted)
        seen = f"{name} was made{where} with room for {entries} entries"
        return _Reading(seen, read=True, in_force=wanted if as_wanted else str(entries))

    return inspect


def _inspect_threads(knob: Knob, value: str | None, process: ProcessHistory) -> _Reading:
    """Inspect a number of threads: a loaded library has already read it."""
    loaded = process.threads(knob.name)
    if not loaded:
        return _Reading("no library that reads it is loaded yet")
    wanted = knob.value if value is None else value
    # In a value such as "4,2" for nested regions, the first number is the one that libraries report.
    as_wanted = all(str(count) == wanted.split(",")[0].strip() for count in loaded.values())
    seen = "; ".join(f"{path} is loaded and uses {_count(threads)}" for path, threads in loaded.items())
    return _Reading(seen, read=True, in_force=wanted if as_wanted else None)


def _count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _inspect_grpc(knob: Knob, value: str | None, process: ProcessHistory) -> _Reading:
    forks = process.grpc_forks()
    if forks is None:
        return _Reading("grpc has not been imported yet")
    wanted = knob.value if value is None else value
    as_wanted = forks == (wanted.lower() in ("1", "true", "yes"))
    seen = f"grpc was imported {'with' if forks else 'without'} fork support"
    return _Reading(seen, read=True, in_force=wanted if as_wanted else None)


def _inspect_cuda(read: Callable[[ProcessHistory], _Reading]) -> _Inspect:
    """Inspect a variable that is read once torch has initialised CUDA, or later."""

    def inspect(_knob: Knob, _value: str | None, process: ProcessHistory) -> _Reading:
        state = process.cuda()
        if state == "not built in":
            raise _NoReader("the torch in this process was built without CUDA")
        if state == "not imported":
            return _Reading("torch has not been imported yet")
        return read(process) if state == "initialised" else _Reading("torch has not initialised CUDA yet")

    return inspect


def _read_allocator(process: ProcessHistory) -> _Reading:
    settings = process.cuda_allocator()
    seen = f"torch's allocator uses {settings!r}" if settings else "torch's allocator uses its defaults"
    return _Reading(seen, read=True, in_force=settings or None)


_INSPECTIONS: dict[str, _Inspect] = {
    _capacities.ONEDNN: _inspect_cache("oneDNN's primitive cache", "", lambda process: process.primitive_cache()),
    _capacities.IDEEP: _inspect_cache(
        "ideep's cache of convolutions", " in this thread", lambda process: process.descriptor_cache()
    ),
    "OMP_NUM_THREADS": _inspect_threads,
    "MKL_NUM_THREADS": _inspect_threads,
    "OPENBLAS_NUM_THREADS": _inspect_threads,
    "GRPC_ENABLE_FORK_SUPPORT": _inspect_grpc,
    "MALLOC_ARENA_MAX": _inspect_malloc("glibc"),
    "MALLOC_TRIM_THRESHOLD_": _inspect_malloc("glibc"),
    "MALLOC_MMAP_THRESHOLD_": _inspect_malloc("glibc"),
    "MALLOC_CONF": _inspect_malloc("jemalloc"),
    _knobs_cuda.ALLOCATOR: _inspect_cuda(_read_allocator),
    _knobs_cuda.MODULES: _inspect_cuda(
        lambda _: _Reading("CUDA is initialised, and its driver has read it", read=True)
    ),
    _knobs_cuda.PLANS: _inspect_cuda(lambda _: _Reading("CUDA is initialised; whether cuDNN was used is unknown")),
}
