"""What a policy is: a value that reads a snapshot, and how policies are joined."""

import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, field
from datetime import tzinfo
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from modelguard import _public, _units
from modelguard.errors import InvalidOption
from modelguard.telemetry.reasons import Reason, ReasonKind

__all__ = [
    "Backoff",
    "Policy",
    "Snapshot",
]


# What to write where a policy is needed and something else was given.


_EXAMPLE = "Write for example TTL('1h') | MemoryGrowth('500 MB')."


def fix_for(given: object) -> str:
    """The fix to suggest for a value that was given instead of a policy."""
    if isinstance(given, type):
        return f"Write it with its argument: {given.__name__}(...)."
    if isinstance(given, list | tuple | set):
        return "Join policies with | (any of them) or & (all of them): TTL('1h') | Uses(50_000)."
    if inspect.isroutine(given):
        return "Write a subclass of Policy whose method due() decides, and give an instance of it."
    if isinstance(given, str):
        for name, read in (("TTL", _units.seconds), ("MemoryGrowth", _units.size_or_percentage)):
            with suppress(InvalidOption):
                read(given, "")
                return f"Write {name}({given!r})."
    if isinstance(given, int) and not isinstance(given, bool):
        return f"Write Uses({given}) for a number of calls, or TTL({given}) for seconds."
    return _EXAMPLE


# Not `from __future__ import annotations`: these classes show modelguard as their module, where the names of their
# fields' types could not be resolved.


#: A policy on memory needs this many consecutive readings: one reading may be the spike of a single call.
SAMPLES = 3


def _nothing() -> Mapping[Any, Any]:
    return MappingProxyType({})


class FileChange(NamedTuple):
    """What the guard knows about a watched path.

    Attributes:
        changed: Whether the path differs from what it was when the generation's load began.
        quiet: Seconds since the last change was seen.
    """

    changed: bool
    quiet: float


class ProbeAnswers(NamedTuple):
    """What the guard knows about what a probe returns.

    Attributes:
        changed: Whether it returns another value than just before the generation's load, often enough in a row.
        unsteady: Whether its values change too often to be sure of any.
    """

    changed: bool
    unsteady: bool = False


class Level(NamedTuple):
    """Readings of one figure since the generation settled, in bytes.

    Attributes:
        latest: The latest readings, oldest first, at most three.
        baseline: The median of the first three, which come before those; None until then.
    """

    latest: tuple[int, ...] = ()
    baseline: int | None = None

    @property
    def settled(self) -> int | None:
        """The lowest of three consecutive readings, None while there are fewer."""
        return min(self.latest) if len(self.latest) >= SAMPLES else None


_NOT_READ = Level()


