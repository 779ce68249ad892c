"""When a model is replaced or released: policies are values that read a snapshot.

A policy has no clock, process or file of its own. The guard takes the readings, puts them into a :class:`Snapshot` and
asks the policy. So a policy is tested by giving it a snapshot.
"""

import inspect
import itertools
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, field
from datetime import tzinfo
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from modelguard import _public, _units
from modelguard.errors import InvalidOption
from modelguard.telemetry.reasons import Reason, ReasonKind

__all__ = [
    "TTL",
    "Backoff",
    "Between",
    "Changed",
    "Errors",
    "GpuMemoryGrowth",
    "GpuMemoryLimit",
    "Idle",
    "MemoryGrowth",
    "MemoryLimit",
    "Modified",
    "Policy",
    "Snapshot",
    "Uses",
]


# Not `from __future__ import annotations`: these classes show modelguard as their module, where the names of their
# fields' types could not be resolved.


# What to write where a policy is needed and something else was given.


#: Of a cron expression: minute, hour, day of the month, month, day of the week.
CRON_FIELDS = 5


def fix_for(given: object) -> str:
    """The fix to suggest for a value that was given instead of a policy."""
    if isinstance(given, type):
        return f"Write it with its argument: {given.__name__}(...)."
    if isinstance(given, list | tuple | set):
        return "Join policies with | (any of them) or & (all of them): TTL('1h') | Uses(50_000)."
    if inspect.isroutine(given):
        return "Write a subclass of Policy whose method due() decides, and give an instance of it."
    if isinstance(given, int) and not isinstance(given, bool):
        return f"Write Uses({given}) for a number of calls, or TTL({given}) for seconds."
    meant = _meant_by(given)
    return f"Write {meant}({given!r})." if meant else "Write for example TTL('1h') | MemoryGrowth('500 MB')."


def _meant_by(given: Any) -> str:
    for name, read in (("TTL", _units.seconds), ("MemoryGrowth", _units.size_or_percentage)):
        with suppress(InvalidOption):
            read(given, "")
            return name
    if isinstance(given, str) and len(given.split()) == CRON_FIELDS:
        return "Cron"
    return "Modified" if isinstance(given, os.PathLike) or (isinstance(given, str) and os.sep in given) else ""


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
        idle: Seconds for which no call has run or ended, as the regular checks have seen it. 0 in a forked process for
            a model that its parent has loaded.
        uses: Calls and leases that have ended on it.
        consecutive_errors: Consecutive calls, up to the latest, that raised an ``Exception``; see :class:`Errors`.
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

    __ror__, __rand__ = __or__, __and__  # both refuse what is no policy

    def __bool__(self) -> bool:  # TTL("1h") or Uses(5) would be the first of the two
        why = "is a policy, which is neither true nor false"
        raise InvalidOption("reload_on", self, why=why, fix="Join policies with | and &, not with `or` and `and`.")


class Value(Policy):
    """A policy whose fields are set once. Written by hand, because six dataclasses would add 3 ms to the import."""

    #: Seconds after which it must be asked again, whatever the calls do.
    _look: ClassVar[float] = 1.0

    def next_check(self, now: Snapshot) -> NextCheck:  # noqa: ARG002 - what most of them read changes at any time
        return NextCheck(uses=math.inf, seconds=self._look)

    def _set(self, **fields: object) -> None:
        vars(self).update(fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}: a policy is a value")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))


#: What holds of joined policies if it holds of one of them.
_OF_ANY = ("reads_memory", "reads_gpu", "unloads", "ends_workers")


def _operand(given: object, sign: str) -> Policy:
    if isinstance(given, Policy):
        return given
    why = f"{sign} joins two policies, and this is {_units.kind_of(given)}"
    raise InvalidOption("reload_on", given, why=why, fix=fix_for(given))


