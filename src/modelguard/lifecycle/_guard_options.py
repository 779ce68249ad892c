"""The options of a guard, checked where they are written."""

import inspect
import math
import operator
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

from modelguard import _public, _units
from modelguard.errors import InvalidOption, NoMemoryLimit, NotSupported, PolicyNeverFires
from modelguard.facts._gpu import Gpu
from modelguard.lifecycle import policies, system
from modelguard.lifecycle._models import KnownModels, is_model
from modelguard.lifecycle.policies import TTL, Backoff, Changed, Idle, Policy, Snapshot, alternatives
from modelguard.telemetry.reasons import Reason

__all__ = ["Loading", "Replay", "Swap"]


# ``Replay``: which recorded calls a new model must answer, and how well.


# Without `from __future__ import annotations`: this class is public under another module's name, where
# `typing.get_type_hints` would not find what its annotations refer to.


@dataclass(frozen=True, init=False, repr=False)
class Replay:
    """The rule by which a new model is compared with the current one, on recorded calls.

    The guard keeps copies of the arguments of recent calls. A reload runs these calls on both models, once the new one
    is loaded, validated and warm, and rejects it (``ModelRejected``) if too few answers agree, or if it is too slow::

        nlp = guard(load, reload_on=Changed(etag), swap=Swap(replay=Replay(100, min_agreement=0.95, same=close_enough)))

    Args:
        count: How many calls are kept, the latest ones. Default 100.
        min_agreement: The share of the answers that must agree, from 0 to 1. Default 0.9, which finds a wrong model:
            of 100 answers, a model that agrees on 95 % of all inputs passes in 99 of 100 reloads.
        max_slowdown: How many times as long as on the current model a call may take, at least 1; None: any time. It is
            compared with the median of all calls, if there are at least ten, or if time is up before. Default 2; for a
            model and itself, it was 0.95 to 1.07 in 437 reloads.
        same: Called with the new answer and the current model's: whether they agree. If it raises, they do not.
            Default: ``==``. Iterators and streams are compared as lists.
        max_memory: How much memory the arguments may take, pickled: bytes, or text such as ``"500 kB"``. The oldest go
            first, and a call that needs more alone is not kept. Default 16 MB.
        timeout: How long the calls on both models may take together; those that have ended by then count. A plain
            function is not interrupted: ``Loading(timeout)`` bounds one that hangs. A model that seems slow is timed
            once more, for as long at most. Default ten seconds.

    Raises:
        InvalidOption: One of them is invalid.
    """

    count: int
    min_agreement: float
    max_slowdown: float | None
    same: Callable[[Any, Any], object]
    max_memory: int
    timeout: float

    def __init__(
        self,
        count: int = 100,
        *,
        min_agreement: float = 0.9,
        max_slowdown: float | None = 2.0,
        same: Callable[[Any, Any], object] = operator.eq,
        max_memory: int | str = "16 MB",
        timeout: _units.Duration = 10.0,
    ) -> None:
        fix = "Write max_slowdown=2 for twice as long, or None."
        if max_slowdown is not None:
            max_slowdown = _units.number(max_slowdown, "max_slowdown", at_least=1, fix=fix)
        _units.function(same, "same", "two answers", fix="Write for example same=numpy.allclose.", arguments=2)
        vars(self).update(
            count=_units.whole_number(count, "count"),
            min_agreement=policies.share(min_agreement, "min_agreement", example=0.95),
            max_slowdown=max_slowdown,
            same=same,
            max_memory=_units.size(max_memory, "max_memory", at_least=1000),
            timeout=_units.seconds(timeout, "timeout"),
        )

    def __repr__(self) -> str:
        """As it would be written: without what is the default."""
        usual, names = Replay(), [field.name for field in fields(self)]
        given = [f"{name}={getattr(self, name)!r}" for name in names[1:] if getattr(self, name) != getattr(usual, name)]
        return f"Replay({', '.join([str(self.count), *given])})"

    @classmethod
    def parse(cls, value: object) -> "Replay | None":
        """Read a guard's ``replay``: a rule, a number of calls, or None.

        Raises:
            InvalidOption: It is anything else.
        """
        if value is None or isinstance(value, Replay):
            return value
        fix = "Write replay=100, or replay=Replay(100, min_agreement=0.95)."
        return cls(_units.whole_number(value, "replay", fix=fix))

    def disagreements_allowed(self, compared: int) -> int:
        """How many of so many answers may differ."""
        return math.floor((1 - self.min_agreement) * compared + 1e-9)  # 0.1 * 10 must not become 0.999...


