"""Whether a variable that is set now still takes effect: decided from what the process has really done.

This file judges; what it judges by is looked up by :class:`modelguard.environment._inside.ThisProcess`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from modelguard.environment.knobs import Knob
from modelguard.errors import NotSupported

if TYPE_CHECKING:
    from modelguard.environment.allocator import Kind, Serving

__all__ = ["Process", "State", "judge"]

State = Literal["applied", "kept", "too late", "needs exec", "not supported"]


class Process(Protocol):
    """What a process has done so far, as far as it bears on variables."""

    def started_with(self) -> Mapping[str, str] | None:
        """Its variables when the program started; None where they cannot be read any more."""
        ...

    def malloc(self) -> Serving:
        """Who serves ``malloc``.

        Raises:
            NotSupported: That cannot be told here.
        """
        ...

    def primitive_cache(self) -> int | None:
        """How many entries oneDNN's primitive cache was made for; None where there is none yet.

        Raises:
            NotSupported: oneDNN is loaded, and that cannot be told of this build.
        """
        ...

    def descriptor_cache(self) -> int | None:
        """The same for the calling thread's cache of convolutions in ideep."""
        ...

    def threads(self, name: str) -> Mapping[str, int]:
        """How many threads each loaded library uses that reads the variable of this name; keys are their files.

        Raises:
            NotSupported: What is loaded cannot be told here.
        """
        ...

    def grpc_forks(self) -> bool | None:
        """Whether gRPC was imported with support for forks; None where it has not been imported."""
        ...


@dataclass(frozen=True, slots=True)
class _Reading:
    """What became of a variable so far.

    Attributes:
        seen: What was seen, for people.
        read: Whether its reader has read it. Nobody can take that back.
        in_force: What the reader got, as one would write it into the variable; None where it got nothing.
    """

    seen: str
    read: bool = False
    in_force: str | None = None


#: Finds out what became of a knob's variable, which holds this value now.
_Look: TypeAlias = Callable[[Knob, str | None, Process], _Reading]


class _NobodyReads(Exception):
    """Nothing in this process reads the variable."""


def judge(knob: Knob, value: str | None, process: Process) -> tuple[State, str]:
    """Tell what becomes of a knob in a process.

    Args:
        knob: The knob.
        value: What its variable holds now; None where it is not set.
        process: What the process has done so far.

    Returns:
        The state, and what was seen that says so. ``"applied"`` says that the variable may be set now if it is not.
    """
    look = _LOOKS.get(knob.name, _exec if knob.read_at == "exec" else _unknown)
    try:
        reading = look(knob, value, process)
    except _NobodyReads as nobody:
        return "not supported", str(nobody)
    except NotSupported as error:
        reading = _Reading(f"whether {knob.reader} has read it already cannot be told: {error.reason}")
    wanted = knob.value if value is None else value
    if not reading.read or reading.in_force == wanted or _was_there(knob, value, process):
        return ("applied" if wanted == knob.value else "kept"), reading.seen
    placebo = "" if value is None else f"set to {value!r} inside this process, which does nothing: "
    return ("needs exec" if knob.read_at == "exec" else "too late"), placebo + reading.seen


def _was_there(knob: Knob, value: str | None, process: Process) -> bool:
    """Whether the variable held this when the program started, in time for every reader."""
    started_with = process.started_with()
    return value is not None and started_with is not None and started_with.get(knob.name) == value


def _unknown(knob: Knob, _value: str | None, _process: Process) -> _Reading:
    if knob.read_at == "any time":
        return _Reading(f"{knob.reader} reads it each time")
    return _Reading(f"whether {knob.reader} has read it already cannot be told")


def _exec(knob: Knob, value: str | None, process: Process) -> _Reading:
    started_with = process.started_with()
    if started_with is not None:
        before = started_with.get(knob.name)
        seen = "it was not set when this program started" if before is None else "it was set when this program started"
        if before not in (None, value):
            seen = f"it was {before!r} when this program started"
        return _Reading(seen, read=True, in_force=before)
    if value is None:
        return _Reading("it is not set, and it counts only when a program starts", read=True)
    return _Reading("whether it was set when this program started cannot be told: /proc/self/environ is not readable")


def _malloc(kind: Kind) -> _Look:
    """Judge a variable that only this allocator reads."""

    def look(knob: Knob, value: str | None, process: Process) -> _Reading:
        try:
            serving = process.malloc()
        except NotSupported as error:
            raise _NobodyReads(error.reason) from None
        if serving.kind != kind:
            raise _NobodyReads(f"malloc is served by {_name(serving)}, which does not read it")
        return _exec(knob, value, process)

    return look


def _name(serving: Serving) -> str:
    return f"{serving.kind} ({serving.path})" if serving.kind != "unknown" else serving.path


def _cache(name: str, where: str, capacity: Callable[[Process], int | None]) -> _Look:
    """Judge the room in one of oneDNN's caches."""

    def look(_knob: Knob, _value: str | None, process: Process) -> _Reading:
        made_for = capacity(process)
        if made_for is None:
            return _Reading(f"{name} has not been made yet{where}")
        return _Reading(f"{name} was made{where} with room for {made_for} entries", read=True, in_force=str(made_for))

    return look


def _threads(knob: Knob, value: str | None, process: Process) -> _Reading:
    """Judge a number of threads: a library that is loaded has read it."""
    loaded = process.threads(knob.name)
    if not loaded:
        return _Reading("no library that reads it is loaded yet")
    wanted = knob.value if value is None else value
    # A value such as "4,2" is for nested regions: the first number is the one that shows.
    as_wanted = all(str(count) == wanted.split(",")[0].strip() for count in loaded.values())
    seen = "; ".join(f"{path} is loaded and uses {_count(threads)}" for path, threads in loaded.items())
    return _Reading(seen, read=True, in_force=wanted if as_wanted else None)


def _count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _grpc(knob: Knob, value: str | None, process: Process) -> _Reading:
    forks = process.grpc_forks()
    if forks is None:
        return _Reading("grpc has not been imported yet")
    wanted = knob.value if value is None else value
    as_wanted = forks == (wanted.lower() in ("1", "true", "yes"))
    seen = f"grpc was imported with support for forks {'on' if forks else 'off'}"
    return _Reading(seen, read=True, in_force=wanted if as_wanted else None)


_LOOKS: dict[str, _Look] = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": _cache(
        "oneDNN's primitive cache", "", lambda process: process.primitive_cache()
    ),
    "LRU_CACHE_CAPACITY": _cache(
        "ideep's cache of convolutions", " in this thread", lambda process: process.descriptor_cache()
    ),
    "OMP_NUM_THREADS": _threads,
    "MKL_NUM_THREADS": _threads,
    "OPENBLAS_NUM_THREADS": _threads,
    "GRPC_ENABLE_FORK_SUPPORT": _grpc,
    "MALLOC_ARENA_MAX": _malloc("glibc"),
    "MALLOC_TRIM_THRESHOLD_": _malloc("glibc"),
    "MALLOC_MMAP_THRESHOLD_": _malloc("glibc"),
    "MALLOC_CONF": _malloc("jemalloc"),
}