class _Joined(Value):
    members: tuple[Policy, ...]

    def __init__(self, members: tuple[Policy, ...]) -> None:
        flags = {flag: any(getattr(member, flag) for member in members) for flag in _OF_ANY}
        self._set(members=members, restricts=all(member.restricts for member in members), **flags)

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
    """The policies each of which is enough by itself, as ``A & C`` and ``B & C`` of ``(A | B) & C``; none for None."""
    if isinstance(policy, _Any):
        return tuple(one for member in policy.members for one in alternatives(member))
    if isinstance(policy, _All):
        found = tuple(map(_All, itertools.product(*map(alternatives, policy.members))))
        return found if len(found) > 1 else (policy,)
    return () if policy is None else (policy,)


def _any_of(kept: tuple[Policy, ...]) -> Policy | None:
    return _Any(kept) if len(kept) > 1 else next(iter(kept), None)


def subset(policy: Policy | None, *, renews: bool, unloads: bool = False) -> Policy | None:
    """The part of a policy that asks for new weights, or else the rest; None if there is no such part.

    Where processes share one copy, the process that loaded it decides by the first part, and each of the others by the
    second. ``Idle`` is in neither, unless ``unloads`` asks for it: what others share is not released.
    """

    def belongs(member: Policy) -> bool:
        if member.unloads or member.ends_workers:
            return unloads
        return all(part.renews for part in member.parts() if not part.restricts) is renews

    return _any_of(tuple(filter(belongs, alternatives(policy))))


def source_part(policy: Policy | None) -> Policy | None:
    """The part of a policy that is due only if the source of the model has changed; None if there is no such part.

    ``Modified(path) & Between(...)`` is such a part, and of ``(Changed(probe) | TTL("1h")) & Between(...)`` it is
    ``Changed(probe) & Between(...)``.
    """
    every = alternatives(policy)
    return _any_of(tuple(one for one in every if any(part.watches_source for part in one.parts())))


# Time zones by name, and the machine's own.


_LOCAL = Path("/etc/localtime")


def zone_named(name: str) -> tzinfo:
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
def local_zone() -> tzinfo:
    """The machine's time zone with its changes to daylight saving time: that of ``TZ``, else ``/etc/localtime``.

    Raises:
        InvalidOption: ``TZ`` is not the name of a time zone.
    """
    from zoneinfo import ZoneInfo

    name = os.environ.get("TZ", "").removeprefix(":")
    if name:
        try:
            return zone_named(name)
        except InvalidOption:
            why = f"means local time, and the environment has TZ={name!r}, which is not the name of a time zone"
            raise InvalidOption("tz", None, why=why, fix="Write for example tz='Europe/Berlin'.") from None
    if not _LOCAL.exists():
        return zone_named("UTC")
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
        vars(self).update(
            first=_units.seconds(first, "first"),
            longest=_units.seconds(longest, "longest"),
            factor=_units.number(factor, "factor", at_least=1, most=_STEEPEST, fix="Write for example factor=2."),
        )
        if self.longest < self.first:
            fix = f"Give at least {first!r}."
            raise InvalidOption("longest", longest, why="must not be shorter than first", fix=fix)

    def seconds(self, failures: int, draw: float) -> float:
        """Wait after so many failures in a row; ``draw`` is a random number in [0, 1)."""
        exponent = min(failures - 1, 64)  # far beyond any `longest`, and safe from overflow
        whole = min(self.longest, self.first * self.factor**exponent)
        return whole * (0.5 + draw / 2)


# Policies that watch where the model comes from: ``Modified`` and ``Changed``.


def share(value: object, argument: str, *, example: float = 0.1) -> float:
    """Check a share, from 0 to 1.

    Raises:
        InvalidOption: It is none.
    """
    fix = f"Write for example {argument}={example}."
    if isinstance(value, int | float) and 1 < value <= 100:  # noqa: PLR2004 - of a hundred
        fix = f"Write {argument}={value / 100:g}."
    return _units.number(value, argument, at_least=0, most=1, fix=fix)