M = TypeVar("M")

SwapMode = Literal["auto", "load_first", "drain_first"]


@dataclass(frozen=True, init=False)
class Swap:
    """How one model takes the place of another: ``guard(..., swap=Swap("drain_first", drain_timeout="2m"))``.

    Durations are seconds, a ``timedelta`` or text such as ``"250ms"``, ``"1h30m"`` or ``"2d"``.

    Args:
        mode: ``"load_first"``: the old generation takes calls until the new one is ready; needs memory for both.
            ``"drain_first"``: calls wait while the old one ends and returns its memory, and only then the new one
            loads; if that load fails, no generation takes calls until a retry succeeds. ``"auto"``, the default: load
            first if 1.25 times the size of the model, as it was measured, may still be allocated, else drain first;
            load first if one of the two is unknown. Once reloads have left a tenth of the model's size behind (at least
            17 MB), the next one drains first, which returns it.
        defer: How long a due reload waits for a pause between calls, because a loader that holds the GIL stalls every
            call beside it. The load starts when no call has run for 50 ms after one ended, or when ``defer`` has
            passed; a guard without any calls waits for all of it. 0 does not wait, and neither does
            :meth:`ModelGuard.reload`, nor a policy that protects memory where ``"auto"`` would drain first. Default
            five seconds.
        drain_timeout: How long a replaced generation may take to finish its calls. After that the guard continues
            without it and emits ``GenerationAbandoned``: the model stays loaded for these calls, and is released when
            the last of them ends. Default 30 seconds.
        min_lifetime: A policy does not replace or release a model before it has taken calls for this long, so that a
            policy that is due at once after every load cannot cause one reload after another. This holds for policies
            that protect memory too. What waits is in ``status().postponed`` and in the event ``ReloadPostponed``.
            :meth:`ModelGuard.reload` and :meth:`ModelGuard.unload` do not wait. Default: 0, no bound.
        keep_previous: Keep the model that a reload has replaced, for :meth:`ModelGuard.rollback`, until the next reload
            has succeeded. Costs the memory of a second model all the time, and of a third one during a load. Nothing is
            kept where memory is short: after ``drain_first``, and after a reload because of ``MemoryGrowth``,
            ``MemoryLimit`` or GPU memory.
        replay: Keep the arguments of so many recent calls, and run these calls on both models before a new one replaces
            the current one: it is rejected (``ModelRejected``) if more than a tenth of its answers differ, or if it
            takes more than twice as long. :class:`Replay` sets other bounds. Decorated functions run again then, so
            they must do nothing but answer. Nothing is compared if no model takes calls: at the first load, after
            ``drain_first`` and ``Idle``. Default: none is kept.

    Raises:
        InvalidOption: One of them is invalid, or ``"drain_first"``, which never has two models, is to keep or compare
            two.
    """

    mode: SwapMode
    defer: float
    drain_timeout: float
    min_lifetime: float
    keep_previous: bool
    replay: Replay | None

    def __init__(
        self,
        mode: SwapMode = "auto",
        *,
        defer: _units.Duration = 5.0,
        drain_timeout: _units.Duration = 30.0,
        min_lifetime: _units.Duration = 0.0,
        keep_previous: bool = False,
        replay: Replay | int | None = None,
    ) -> None:
        _units.one_of(mode, "swap", get_args(SwapMode))
        vars(self).update(
            mode=mode,
            defer=_units.seconds(defer, "defer", zero=True),
            drain_timeout=_units.seconds(drain_timeout, "drain_timeout", zero=True),
            min_lifetime=_units.seconds(min_lifetime, "min_lifetime", zero=True),
            keep_previous=_units.flag(keep_previous, "keep_previous"),
            replay=Replay.parse(replay),
        )
        for name in ("keep_previous", "replay"):
            if (value := getattr(self, name)) and mode == "drain_first":
                why = "needs two models in memory, and swap='drain_first' never has two"
                fix = "Leave one of them out; swap='auto' has two where there is room."
                raise InvalidOption(name, value, why=why, fix=fix)

    @classmethod
    def parse(cls, value: object) -> "Swap":
        """Read a guard's ``swap``: a rule, or the name of a mode."""
        return value if isinstance(value, Swap) else cls(value)  # type: ignore[arg-type] # which is checked there