class GpuMemory(NamedTuple):
    """What this process has on one GPU.

    Attributes:
        device: Its index in torch.
        total: Bytes that this process may take there.
        allocated: Memory in tensors.
        reserved: Memory that torch has taken from the device.
    """

    device: int
    total: int
    allocated: Level
    reserved: Level


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The readings of one generation at one moment.

    Attributes:
        generation: Its number; the first is 1.
        age: Seconds since it began to take calls.
        began: Wall clock when it began to take calls, in seconds since the epoch. ``time`` less ``age`` differs from it
            if the clock was set, or the machine slept.
        idle: Seconds for which no call has run or ended, as the regular checks have seen it.
        uses: Calls and leases that have ended on it.
        consecutive_errors: Consecutive calls, up to the latest, that raised an ``Exception``.
        fruitless_reloads: Reloads for errors in a row, up to this generation, that did not help: no call has succeeded
            since. 0 as soon as one has.
        memory: The latest readings of private memory in bytes, oldest first, at most three,
            taken since the generation settled. Empty until then.
        baseline: Private memory when it settled, in bytes, None until then.
        limit: The effective memory limit of this process in bytes, None if there is none.
        gpus: GPU memory of this process since the generation settled, one entry for each device; empty while the
            program has not initialised CUDA. None until the first reading, and if no policy reads it.
        pinned: Pinned host memory of this process, if torch reports it.
        jitter: A number in [0, 1), drawn once per process and generation.
        first: Whether it is the first generation, in a process that loaded it itself. Replicas that are started
            together are in step there.
        time: Wall clock, in seconds since the epoch.
        files: What is known about the paths that a policy watches.
        probes: What is known about the answers of the probes of ``Changed``.
        gauges: Figures that the model's adapter reads from the model (spaCy: ``lexemes``, ``strings``,
            ``index_bytes``).
        first_gauges: The same figures when the generation began to take calls.
    """

    generation: int = 1
    age: float = 0.0
    began: float = 0.0
    idle: float = 0.0
    uses: int = 0
    consecutive_errors: int = 0
    fruitless_reloads: int = 0
    memory: tuple[int, ...] = ()
    baseline: int | None = None
    limit: int | None = None
    gpus: tuple[GpuMemory, ...] | None = None
    pinned: Level = _NOT_READ
    jitter: float = 0.0
    first: bool = False
    time: float = 0.0
    files: Mapping[Path, FileChange] = field(default_factory=_nothing)
    probes: Mapping[Callable[..., object], ProbeAnswers] = field(default_factory=_nothing)
    gauges: Mapping[str, int] = field(default_factory=_nothing)
    first_gauges: Mapping[str, int] = field(default_factory=_nothing)

    @property
    def settled_memory(self) -> int | None:
        """The lowest of three consecutive readings in bytes, None while there are fewer."""
        return Level(self.memory).settled


class NextCheck(NamedTuple):
    """When a policy must be asked again: once ``uses`` calls have ended or ``seconds`` have passed."""

    uses: float
    seconds: float


class Policy(ABC):
    """Decides when a generation is over. Subclass it and write :meth:`due`; combine policies with ``|`` and ``&``.

    The guard calls :meth:`due` at the end of every call and once a second, so it should be fast. If it raises, the
    guard goes on without it and emits ``CallbackErrored``.
    """

    #: The word for it in events and metrics.
    kind: ClassVar[ReasonKind] = "custom"
    #: Whether it reads ``memory``, ``baseline`` or ``settled_memory`` of the snapshot: only then the guard takes
    #: readings.
    reads_memory: bool = False
    #: Whether it reads ``gpus`` or ``pinned`` of the snapshot.
    reads_gpu: bool = False
    #: Whether it asks for new weights (TTL, Modified, Changed), and not for a fresh process.
    renews: bool = False
    #: Whether it is due because the source of the model has changed (Modified, Changed).
    watches_source: bool = False
    #: Whether the model is released when it is due, and loaded again by the next call (Idle), and not replaced.
    unloads: bool = False
    #: Whether only the workers of an isolated function end when it is due (Idle with ``keep="mold"``).
    ends_workers: bool = False
    #: Whether it only restricts others that it is joined to by ``&`` (Between).
    restricts: bool = False

    @abstractmethod
    def due(self, now: Snapshot) -> bool:
        """Return whether the generation should be replaced."""

    def next_check(self, now: Snapshot) -> NextCheck:  # noqa: ARG002 - an own policy may need the snapshot
        """Return how long the answer of :meth:`due` cannot change. By default the guard asks after every call."""
        return NextCheck(uses=1, seconds=1.0)

    def reasons(self, now: Snapshot) -> tuple[Reason, ...]:
        """Name the policies that are due."""
        return (Reason(self.kind, repr(self)),) if self.due(now) else ()

    def parts(self) -> tuple["Policy", ...]:
        """Return the simple policies that it is made of."""
        return (self,)

    def ignored_because(self, now: Snapshot) -> str | None:  # noqa: ARG002 - most policies have nothing to say
        """Return why a reload could not help, None if it can."""
        return None

    def __or__(self, other: "Policy") -> "Policy":
        return _Any((self, _operand(other, "|")))

    def __and__(self, other: "Policy") -> "Policy":
        return _All((self, _operand(other, "&")))

    def __ror__(self, other: object) -> "Policy":
        return _Any((_operand(other, "|"), self))

    def __rand__(self, other: object) -> "Policy":
        return _All((_operand(other, "&"), self))

    def __bool__(self) -> bool:  # TTL("1h") or Uses(5) would be the first of the two
        why = "is a policy, which is neither true nor false"
        raise InvalidOption("reload_on", self, why=why, fix="Join policies with | and &, not with `or` and `and`.")


class Value(Policy):
    """A policy whose fields are set once. Written by hand, because six dataclasses would add 3 ms to the import."""

    def _set(self, **fields: object) -> None:
        vars(self).update(fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}: a policy is a value")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}: a policy is a value")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))


def _operand(given: object, sign: str) -> Policy:
    if isinstance(given, Policy):
        return given
    why = f"{sign} joins two policies, and this is {_units.kind_of(given)}"
    raise InvalidOption("reload_on", given, why=why, fix=fix_for(given))


class _Joined(Value):
    members: tuple[Policy, ...]

    def __init__(self, members: tuple[Policy, ...]) -> None:
        self._set(members=members)

    @property
    def reads_memory(self) -> bool:  # type: ignore[override]
        return any(member.reads_memory for member in self.members)

    @property
    def reads_gpu(self) -> bool:  # type: ignore[override]
        return any(member.reads_gpu for member in self.members)

    @property
    def restricts(self) -> bool:  # type: ignore[override]
        return all(member.restricts for member in self.members)

    @property
    def unloads(self) -> bool:  # type: ignore[override]
        return any(member.unloads for member in self.members)

    @property
    def ends_workers(self) -> bool:  # type: ignore[override]
        return any(member.ends_workers for member in self.members)

    def next_check(self, now: Snapshot) -> NextCheck:
        each = [member.next_check(now) for member in self.members]
        return NextCheck(uses=min(one.uses for one in each), seconds=min(one.seconds for one in each))

    def parts(self) -> tuple[Policy, ...]:
        return tuple(part for member in self.members for part in member.parts())


class _Any(_Joined):
    def due(self, now: Snapshot) -> bool:
        return any(member.due(now) for member in self.members)

    def reasons(self, now: Snapshot) -> tuple[Reason, ...]:
        return tuple(reason for member in self.members for reason in member.reasons(now))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.members))


class _All(_Joined):
    kind = "combination"

    def due(self, now: Snapshot) -> bool:
        return all(member.due(now) for member in self.members)

    def __repr__(self) -> str:
        return " & ".join(f"({member!r})" if isinstance(member, _Any) else repr(member) for member in self.members)


def alternatives(policy: Policy | None) -> tuple[Policy, ...]:
    """The policies that ``|`` joins, each of which is enough by itself; none for None."""
    if isinstance(policy, _Any):
        return tuple(one for member in policy.members for one in alternatives(member))
    return () if policy is None else (policy,)


def subset(policy: Policy | None, *, renews: bool, unloads: bool = False) -> Policy | None:
    """The part of a policy that asks for new weights, or else the rest; None if there is no such part.

    Where processes share one copy, the process that loaded it decides by the first part, and each of the others by the
    second. ``Idle`` is in neither, unless ``unloads`` asks for it: what others share is not released.
    """
    if isinstance(policy, _Any):
        parts = (subset(member, renews=renews, unloads=unloads) for member in policy.members)
        kept = tuple(part for part in parts if part is not None)
        return _Any(kept) if kept else None
    if policy is None or policy.unloads or policy.ends_workers:
        return policy if unloads else None
    asks_for_weights = all(part.renews for part in policy.parts() if not part.restricts)
    return policy if asks_for_weights is renews else None


def source_part(policy: Policy | None) -> Policy | None:
    """The part of a policy that is due only if the source of the model has changed; None if there is no such part.

    ``Modified(path) & Between(...)`` is such a part, and of ``(Changed(probe) | TTL("1h")) & Between(...)`` it is
    ``Changed(probe) & Between(...)``.
    """
    if isinstance(policy, _Any):
        kept = tuple(part for member in policy.members if (part := source_part(member)) is not None)
        return _Any(kept) if kept else None
    if isinstance(policy, _All):
        parts = [source_part(member) for member in policy.members]
        if all(part is None for part in parts):
            return None
        return _All(tuple(member if part is None else part for part, member in zip(parts, policy.members, strict=True)))
    return policy if policy is not None and policy.watches_source else None


# Time zones by name, and the machine's own.


_LOCAL = Path("/etc/localtime")


def check(name: str | None) -> str | None:
    """Check the name of a time zone; None is the machine's local time.

    Raises:
        InvalidOption: It is unknown.
    """
    if name is not None:
        named(name)
    return name


def named(name: str) -> tzinfo:
    """The time zone of this name.

    Raises:
        InvalidOption: It is unknown.
    """
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)  # cached
    except (OSError, TypeError, ValueError, LookupError) as error:
        fix = "Give a name such as 'Europe/Berlin', and install tzdata where the system has no time zones."
        raise InvalidOption("tz", name, why=f"is not a known time zone ({error})", fix=fix) from None


@lru_cache(maxsize=1)
def local() -> tzinfo:
    """The machine's time zone with its changes to daylight saving time: that of ``TZ``, else ``/etc/localtime``.

    Raises:
        InvalidOption: ``TZ`` is not the name of a time zone.
    """
    from zoneinfo import ZoneInfo

    name = os.environ.get("TZ", "").removeprefix(":")
    if name:
        try:
            return named(name)
        except InvalidOption:
            why = f"means local time, and the environment has TZ={name!r}, which is not the name of a time zone"
            raise InvalidOption("tz", None, why=why, fix="Write for example tz='Europe/Berlin'.") from None
    if not _LOCAL.exists():
        return named("UTC")
    with _LOCAL.open("rb") as file:
        return ZoneInfo.from_file(file)


# How long to wait after a failed load.


_STEEPEST = 100


@dataclass(frozen=True, init=False)
class Backoff:
    """Exponential and jittered waits: ``first``, then ``factor`` times as long after each failure, up to ``longest``.

    Each wait is drawn between half of that and all of it, so that workers whose loads failed together do not retry
    together.

    Args:
        first: Wait after the first failure. Default one second.
        longest: The longest wait. Default one minute.
        factor: Growth from one failure to the next, 1 to 100. Default 2.

    Raises:
        InvalidOption: A duration is not positive, ``longest`` is shorter than ``first``, ``factor`` not in 1 to 100.
    """

    first: float
    longest: float
    factor: float

    def __init__(self, first: _units.Duration = 1.0, longest: _units.Duration = 60.0, *, factor: float = 2.0) -> None:
        object.__setattr__(self, "first", _units.seconds(first, "first"))
        object.__setattr__(self, "longest", _units.seconds(longest, "longest"))
        if self.longest < self.first:
            raise InvalidOption(
                "longest", longest, why="must not be shorter than first", fix=f"Give at least {first!r}."
            )
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 <= factor <= _STEEPEST:
            raise InvalidOption("factor", factor, why="must be between 1 and 100", fix="Write for example factor=2.")
        object.__setattr__(self, "factor", float(factor))

    def seconds(self, failures: int, draw: float) -> float:
        """Wait after so many failures in a row; ``draw`` is a random number in [0, 1)."""
        exponent = min(failures - 1, 64)  # far beyond any `longest`, and safe from overflow
        whole = min(self.longest, self.first * self.factor**exponent)
        return whole * (0.5 + draw / 2)


_public.set_module(globals(), "modelguard")