def _check_path(path: object) -> None:
    """Check an argument ``path``.

    Raises:
        InvalidOption: It is not one path, or is empty.
    """
    why, fix = "", "Give the path that the loader reads."
    if isinstance(path, list | tuple | set | frozenset):
        why, fix = f"must be one path, not {_units.kind_of(path)}", 'Join policies: Modified("a") | Modified("b").'
    elif not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        why = f"must be text or a path, not {_units.kind_of(path)}"
    elif not os.fspath(path):
        why = "must be a path that is not empty"
    else:
        why = _units.no_path(os.fspath(path))
    if why:
        raise InvalidOption("path", path, why=why, fix=fix)


#: Seconds without a change after which a path counts as written.
_QUIET = 2.0


class Modified(Value):
    """Due when a file or folder has changed since the generation's load began.

    A half-written file is never loaded: a change counts once the path has been unchanged for ``quiet``. If writers
    replace the path atomically (write beside it, then rename), set ``atomic=True``, and a change counts at once. While
    the path is missing, nothing is due. Name, inode, size and time of change are compared. Links are followed, also to
    folders inside a watched folder. Of a folder, the first 10,000 files are compared; ``PolicyNeverFires`` warns of one
    that has more.

    Args:
        path: The file or folder. A folder counts as changed when any file below it does.
        quiet: Seconds, ``timedelta`` or text. Default two seconds.
        atomic: Whether writers always replace the path by a rename.
        spread: Each process waits for a random part of this time on top, so that replicas which see the change at the
            same moment do not load in step. With forty times the length of a load, about one in forty loads at a time.
            Default zero.

    Raises:
        InvalidOption: ``path`` is not one path or is empty, ``quiet`` or ``spread`` is not a duration, or ``atomic`` is
            not a bool.
    """

    kind = "modified"
    renews = True
    watches_source = True
    path: Path
    quiet: float
    atomic: bool
    spread: float

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        quiet: _units.Duration = _QUIET,
        atomic: bool = False,
        spread: _units.Duration = 0.0,
    ) -> None:
        _check_path(path)
        if atomic is True and quiet != _QUIET:
            why = "is not waited for with atomic=True, which says that a change is complete at once"
            raise InvalidOption("quiet", quiet, why=why, fix="Leave one of them out.")
        self._set(
            path=Path(path).absolute(),
            quiet=_units.seconds(quiet, "quiet", zero=True),
            atomic=_units.flag(atomic, "atomic"),
            spread=_units.seconds(spread, "spread", zero=True),
        )

    def due(self, now: Snapshot) -> bool:
        seen = now.files.get(self.path)
        wait = (0.0 if self.atomic else self.quiet) + self.spread * now.jitter
        return seen is not None and seen.changed and seen.quiet >= wait

    def __repr__(self) -> str:
        return f"Modified({str(self.path)!r})"