@dataclass(frozen=True, init=False)
class Loading:
    """How long a load may take, and when one that failed is tried again: ``guard(..., loading=Loading("2m"))``.

    Args:
        timeout: Limit for load, validation and warm-up together: seconds, a ``timedelta`` or text such as ``"2m"``.
            After that the load has failed with ``LoadTimeout``. A thread cannot be stopped, so the loader is left
            behind; if it ends after all, its model is unloaded and dropped. Default: none. Set it if the loader uses
            the network.
        backoff: How long the next load waits after one that failed. Default: ``Backoff("1s", "1m")``.

    Raises:
        InvalidOption: One of them is invalid.
    """

    timeout: float | None
    backoff: Backoff

    def __init__(self, timeout: _units.Duration | None = None, *, backoff: Backoff = Backoff()) -> None:  # noqa: B008 - a value
        _units.instance(backoff, "backoff", Backoff, "a Backoff", fix="Write Backoff('1s', '1m').")
        seconds = None if timeout is None else _units.seconds(timeout, "timeout")
        vars(self).update(timeout=seconds, backoff=backoff)


# As code objects spell it, with links unresolved; the separator excludes a neighbour with a longer name.
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


class ModelWorkers(Protocol):
    """The worker processes of a model that is a mold."""

    @property
    def workers_ended(self) -> bool: ...

    def end_workers(self, reasons: tuple[Reason, ...]) -> None:
        """End them until the next call, unless one has a call. Does not block."""


# No lambdas: brokers get the options pickled.


def _as_it_is(now: Snapshot) -> Snapshot:
    return now


def _always() -> AbstractContextManager[bool]:
    return nullcontext(enter_result=True)


@dataclass(frozen=True, kw_only=True)
class GuardOptions(Generic[M]):
    """Options of a guard, parsed. Durations are seconds."""

    load: Callable[[], Any]
    reload_on: Policy | None = None
    swap: Swap
    warmup: Callable[[M], object] | None
    validate: Callable[..., object] | None
    unload: Callable[[M], object] | None
    loading: Loading
    wait_timeout: float = 30.0
    prefork: bool = False
    name: str
    retry: bool = False
    family: KnownModels | None = None  # of the guards among which no model may be the same object
    workers: ModelWorkers | None = None  # that Idle(keep="mold") ends
    #: Of a replica: what its policies read, whether it may be replaced now, and whether it could be kept from calls for
    #: the block. Not shown: processes compare the text.
    seen: Callable[[Snapshot], Snapshot] = field(default=_as_it_is, repr=False)
    turn: Callable[[], AbstractContextManager[bool]] = field(default=_always, repr=False)
    alone: Callable[[], AbstractContextManager[bool]] = field(default=_always, repr=False)

    def __post_init__(self) -> None:
        for argument in ("warmup", "validate", "unload"):
            given = getattr(self, argument)
            if given is not None and not (argument == "validate" and takes_old_model(given)):
                check_callable(argument, given, arguments=1, fix=_FIXES[argument])
        _units.instance(self.loading, "loading", Loading, "a Loading", fix="Write loading=Loading('2m').")
        for argument in ("prefork", "retry"):
            _units.flag(getattr(self, argument), argument)
        object.__setattr__(self, "name", _units.name(self.name))

    @property
    def validates_both(self) -> bool:
        """Whether ``validate`` takes the old model too."""
        return self.validate is not None and takes_old_model(self.validate)

    @property
    def ready_when_idle(self) -> bool:
        """Whether the guard counts as ready while ``Idle`` has released its model."""
        idle = [part for part in self.reload_on.parts() if isinstance(part, Idle)] if self.reload_on is not None else []
        return bool(idle) and all(part.ready for part in idle)


