"""When a model is replaced: policies are values that read a snapshot.

A policy has no clock, process or file of its own. The guard takes the readings, puts them into a :class:`Snapshot` and
asks the policy. So a policy is tested by giving it a snapshot.
"""

# Not `from __future__ import annotations`: these classes show modelguard as their module, where the names of their
# fields' types could not be resolved.
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from modelguard import _public, _units
from modelguard.errors import InvalidOption
from modelguard.lifecycle import _policy_hints
from modelguard.telemetry.reasons import Reason, ReasonKind

__all__ = ["TTL", "Errors", "MemoryGrowth", "MemoryLimit", "Modified", "Policy", "Snapshot", "Uses"]

#: A policy on memory needs this many consecutive readings: one reading may be the spike of a single call.
SAMPLES = 3

#: Bytes. Whoever writes ``MemoryGrowth(500)`` means megabytes; the service would reload every few seconds.
_LEAST_SIZE = 1_000_000


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


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The readings of one generation at one moment.

    Attributes:
        generation: Its number; the first is 1.
        age: Seconds since it began to take calls.
        uses: Calls and leases that have ended on it.
        consecutive_errors: Consecutive calls, up to the latest, that raised an ``Exception``.
        memory: The latest readings of private memory in bytes, oldest first, at most three,
            taken since the generation settled. Empty until then.
        baseline: Private memory when it settled, in bytes, None until then.
        limit: The effective memory limit of this process in bytes, None if there is none.
        jitter: A number in [0, 1), drawn once per process and generation.
        files: What is known about the paths that a policy watches.
        gauges: Figures that the model's adapter reads from the model (spaCy: ``lexemes``, ``strings``,
            ``index_bytes``).
        first_gauges: The same figures when the generation began to take calls.
    """

    generation: int = 1
    age: float = 0.0
    uses: int = 0
    consecutive_errors: int = 0
    memory: tuple[int, ...] = ()
    baseline: int | None = None
    limit: int | None = None
    jitter: float = 0.0
    files: Mapping[Path, FileChange] = field(default_factory=_nothing)
    gauges: Mapping[str, int] = field(default_factory=_nothing)
    first_gauges: Mapping[str, int] = field(default_factory=_nothing)

    @property
    def settled_memory(self) -> int | None:
        """The lowest of three consecutive readings in bytes, None while there are fewer."""
        return min(self.memory) if len(self.memory) >= SAMPLES else None


class Horizon(NamedTuple):
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
    #: Whether it asks for new weights (TTL, Modified), and not for a fresh process.
    renews: bool = False

    @abstractmethod
    def due(self, now: Snapshot) -> bool:
        """Return whether the generation should be replaced."""

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - an own policy may need the snapshot
        """Return how long the answer of :meth:`due` cannot change. By default the guard asks after every call."""
        return Horizon(uses=1, seconds=1.0)

    def reasons(self, now: Snapshot) -> tuple[Reason, ...]:
        """Name the policies that are due."""
        return (Reason(self.kind, repr(self)),) if self.due(now) else ()

    def parts(self) -> tuple["Policy", ...]:
        """Return the simple policies that it is made of."""
        return (self,)

    def futile(self, now: Snapshot) -> str | None:  # noqa: ARG002 - most policies have nothing to say
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


class _Value(Policy):
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
    raise InvalidOption("reload_on", given, why=why, fix=_policy_hints.fix_for(given))


class _Joined(_Value):
    members: tuple[Policy, ...]

    def __init__(self, members: tuple[Policy, ...]) -> None:
        self._set(members=members)

    @property
    def reads_memory(self) -> bool:  # type: ignore[override]
        return any(member.reads_memory for member in self.members)

    def horizon(self, now: Snapshot) -> Horizon:
        each = [member.horizon(now) for member in self.members]
        return Horizon(uses=min(one.uses for one in each), seconds=min(one.seconds for one in each))

    def parts(self) -> tuple["Policy", ...]:
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


def subset(policy: Policy | None, *, renews: bool) -> Policy | None:
    """The part of a policy that asks for new weights, or else the rest; None if there is no such part.

    Where processes share one copy, the process that loaded it decides by the first part, and each of the others by the
    second.
    """
    if isinstance(policy, _Any):
        kept = tuple(part for member in policy.members if (part := subset(member, renews=renews)) is not None)
        return _Any(kept) if kept else None
    if policy is None or all(part.renews for part in policy.parts()) is not renews:
        return None
    return policy


class TTL(_Value):
    """Due when the generation is older than ``age``.

    Args:
        age: Seconds, a ``timedelta``, or text such as ``"1h30m"``.
        jitter: Each process shortens the age by a random part of at most this much, so that workers do not reload in
            step: 0.1 makes ``TTL("1h")`` fire between 54 and 60 minutes. 0 to 1.

    Raises:
        InvalidOption: ``age`` is not a positive duration, or ``jitter`` is not in 0 to 1.
    """

    kind = "ttl"
    renews = True
    seconds: float
    jitter: float

    def __init__(self, age: _units.Duration, *, jitter: float = 0.1) -> None:
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
            raise InvalidOption(
                "jitter", jitter, why="must be a number from 0 to 1", fix="Write for example jitter=0.1."
            )
        self._set(seconds=_units.seconds(age, "age"), jitter=float(jitter))

    def due(self, now: Snapshot) -> bool:
        return now.age >= self._age(now)

    def horizon(self, now: Snapshot) -> Horizon:
        return Horizon(uses=math.inf, seconds=max(0.0, self._age(now) - now.age))

    def _age(self, now: Snapshot) -> float:
        return self.seconds * (1 - self.jitter * now.jitter)

    def __repr__(self) -> str:
        return f"TTL({_units.format_seconds(self.seconds)!r})"


class Uses(_Value):
    """Due when ``count`` calls or leases have ended on the generation.

    Raises:
        InvalidOption: ``count`` is not a whole number of at least 1.
    """

    kind = "uses"
    count: int

    def __init__(self, count: int) -> None:
        self._set(count=_units.whole_number(count, "count"))

    def due(self, now: Snapshot) -> bool:
        return now.uses >= self.count

    def horizon(self, now: Snapshot) -> Horizon:
        return Horizon(uses=max(1, self.count - now.uses), seconds=math.inf)

    def __repr__(self) -> str:
        return f"Uses({self.count})"


class Errors(_Value):
    """Due when this many consecutive calls have raised an ``Exception``.

    Interrupts and cancellations are not errors of the model and do not count.

    Raises:
        InvalidOption: ``consecutive`` is not a whole number of at least 1.
    """

    kind = "errors"
    consecutive: int

    def __init__(self, consecutive: int = 5) -> None:
        self._set(consecutive=_units.whole_number(consecutive, "consecutive"))

    def due(self, now: Snapshot) -> bool:
        return now.consecutive_errors >= self.consecutive

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - the guard asks after every error by itself
        return Horizon(uses=math.inf, seconds=math.inf)

    def __repr__(self) -> str:
        return f"Errors(consecutive={self.consecutive})"


class _Memory(_Value):
    reads_memory = True
    size: int | _units.Percentage

    def __init__(self, size: int | str) -> None:
        parsed = _units.size_or_percentage(size, "size")
        if isinstance(parsed, int) and parsed < _LEAST_SIZE:
            why = f"is {parsed} bytes, less than any process changes by in a second"
            raise InvalidOption("size", size, why=why, fix=f"Write the unit, as in '{parsed} MB'.")
        self._set(size=parsed)

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - readings come at the guard's own pace
        return Horizon(uses=math.inf, seconds=1.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_show(self.size)!r})"


class MemoryGrowth(_Memory):
    """Due when private memory has grown by ``size`` since this generation settled.

    A generation has settled when its predecessor is gone and it has taken ten calls or five seconds have passed. The
    median of the first three readings after that is the baseline. Later, three consecutive readings must be above the
    bound. Readings take at most 1 % of the time: one every 0.1 to 10 seconds, and at most about one a second without
    calls. Private memory is what this process alone has written. RSS is never used: it counts what a forked worker
    shares, and it does not fall after a peak.

    Args:
        size: Bytes, text such as ``"500 MB"`` or ``"1.5 GiB"``, or a percentage of the effective limit such as
            ``"20%"``.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage.
        NoMemoryLimit: A percentage was given and nothing limits this process (raised by ``guard``).
    """

    kind = "memory_growth"

    def due(self, now: Snapshot) -> bool:
        memory, bound = now.settled_memory, _bound(self.size, now)
        return memory is not None and now.baseline is not None and bound is not None and memory - now.baseline >= bound


class MemoryLimit(_Memory):
    """Due when this process's private memory has reached ``size`` in three consecutive readings.

    If the fresh generation alone is already above the bound, a reload cannot help. The policy is then ignored for that
    generation, and a ``PolicyFutile`` event says so.

    Args:
        size: Bytes, text such as ``"3 GB"``, or a percentage of the effective cgroup limit such as ``"80%"``. The
            percentage is of the whole limit: each of N workers in one container should ask for 80 % / N.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage.
        NoMemoryLimit: A percentage was given and nothing limits this process (raised by ``guard``).
    """

    kind = "memory_limit"

    def due(self, now: Snapshot) -> bool:
        memory, bound = now.settled_memory, _bound(self.size, now)
        return memory is not None and bound is not None and memory >= bound and self.futile(now) is None

    def futile(self, now: Snapshot) -> str | None:
        bound = _bound(self.size, now)
        if bound is None or now.baseline is None or now.baseline < bound:
            return None
        held, allowed = _units.format_bytes(now.baseline), _units.format_bytes(bound)
        return f"the process holds {held} with a fresh model, and the bound is {allowed}"


class Modified(_Value):
    """Due when a file or folder has changed since the generation's load began.

    A half-written file is never loaded: a change counts once the path has been unchanged for ``quiet``. If writers
    replace the path atomically (write beside it, then rename), set ``atomic=True``, and a change counts at once. While
    the path is missing, nothing is due. Name, inode, size and time of change are compared. Links are followed, except
    folders that are links inside a watched folder. Of a folder, at most 10,000 files are compared.

    Args:
        path: The file or folder. A folder counts as changed when any file below it does.
        quiet: Seconds, ``timedelta`` or text. Default two seconds.
        atomic: Whether writers always replace the path by a rename.

    Raises:
        InvalidOption: ``path`` is empty, ``quiet`` is not a duration, or ``atomic`` is not a bool.
    """

    kind = "modified"
    renews = True
    path: Path
    quiet: float
    atomic: bool

    def __init__(self, path: str | os.PathLike[str], *, quiet: _units.Duration = 2.0, atomic: bool = False) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidOption(
                "path", path, why="must be a path that is not empty", fix="Give the path that the loader reads."
            )
        if not isinstance(atomic, bool):
            raise InvalidOption("atomic", atomic, why="must be True or False", fix="Write atomic=True.")
        self._set(path=Path(path).absolute(), quiet=_units.seconds(quiet, "quiet", zero=True), atomic=atomic)

    def due(self, now: Snapshot) -> bool:
        seen = now.files.get(self.path)
        return seen is not None and seen.changed and (self.atomic or seen.quiet >= self.quiet)

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - a file may change at any time
        return Horizon(uses=math.inf, seconds=1.0)

    def __repr__(self) -> str:
        return f"Modified({str(self.path)!r})"


def _bound(size: int | _units.Percentage, now: Snapshot) -> int | None:
    if isinstance(size, _units.Percentage):
        return None if now.limit is None else int(now.limit * size.fraction)
    return size


def _show(size: int | _units.Percentage) -> str:
    return str(size) if isinstance(size, _units.Percentage) else _units.format_bytes(size)


_public.set_module(globals(), "modelguard")