class Changed(Value):
    """Due when ``probe`` returns another value than it did just before the generation's loader ran.

    The probe is a cheap function that returns a value which changes with the source of the model: an ETag, the version
    behind an alias of a registry, a revision, a row of a table. It is called in a thread of its own, never inside a
    call, with no lock held. A change counts when two polls in a row have returned the same new value; the second one
    comes after a tenth of ``every`` (at least a second).

    A probe that raises, returns None or takes longer than ``timeout`` is reported (``CallbackErrored``) once, until it
    has worked ten times in a row. It never causes a reload, and is asked again at the next poll. If a change that was
    loaded lasts for fewer than ten polls, the next one needs twice as many equal answers, up to 64. So a probe whose
    value keeps changing, or that asks servers which disagree, causes a few reloads and then none; ``PolicyIgnored``
    reports that.

    Args:
        probe: A function without arguments, which may be ``async``. Of a pool: a function of the key. What it returns
            is compared by ``==``.
        every: How often it is asked: seconds, a ``timedelta``, or text such as ``"1m"``.
        jitter: Each pause is shortened by a random part of at most this much, so that replicas do not ask together.
            0 to 1.
        timeout: How long an answer may take. A load waits as long for the value that it starts from. A call that takes
            longer is left behind in its thread, at most three at a time.

    Raises:
        InvalidOption: ``probe`` is not a function, ``every`` or ``timeout`` is not a positive duration, or ``jitter``
            is not in 0 to 1.
    """

    kind = "changed"
    renews = True
    watches_source = True
    probe: Callable[..., object]
    every: float
    jitter: float
    timeout: float

    def __init__(
        self,
        probe: Callable[..., object],
        every: _units.Duration = "1m",
        *,
        jitter: float = 0.1,
        timeout: _units.Duration = "10s",
    ) -> None:
        self._set(
            probe=_checked_probe(probe),
            every=_units.seconds(every, "every"),
            jitter=share(jitter, "jitter"),
            timeout=_units.seconds(timeout, "timeout"),
        )

    def due(self, now: Snapshot) -> bool:
        seen = now.probes.get(self.probe)
        return seen is not None and seen.changed

    def next_check(self, now: Snapshot) -> NextCheck:  # noqa: ARG002 - an answer may come at any time
        return NextCheck(uses=math.inf, seconds=min(1.0, self.every))

    def ignored_because(self, now: Snapshot) -> str | None:
        seen = now.probes.get(self.probe)
        if seen is None or not seen.unsteady:
            return None
        return "its probe does not return the same value often enough in a row, so no change can be told from noise"

    def __repr__(self) -> str:
        return f"Changed({_name(self.probe)})"


def _checked_probe(probe: Any) -> Any:
    if not callable(probe):
        why = f"must be a function, not {_units.kind_of(probe)}"
        raise InvalidOption("probe", probe, why=why, fix="Pass the function itself, without calling it: Changed(etag).")
    if inspect.isgeneratorfunction(probe) or inspect.isasyncgenfunction(probe):
        why = "is a generator function, which returns a new generator each time"
        raise InvalidOption("probe", probe, why=why, fix="Return the value instead of yielding it.")
    try:
        _units.try_key(probe)
    except Exception as error:  # noqa: BLE001 - whatever it raises
        why = f"cannot be hashed and compared ({type(error).__name__})"
        raise InvalidOption("probe", probe, why=why, fix="Pass its method: Changed(probe.__call__).") from None
    return probe


def _name(probe: Any) -> str:
    while isinstance(probe, partial):
        probe = probe.func
    return str(getattr(probe, "__qualname__", type(probe).__qualname__))


# A policy whose bound each process brings forward, so that replicas do not act in step.


#: How much wider the jitter of a process's first generation is, and the part of the bound that it takes at most.
_FIRST, _FIRST_MOST = 5, 0.5


class Jittered(Value):
    """A policy whose bound each process brings forward by a random part, so that replicas do not reload in step.

    The first generation does so by five times as much, at most by half. Replicas that were started together are spread
    over half of the bound then, and stay apart: ``benchmarks/fleet.py`` shows what less would do.
    """

    jitter: float

    def _brought_forward(self, now: Snapshot) -> float:
        """By which part of the bound this process is early."""
        widest = max(self.jitter, min(_FIRST * self.jitter, _FIRST_MOST)) if now.first else self.jitter
        return widest * now.jitter


# Policies on memory: of this process, and of its GPUs.


class BoundedLevel(NamedTuple):
    """Readings of one figure, and the bound on them, in bytes; ``fresh`` says how much a fresh model has there."""

    level: Level
    bound: int
    fresh: str = ""


class Sized(Jittered):
    """A policy with a size as its bound."""

    size: int | _units.Percentage

    def __init__(self, size: int | str, *, jitter: float = 0.1) -> None:
        self._set(size=_units.size_or_percentage(size, "size"), jitter=share(jitter, "jitter"))

    def __repr__(self) -> str:
        size = str(self.size) if isinstance(self.size, _units.Percentage) else _units.format_bytes(self.size)
        return f"{type(self).__name__}({size!r})"

    def _bounds(self, now: Snapshot) -> Iterator[BoundedLevel]:
        raise NotImplementedError

    def _bound(self, whole: int) -> int:
        return int(whole * self.size.fraction) if isinstance(self.size, _units.Percentage) else self.size