class PoolOptions(NamedTuple):
    """Options of a pool, parsed. Durations are seconds, sizes bytes; infinity stands for no bound.

    ``options_for`` gives those of the guard of one key's model.
    """

    name: str
    options_for: Callable[[Any], GuardOptions[Any]]
    max_memory: int
    max_models: float
    wait_timeout: float
    ttl: TTL | None
    idle: float
    source: Changed | None


def policies_of_keys(given: Policy | None) -> tuple[TTL | None, Idle | None, Changed | None]:
    """The policies of a pool, which go for each key by itself."""
    fix = "A pool takes TTL, Idle and Changed, each once: reload_on=TTL('6h') | Idle('10m') | Changed(probe)."
    found: dict[type[Policy], Any] = {}
    for member in alternatives(given):
        kind = type(member)
        if kind not in (TTL, Idle, Changed):  # nor a subclass, whose due() would not be asked
            why = f"must be TTL, Idle, Changed or None, not {_units.kind_of(member)}"
            raise InvalidOption("reload_on", member, why=why, fix=fix)
        if kind in found:
            raise InvalidOption("reload_on", given, why=f"has {kind.__name__} twice", fix=fix)
        if isinstance(member, Idle) and (member.keep is not None or not member.ready):
            why = "has keep or ready, and a pool counts as ready, and keeps nothing of an idle key"
            plain = f"Write Idle({_units.format_seconds(member.after)!r})."
            raise InvalidOption("reload_on", member, why=why, fix=plain)
        found[kind] = member
    if (source := found.get(Changed)) is not None:
        fix = "It gets the key: Changed(lambda key: etag(key))."
        check_callable("probe", source.probe, arguments=1, fix=fix)
    return found.get(TTL), found.get(Idle), source


_HOW = ("a function without arguments", "a function of one argument")

_FIXES = {
    "warmup": "Write a function of the model, such as warmup=lambda model: model('a typical text').",
    "validate": "Write a function of the model, such as validate=lambda model: model('2 + 2') == '4'.",
    "unload": "Write a function of the model, such as unload=lambda model: model.close().",
}


def takes_old_model(validate: Any) -> bool:
    """Whether ``validate`` has a second parameter that needs a value: for the old model."""
    return callable(validate) and _units.misfit(validate, 2) is None and _units.misfit(validate, 1) is not None


def check_callable(argument: str, value: object, *, arguments: int, fix: str) -> None:
    """Check that ``value`` can be called with this many arguments, and runs then."""
    _units.called_as(_HOW[arguments], value, argument, arguments, fix=fix)
    if "generator" in _units.function_kind(value):
        why = "is a generator function, whose body does not run when it is called"
        raise InvalidOption(argument, value, why=why, fix="Return the value instead of yielding it.")


def check_loader(load: object, *, arguments: int = 0) -> None:
    """Check that ``load`` makes a model when it is called with this many arguments."""
    if is_model(load):
        why = "is a model itself; the guard needs a function that makes one, to be able to replace it"
        raise InvalidOption("load", load, why=why, fix="Write for example load=lambda: make_model().")
    if arguments:
        fix = "Pass a function of the key that makes its model: load=lambda key: make_model(key)."
    elif inspect.isroutine(load) or isinstance(load, type | partial):
        fix = "Bind its arguments: load=lambda: make_model(path)."
    else:
        fix = (
            "Pass the function that makes the model, without calling it: load=make_model, or load=lambda: make_model()."
        )
    check_callable("load", load, arguments=arguments, fix=fix)


def loader_name(load: object) -> str:
    """The name of a guard that was given none: its loader's name, or the loader's line where it has no name."""
    name = getattr(load, "__qualname__", None) or type(load).__qualname__
    code = getattr(load, "__code__", None)
    module = getattr(load, "__module__", None) or "?"
    return f"{module}:{code.co_firstlineno}" if code is not None and "<lambda>" in name else f"{module}.{name}"


