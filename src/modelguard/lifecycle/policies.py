"""When a model is replaced: policies are values that read a snapshot.

A policy has no clock, no process and no file of its own. The guard takes the readings, puts them into a
:class:`Snapshot`, and asks. So every policy is tested by handing it a snapshot.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from modelguard import _units
from modelguard.errors import InvalidOption

__all__ = ["TTL", "Errors", "MemoryGrowth", "MemoryLimit", "Modified", "Policy", "Snapshot", "Uses"]

#: A verdict on memory needs this many readings in a row: one reading may be a spike of a single call.
SAMPLES = 3


def _nothing() -> Mapping[Any, Any]:
    return MappingProxyType({})


class FileChange(NamedTuple):
    """What the guard saw of a watched path.

    Attributes:
        changed: Whether the path differs from what it was when the generation's load began.
        quiet: Seconds since it was last seen to change.
    """

    changed: bool
    quiet: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The readings of one generation at one moment.

    Attributes:
        generation: Its number; the first is 1.
        age: Seconds since it began to serve.
        uses: Calls and leases that have ended on it.
        consecutive_errors: Calls in a row, up to the last, that raised an ``Exception``.
        memory: The latest readings of private memory (bytes), oldest first, at most three,
            taken since the generation settled. Empty until then.
        baseline: Private memory when it settled, None until then.
        limit: The effective memory limit of this process in bytes, None if there is none.
        jitter: A number in [0, 1) drawn once per process and generation.
        files: What was seen of the paths that a policy watches.
        gauges: Figures that the model's adapter reads off the model (spaCy: ``lexemes``, ``strings``, ``index_bytes``).
        first_gauges: The same figures when the generation began to serve.
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
        """The lowest of three readings in a row, None while there are fewer."""
        return min(self.memory) if len(self.memory) >= SAMPLES else None


class Horizon(NamedTuple):
    """How long a policy need not be asked again: until ``uses`` calls have ended or ``seconds`` have passed."""

    uses: float
    seconds: float


class Policy(ABC):
    """When is a generation over? Subclass it and write :meth:`due`; combine with ``|`` and ``&``."""

    #: Whether it reads ``Snapshot.memory``, so that the guard takes the readings.
    reads_memory: bool = False
    #: Whether its end of a generation means new weights (TTL, Modified), and not a process that is the worse for wear.
    renews: bool = False

    @abstractmethod
    def due(self, now: Snapshot) -> bool:
        """Tell whether the generation should be replaced."""

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - an own policy may need the snapshot
        """Tell how long the answer of :meth:`due` cannot change: by default it is asked after every call."""
        return Horizon(uses=1, seconds=1.0)

    def reasons(self, now: Snapshot) -> tuple[str, ...]:
        """Name the policies that are due."""
        return (repr(self),) if self.due(now) else ()

    def parts(self) -> tuple[Policy, ...]:
        """List the simple policies that it is made of."""
        return (self,)

    def futile(self, now: Snapshot) -> str | None:  # noqa: ARG002 - most policies have nothing to say
        """Tell why a reload could not help, None if it can."""
        return None

    def __or__(self, other: Policy) -> Policy:
        return _Any(_operand(self, other, "|"))

    def __and__(self, other: Policy) -> Policy:
        return _All(_operand(self, other, "&"))


class _Value(Policy):
    """A policy whose fields are set once. Written out, because six dataclasses would cost the import 3 ms."""

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


def _operand(left: Policy, right: object, sign: str) -> tuple[Policy, Policy]:
    if not isinstance(right, Policy):
        raise InvalidOption(
            "reload_on",
            right,
            why=f"{sign} joins policies, and this is a {type(right).__name__}",
            fix="Write for example TTL('1h') | Uses(50_000).",
        )
    return left, right


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

    def parts(self) -> tuple[Policy, ...]:
        return tuple(part for member in self.members for part in member.parts())


class _Any(_Joined):
    def due(self, now: Snapshot) -> bool:
        return any(member.due(now) for member in self.members)

    def reasons(self, now: Snapshot) -> tuple[str, ...]:
        return tuple(reason for member in self.members for reason in member.reasons(now))

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.members))


class _All(_Joined):
    def due(self, now: Snapshot) -> bool:
        return all(member.due(now) for member in self.members)

    def __repr__(self) -> str:
        return " & ".join(f"({member!r})" if isinstance(member, _Any) else repr(member) for member in self.members)


def share(policy: Policy | None, *, renews: bool) -> Policy | None:
    """The part of a policy that asks for new weights, or else the rest; None if there is no such part.

    Where many processes share one copy, the process that made it decides on the one, and each of them on the other.
    """
    if isinstance(policy, _Any):
        kept = tuple(part for member in policy.members if (part := share(member, renews=renews)) is not None)
        return _Any(kept) if kept else None
    if policy is None or all(part.renews for part in policy.parts()) is not renews:
        return None
    return policy


class TTL(_Value):
    """Due when the generation is older than ``age``.

    Args:
        age: Seconds, a ``timedelta``, or text such as ``"1h30m"``.
        jitter: Each process takes off a random share of up to this much, so that workers do not reload in step:
            0.1 makes ``TTL("1h")`` fire between 54 and 60 minutes. 0 to 1.

    Raises:
        InvalidOption: ``age`` is not a positive duration, or ``jitter`` is not in 0 to 1.
    """

    renews = True
    seconds: float
    jitter: float

    def __init__(self, age: _units.Duration, *, jitter: float = 0.1) -> None:
        if isinstance(jitter, bool) or not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
            raise InvalidOption("jitter", jitter, why="it is a share of the age", fix="Give a number from 0 to 1.")
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

    count: int

    def __init__(self, count: int) -> None:
        _whole("count", count)
        self._set(count=count)

    def due(self, now: Snapshot) -> bool:
        return now.uses >= self.count

    def horizon(self, now: Snapshot) -> Horizon:
        return Horizon(uses=max(1, self.count - now.uses), seconds=math.inf)

    def __repr__(self) -> str:
        return f"Uses({self.count})"


class Errors(_Value):
    """Due when this many calls in a row have raised an ``Exception``.

    Interrupts and cancellations are not errors of the model and do not count.

    Raises:
        InvalidOption: ``consecutive`` is not a whole number of at least 1.
    """

    consecutive: int

    def __init__(self, consecutive: int = 5) -> None:
        _whole("consecutive", consecutive)
        self._set(consecutive=consecutive)

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
        self._set(size=_units.size_or_percentage(size, "size"))

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - readings come at the guard's own pace
        return Horizon(uses=math.inf, seconds=1.0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_show(self.size)!r})"


class MemoryGrowth(_Memory):
    """Due when private memory has grown by ``size`` since this generation settled.

    A generation has settled when its predecessor is gone and it has served a little (ten calls or five seconds).
    The verdict needs three readings in a row above the bound. Private memory is what this process alone
    has written: never RSS, which counts what a forked worker shares and does not fall after a peak.

    Args:
        size: Bytes, text such as ``"500 MB"`` or ``"1.5 GiB"``, or a share of the effective limit such as ``"20%"``.

    Raises:
        InvalidOption: ``size`` is not a positive size.
        NoMemoryLimit: A share was given and nothing limits this process (raised by ``guard``).
    """

    def due(self, now: Snapshot) -> bool:
        memory, bound = now.settled_memory, _bound(self.size, now)
        return memory is not None and now.baseline is not None and bound is not None and memory - now.baseline >= bound


class MemoryLimit(_Memory):
    """Due when this process's private memory has reached ``size``, by three readings in a row.

    If the fresh generation alone is already above the bound, a reload cannot help: the policy then stays silent for
    that generation, and a ``PolicyFutile`` event says so.

    Args:
        size: Bytes, text such as ``"3 GB"``, or a share of the effective cgroup limit such as ``"80%"``. The share is
            of the whole limit: N workers in one container should ask for a share of 80 % / N each.

    Raises:
        InvalidOption: ``size`` is not a positive size.
        NoMemoryLimit: A share was given and nothing limits this process (raised by ``guard``).
    """

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

    A half-written file is never loaded: a change counts once the path has been seen unchanged for ``quiet``. Writers
    that replace the path atomically (write beside it, then rename) may say ``atomic=True``, and then a change counts
    at once. While the path is missing, nothing is due.

    Args:
        path: The file or folder. A folder counts as changed when any file below it does.
        quiet: Seconds, ``timedelta`` or text. Default two seconds.
        atomic: Whether writers always replace the path by a rename.

    Raises:
        InvalidOption: ``path`` is empty or ``quiet`` is not a duration.
    """

    renews = True
    path: Path
    quiet: float
    atomic: bool

    def __init__(self, path: str | os.PathLike[str], *, quiet: _units.Duration = 2.0, atomic: bool = False) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidOption("path", path, why="it names no file", fix="Give the path that the loader reads.")
        self._set(path=Path(path).absolute(), quiet=_units.seconds(quiet, "quiet", zero=True), atomic=atomic)

    def due(self, now: Snapshot) -> bool:
        seen = now.files.get(self.path)
        return seen is not None and seen.changed and (self.atomic or seen.quiet >= self.quiet)

    def horizon(self, now: Snapshot) -> Horizon:  # noqa: ARG002 - a file may change at any time
        return Horizon(uses=math.inf, seconds=1.0)

    def __repr__(self) -> str:
        return f"Modified({str(self.path)!r})"


def _whole(argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidOption(argument, value, why="it counts calls", fix="Give a whole number of at least 1.")


def _bound(size: int | _units.Percentage, now: Snapshot) -> int | None:
    if isinstance(size, _units.Percentage):
        return None if now.limit is None else int(now.limit * size.fraction)
    return size


def _show(size: int | _units.Percentage) -> str:
    return str(size) if isinstance(size, _units.Percentage) else _units.format_bytes(size)