class _Growth(Sized):
    def due(self, now: Snapshot) -> bool:
        part = 1 - self._brought_forward(now)
        return any(_growth(level) >= bound * part for level, bound, _ in self._bounds(now))


class _Limit(Sized):
    def due(self, now: Snapshot) -> bool:
        return any(self._is_reached(level, bound, now) for level, bound, _ in self._bounds(now))

    def ignored_because(self, now: Snapshot) -> str | None:
        for level, bound, fresh in self._bounds(now):
            if level.baseline is not None and level.baseline >= bound:
                held, allowed = _units.format_bytes(level.baseline), _units.format_bytes(bound)
                return f"{fresh.format(held)}, and the bound is {allowed}"
        return None

    def _is_reached(self, level: Level, bound: int, now: Snapshot) -> bool:
        room = 0 if level.baseline is None else bound - level.baseline
        return (level.baseline is None or room > 0) and _at_least(level, bound - room * self._brought_forward(now))


class _Memory(Sized):
    """A policy on the private memory of this process."""

    reads_memory = True

    def _bounds(self, now: Snapshot) -> Iterator[BoundedLevel]:
        if now.limit is not None or not isinstance(self.size, _units.Percentage):
            fresh = "the process holds {} with a fresh model"
            yield BoundedLevel(Level(now.memory, now.baseline), self._bound(now.limit or 0), fresh)


class MemoryGrowth(_Memory, _Growth):
    """Due when private memory has grown by ``size`` since this generation settled.

    A generation has settled when its predecessor is gone and it has taken ten calls or five seconds have passed. The
    median of the first three readings after that is the baseline. Later, three consecutive readings must be above the
    bound. Readings take at most 1 % of a processor: one every 0.1 to 10 seconds, and at most about one a second without
    calls. Private memory is what this process alone has written. RSS is never used: it counts what a forked worker
    shares, and it does not fall after a peak.

    Args:
        size: Bytes, text such as ``"500 MB"`` or ``"1.5 GiB"``, or a percentage of the effective limit such as
            ``"20%"``.
        jitter: Each process allows less growth by a random part of at most this much, so that replicas that leak at the
            same pace do not reload in step. A process's first model gets five times as much, at most half:
            ``MemoryGrowth("500 MB")`` fires between 250 and 500 MB there, and between 450 and 500 MB later. 0 to 1.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage, or ``jitter`` is not in 0 to 1.
        NoMemoryLimit: A percentage was given and nothing limits this process (raised by ``guard``).
    """

    kind = "memory_growth"


class MemoryLimit(_Memory, _Limit):
    """Due when this process's private memory has reached ``size`` in three consecutive readings.

    If the fresh generation alone is already above the bound, a reload cannot help. The policy is then ignored for that
    generation, and a ``PolicyIgnored`` event says so.

    Args:
        size: Bytes, text such as ``"3 GB"``, or a percentage of the effective cgroup limit such as ``"80%"``. The
            percentage is of the whole limit: each of N workers in one container should ask for 80 % / N.
        jitter: As for ``MemoryGrowth``: a part of the room between a fresh model and ``size``. 0 to 1.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage, or ``jitter`` is not in 0 to 1.
        NoMemoryLimit: A percentage was given and nothing limits this process (raised by ``guard``).
    """

    kind = "memory_limit"


class GpuPolicy(Sized):
    """A policy on what torch has allocated on each GPU."""

    reads_gpu = True

    def cache_too_large(self, now: Snapshot) -> bool:
        """Whether torch's cache on a device, and not the model, is above the bound: emptying it may help."""
        raise NotImplementedError

    def ignored_because(self, now: Snapshot) -> str | None:
        if now.gpus is None:
            return None
        if not now.gpus:
            return "this process has not used CUDA so far"
        if isinstance(self.size, int) and all(self.size > gpu.total for gpu in now.gpus):
            return f"no GPU has more than {_units.format_bytes(max(gpu.total for gpu in now.gpus))} for this process"
        return super().ignored_because(now)

    def _bounds(self, now: Snapshot) -> Iterator[BoundedLevel]:
        for gpu in now.gpus or ():
            yield BoundedLevel(gpu.allocated, self._bound(gpu.total), f"a fresh model has {{}} on GPU {gpu.device}")