def check_policy(policy: Policy, limit: Callable[[], int | None], gpu: Gpu) -> None:
    """Check a policy, and warn of one that can never be due."""
    if not isinstance(policy, Policy):
        why = f"must be a policy or None, not {_units.kind_of(policy)}"
        raise InvalidOption("reload_on", policy, why=why, fix=policies.fix_for(policy))
    for member in alternatives(policy):
        if member.restricts:
            why = "says when, and not whether: it would be due all the time"
            raise InvalidOption("reload_on", member, why=why, fix=f"Join it by &, as in TTL('1d') & {member!r}.")
    _check_idle([member for member in alternatives(policy) if isinstance(member, Idle)])
    for part in policy.parts():
        if isinstance(part, policies.MemoryLimit | policies.MemoryGrowth):
            _check_memory(part, limit())
        elif isinstance(part, Changed):
            check_callable("probe", part.probe, arguments=0, fix="Bind its arguments: Changed(lambda: etag(url)).")
        elif isinstance(part, policies.Modified):
            _check_path(part)
    check_gpu(policy, gpu, loaded=False)


def check_gpu(policy: Policy | None, gpu: Gpu, *, loaded: bool) -> None:
    """Check that the GPU memory that a policy reads can be read."""
    part = next((part for part in policy.parts() if part.reads_gpu), None) if policy is not None else None
    why = None if part is None else gpu.missing(loaded=loaded)
    if why is not None:
        raise NotSupported(repr(part), reason=why)


def _check_idle(members: list[Idle]) -> None:
    first = min((member for member in members if member.unloads), key=lambda member: member.after, default=None)
    for member in members:
        if first is not None and member.ends_workers and member.after >= first.after:
            warn_never_due(member, f"{first!r} ends its mold before")


def check_min_lifetime(policy: Policy | None, seconds: float) -> None:
    """Check that no ``TTL`` alone replaces the model before its minimum age."""
    for member in alternatives(policy):
        if isinstance(member, TTL) and member.seconds < seconds:
            given, why = _units.format_seconds(seconds), f"is longer than {member!r}, which is due before"
            fix = f"Give at most {_units.format_seconds(member.seconds)!r}, or a longer TTL."
            raise InvalidOption("min_lifetime", given, why=why, fix=fix)


def memory_bound(argument: str, size: int | _units.Percentage, limit: int | None) -> int:
    """The bytes of a size, or of a percentage of the memory limit."""
    if not isinstance(size, _units.Percentage):
        return size
    if limit is None:
        why = "is a percentage of the memory limit, but no cgroup limits this process"
        fix = "Give bytes, as in '2 GB', or run the service under a memory limit."
        raise NoMemoryLimit(argument, str(size), why=why, fix=fix)
    return int(limit * size.fraction)


def _check_memory(policy: policies.MemoryLimit | policies.MemoryGrowth, limit: int | None) -> None:
    if isinstance(policy.size, _units.Percentage):
        memory_bound("size", policy.size, limit)
    elif limit is not None and policy.size >= limit:
        warn_never_due(policy, f"the process is killed before that, at its limit of {_units.format_bytes(limit)}")


def _check_path(policy: policies.Modified) -> None:
    found = system.fingerprint(policy.path)
    if found is None:
        why = "does not exist yet, or cannot be read"
        warn_never_due(policy, f"{policy.path} {why}, so no change can be seen until that changes")
    elif not system.is_whole(found):
        most = f"only the first {system.MAX_ENTRIES:,} files of {policy.path} are watched"
        warn_never_due(policy, f"{most}, so no change of the others is seen; name the folder of one model")


def warn_never_due(policy: Policy, why: str) -> None:
    """Warn of a policy that can never be due, at the line outside modelguard that wrote it."""
    warnings.warn(f"{policy!r} never fires: {why}", PolicyNeverFires, stacklevel=outside())


def outside() -> int:
    """The ``stacklevel``, as the caller counts, of the nearest frame outside modelguard."""
    level, frame = 1, sys._getframe(1)  # noqa: SLF001 - a whole stack of FrameInfo would be slow
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level


_public.set_module(globals(), "modelguard")