class GpuMemoryGrowth(GpuPolicy, _Growth):
    """Due when torch has allocated ``size`` more on a GPU than when this generation settled.

    What counts is ``torch.cuda.memory_allocated()`` of this process, on each GPU by itself; the use of the whole
    device, as ``nvidia-smi`` shows it, includes other processes. Pinned host memory counts too, if torch reports it
    (2.13 does). Baseline and readings are as for ``MemoryGrowth``.

    If torch's cache grows by as much, a reload does not help. The guard empties it (``GpuCacheEmptied``), at most
    once in half a minute, and less often if it grows again.

    Args:
        size: Bytes, text such as ``"1 GB"``, or a percentage of the GPU's memory such as ``"10%"``: of the MIG slice's,
            where there are such, times the fraction of ``torch.cuda.set_per_process_memory_fraction``. A percentage
            does not apply to pinned memory.
        jitter: As for ``MemoryGrowth``. 0 to 1.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage, or ``jitter`` is not in 0 to 1.
        NotSupported: There is no torch with CUDA (raised by ``guard`` if it is known by then, else the first load
            fails because of it).
    """

    kind = "gpu_memory_growth"

    def cache_too_large(self, now: Snapshot) -> bool:
        return any(_growth(_cached(gpu)) >= self._bound(gpu.total) for gpu in now.gpus or ())

    def _bounds(self, now: Snapshot) -> Iterator[BoundedLevel]:
        yield from super()._bounds(now)
        if isinstance(self.size, int):
            yield BoundedLevel(now.pinned, self.size)


class GpuMemoryLimit(GpuPolicy, _Limit):
    """Due when torch has allocated ``size`` on a GPU, in three consecutive readings.

    What counts is ``torch.cuda.memory_allocated()`` of this process, on each GPU by itself. If the fresh generation
    alone is already above the bound, a reload cannot help. The policy is then ignored for that GPU and generation, and
    a ``PolicyIgnored`` event says so.

    If only the memory that torch has reserved is above the bound, its cache is the reason. The guard empties it
    (``GpuCacheEmptied``), as for ``GpuMemoryGrowth``.

    Args:
        size: Bytes, text such as ``"20 GB"``, or a percentage of the GPU's memory such as ``"80%"``, as for
            ``GpuMemoryGrowth``. The percentage is of the whole GPU: each of N processes on it should ask for 80 % / N.
        jitter: As for ``MemoryLimit``. 0 to 1.

    Raises:
        InvalidOption: ``size`` is not a size of at least 1 MB, nor a percentage, or ``jitter`` is not in 0 to 1.
        NotSupported: As for ``GpuMemoryGrowth``.
    """

    kind = "gpu_memory_limit"

    def cache_too_large(self, now: Snapshot) -> bool:
        full = (gpu for gpu in now.gpus or () if _at_least(gpu.reserved, self._bound(gpu.total)))
        return any(not self._is_reached(gpu.allocated, self._bound(gpu.total), now) for gpu in full)


def _cached(gpu: GpuMemory) -> Level:
    """What torch holds on a device without using it."""
    pairs = zip(gpu.reserved.latest, gpu.allocated.latest, strict=True)
    held, used = gpu.reserved.baseline, gpu.allocated.baseline
    baseline = None if held is None or used is None else held - used
    return Level(tuple(reserved - allocated for reserved, allocated in pairs), baseline)


def _growth(level: Level) -> float:
    """Growth above the baseline in bytes; minus infinity while it is not known."""
    return -math.inf if level.settled is None or level.baseline is None else level.settled - level.baseline


def _at_least(level: Level, bound: float) -> bool:
    return level.settled is not None and level.settled >= bound


#: How old a model must be before it is replaced for errors that the last reload has not ended.
_WHILE_FRUITLESS = Backoff("1m", "1h")


class TTL(Jittered):
    """Due when the generation is older than ``age``.

    Args:
        age: Seconds, a ``timedelta``, or text such as ``"1h30m"``.
        jitter: Each process shortens the age by a random part of at most this much, so that workers do not reload in
            step: 0.1 makes ``TTL("1h")`` fire between 54 and 60 minutes. A process's first model, which replicas load
            together, gets five times as much, at most half: it is replaced after 30 to 60 minutes. 0 to 1.

    Raises:
        InvalidOption: ``age`` is not a positive duration, or ``jitter`` is not in 0 to 1.
    """

    kind = "ttl"
    renews = True
    seconds: float

    def __init__(self, age: _units.Duration, *, jitter: float = 0.1) -> None:
        self._set(seconds=_units.seconds(age, "age"), jitter=share(jitter, "jitter"))

    def due(self, now: Snapshot) -> bool:
        return now.age >= self._age(now)

    def next_check(self, now: Snapshot) -> NextCheck:
        return NextCheck(uses=math.inf, seconds=max(0.0, self._age(now) - now.age))

    def _age(self, now: Snapshot) -> float:
        return self.seconds * (1 - self._brought_forward(now))

    def __repr__(self) -> str:
        return f"TTL({_units.format_seconds(self.seconds)!r})"


class Uses(Jittered):
    """Due when ``count`` calls or leases have ended on the generation.

    Args:
        count: How many.
        jitter: Each process needs fewer by a random part of at most this much, so that workers with equal shares of the
            traffic do not reload in step: 0.1 makes ``Uses(1000)`` fire between 901 and 1,000 calls, and ``Uses(10)``
            at 10. A process's first model gets five times as much, at most half. 0 to 1.

    Raises:
        InvalidOption: ``count`` is not a whole number of at least 1, or ``jitter`` is not in 0 to 1.
    """

    kind = "uses"
    count: int

    def __init__(self, count: int, *, jitter: float = 0.1) -> None:
        count = _units.whole_number(count, "count", fix="Write for example Uses(50_000).")
        self._set(count=count, jitter=share(jitter, "jitter"))

    def due(self, now: Snapshot) -> bool:
        return now.uses >= self._least(now)

    def next_check(self, now: Snapshot) -> NextCheck:
        return NextCheck(uses=max(1, self._least(now) - now.uses), seconds=math.inf)

    def _least(self, now: Snapshot) -> int:
        return max(1, math.ceil(self.count * (1 - self._brought_forward(now))))

    def __repr__(self) -> str:
        return f"Uses({self.count})"


class Errors(Value):
    """Due when this many consecutive calls have raised an ``Exception``.

    A call that was interrupted or cancelled, or whose arguments do not fit, says nothing about the model: it does not
    count, and does not end the row. Of a batch that raised and is run again in parts, to find the item at fault, the
    first run counts.

    A reload does not help against an input or a dependency that makes every call fail. So if no call has succeeded
    since a reload for errors, the next one waits: until the model is a minute old, then two, then four, up to an hour,
    each shortened by a random part of up to half.

    Raises:
        InvalidOption: ``consecutive`` is not a whole number of at least 1.
    """

    kind = "errors"
    _look = math.inf  # the guard asks after every error by itself
    consecutive: int

    def __init__(self, consecutive: int = 5) -> None:
        self._set(consecutive=_units.whole_number(consecutive, "consecutive"))

    def due(self, now: Snapshot) -> bool:
        if now.consecutive_errors < self.consecutive:
            return False
        fruitless = now.fruitless_reloads
        return fruitless == 0 or now.age >= _WHILE_FRUITLESS.seconds(fruitless, now.jitter)

    def __repr__(self) -> str:
        return f"Errors(consecutive={self.consecutive})"


class Idle(Value):
    """Due when no call has run for ``after``: the model is released, and the next call loads it again.

    Under :func:`isolate` all processes of the function end. With ``keep="mold"`` only its workers do: the mold stays
    with the model in memory, and forks new workers for the next call.

    That call waits for the load, as a first call does. A guard looks for calls ten times in ``after``, and at most once
    a second, so the release comes up to a tenth of it late. In forked workers that share the model of their parent,
    which would return nothing, it is never due.

    Args:
        after: Seconds, a ``timedelta``, or text such as ``"10m"``.
        ready: Whether the guard is ``ready`` while its model is released. A service that nobody else wakes must be, or
            its load balancer sends it no call.
        keep: ``"mold"``: under ``isolate``, end the workers and keep the mold. None: release the model.

    Raises:
        InvalidOption: ``after`` is not a positive duration, ``ready`` is not a bool, or ``keep`` is something else.
            With ``keep`` also at the first load, if no ``isolate`` is above the guard's decorator.
    """

    kind = "idle"
    after: float
    ready: bool
    keep: Literal["mold"] | None

    def __init__(self, after: _units.Duration, *, ready: bool = True, keep: Literal["mold"] | None = None) -> None:
        _units.instance(ready, "ready", bool, "True or False", fix="Write ready=False.")
        if keep is not None:
            _units.one_of(keep, "keep", ("mold",), fix="Write keep='mold', or leave it out to release the model too.")
        seconds = _units.seconds(after, "after")
        self._set(after=seconds, ready=ready, keep=keep, unloads=keep is None, ends_workers=keep is not None)

    def due(self, now: Snapshot) -> bool:
        return now.idle >= self.after

    def next_check(self, now: Snapshot) -> NextCheck:
        left = max(0.0, self.after - now.idle)
        return NextCheck(uses=math.inf, seconds=min(left, max(1.0, self.after / 10)))

    def __repr__(self) -> str:
        keep = "" if self.keep is None else f", keep={self.keep!r}"
        return f"Idle({_units.format_seconds(self.after)!r}{keep})"


class Between(Value):
    """Due at every moment of a daily span of time. Restricts other policies: ``TTL("1d") & Between("02:00", "05:00")``.

    By itself it would be due all the time, so it is accepted only joined to another policy by ``&``. A span may include
    midnight. The hour that a change to daylight saving time leaves out does not come on that day; the one that it
    repeats comes twice.

    Args:
        start: The first minute, as ``"HH:MM"``.
        end: The minute after the last one.
        tz: The name of a time zone, such as ``"Europe/Berlin"``. Default: the local time of the machine, which is UTC
            in most containers.

    Raises:
        InvalidOption: A time is not a time of day, both are the same, or the time zone is unknown.
    """

    restricts = True
    _look = 30.0  # a minute is as exact as its bounds
    start: str
    end: str
    tz: str | None

    def __init__(self, start: str, end: str, *, tz: str | None = None) -> None:
        first, last = _time_of_day("start", start), _time_of_day("end", end)
        if first == last:
            raise InvalidOption("end", end, why="is the same as start", fix="Write a span, as in '02:00', '05:00'.")
        if tz is not None:
            zone_named(tz)
        self._set(start=start, end=end, tz=tz)

    def due(self, now: Snapshot) -> bool:
        from datetime import datetime

        zone = None if self.tz is None else zone_named(self.tz)
        moment = f"{datetime.fromtimestamp(now.time, zone):%H:%M}"
        if self.start < self.end:
            return self.start <= moment < self.end
        return moment >= self.start or moment < self.end

    def __repr__(self) -> str:
        return f"Between({self.start!r}, {self.end!r})"


def _time_of_day(argument: str, given: object) -> str:
    if isinstance(given, str) and re.fullmatch(r"([01][0-9]|2[0-3]):[0-5][0-9]", given):
        return given
    why = "must be a time of day as HH:MM"
    raise InvalidOption(argument, given, why=why, fix=f"Write for example {argument}='02:30'.")


_public.set_module(globals(), "modelguard")
