"""The options of an isolated function, and where its mold finds the function and its model."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from types import CodeType, FunctionType
from typing import Any, Literal, NamedTuple, get_args

from modelguard import _public, _units
from modelguard._units import FunctionKind
from modelguard.errors import InvalidOption, NotSupported, shortened
from modelguard.lifecycle import system
from modelguard.lifecycle._guard_options import GuardOptions, check_policy
from modelguard.lifecycle._lease import owner_of
from modelguard.lifecycle.guard import ModelGuard, guard, hide
from modelguard.lifecycle.policies import Changed, Policy, subset
from modelguard.lifecycle.pool import PooledFunction
from modelguard.lifecycle.replicas import ModelReplicas
from modelguard.serving.breaker import Breaker

__all__ = ["Bounds", "Host"]

# How a fresh interpreter finds the function: by its module and name, after it was made like its owner.
#
# A function may be named instead of imported: a stub stands for it in the owner, which never imports its module.


#: Module and qualified name.
Reference = tuple[str, str]

#: A parameter's name, the number of its kind, and whether it has a default.
Parameter = tuple[str, int, bool]


class Stub(NamedTuple):
    """A function that stands for one of a module that this process does not import."""

    target: Reference
    place: str
    kind: FunctionKind
    shown: str
    parameters: tuple[Parameter, ...]
    recycle_on: Any

    def fits(self, parameters: tuple[Parameter, ...]) -> bool:
        """Whether each call that the stub takes is one that these parameters take."""
        own = len(self.parameters)
        pairs = zip(self.parameters, parameters, strict=False)
        return (
            len(parameters) >= own
            and all(one[:2] == other[:2] and one[2] <= other[2] for one, other in pairs)
            and all(has_default for _, _, has_default in parameters[own:])
        )


def parameters_of(function: Any) -> tuple[Parameter, ...]:
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(
        (one.name, int(one.kind), one.default is not one.empty or one.kind in any_number)
        for one in inspect.signature(function).parameters.values()
    )


def place_of(function: Any) -> str:
    """A function's name, file and line, as far as they are known."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}{where}"


def find(where: Reference) -> Any:
    """Import a function, and find the isolated one below other decorators."""
    module, name = where
    importlib.import_module(module)
    found = _isolated_below(resolve_name(f"{module}:{name}"))
    if found is None:
        why = "is not isolated where a worker process imports it"
        raise InvalidOption("function", f"{module}.{name}", why=why, fix="Decorate it where it is defined.")
    return found


def find_target(stub: Stub) -> Any:
    """Import what a stub stands for; the isolated function below other decorators, if there is one."""
    module, name = stub.target
    target, fix = ":".join(stub.target), "Correct the name."
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of something that it imports
        why = f"cannot be imported: there is no module {error.name}; {stub.place} stands for it"
        raise InvalidOption("target", target, why=why, fix=fix) from None
    found = getattr(imported, name, None)
    if not callable(found) or isinstance(found, type):
        what = f"has no {name}" if found is None else f"has {_units.kind_of(found)} of this name, and no function"
        why = f"is not there: {getattr(imported, '__file__', module)} {what}; {stub.place} stands for it"
        raise InvalidOption("target", target, why=why, fix=fix)
    if not stub.fits(parameters := parameters_of(found)):
        why = f"does not fit: {stub.place} takes {stub.shown}, and {place_of(found)} takes {inspect.signature(found)}"
        fix = "Let both have the same parameters."
        if stub.fits(parameters[1:]):
            fix = f"Decorate it with the guard of its model in {module}: so far nothing gives it its first argument."
        raise InvalidOption("target", target, why=why, fix=fix)
    return _isolated_below(found) or found


def _isolated_below(found: Any) -> Any:
    while found is not None and not hasattr(found, "isolated_function"):
        found = getattr(found, "__wrapped__", None)
    return found


#: How workers come into being: forked from a mold, or each as a fresh interpreter.
StartMethod = Literal["fork", "spawn"]

#: Which processes share a mold: each has its own, or all of the host have one.
ScopeName = Literal["process", "host"]


@dataclass(frozen=True, init=False)
class Bounds:
    """How much an isolated function takes at once: ``isolate(bounds=Bounds(queue=1000))``.

    Args:
        queue: How many calls may wait for a worker; more get ``QueueFull``. While a model loads, as many as there are
            workers may wait besides. Calls that were cancelled, or whose time is over, do not count. Default 256.
        transfer: The largest arguments or result, in bytes or as text such as ``"100 MB"``. Default 1 GB.

    Raises:
        InvalidOption: One of them is invalid.
    """

    queue: int
    transfer: int

    def __init__(self, *, queue: int = 256, transfer: int | str = "1 GB") -> None:
        object.__setattr__(self, "queue", _units.whole_number(queue, "queue"))
        object.__setattr__(self, "transfer", _units.size(transfer, "transfer", at_least=1000))


@dataclass(frozen=True)
class Host:
    """All processes of this user on this host that run the same code share a mold: ``isolate(scope=Host())``.

    Args:
        version: Text that they must have in common beside code and options, for models that are chosen by an
            environment variable: ``Host(version="2026-10")``.

    Raises:
        InvalidOption: ``version`` is not text.
    """

    version: str | None = None

    def __post_init__(self) -> None:
        if self.version is not None:
            _units.instance(self.version, "version", str, "text", fix="Write for example Host(version='2026-10').")

    @classmethod
    def parse(cls, value: object) -> Host | None:
        """Read the ``scope`` of ``isolate``; None stands for this process alone."""
        if not isinstance(value, Host):
            _units.one_of(value, "scope", get_args(ScopeName), fix=_SCOPE_FIX)
        return value if isinstance(value, Host) else cls() if value == "host" else None


_SCOPE_FIX = "Write 'process', or 'host', which lets all processes of this host share one mold."


@dataclass(frozen=True, kw_only=True)
class IsolationOptions:
    function: Reference
    stub: Stub | None
    kind: FunctionKind
    name: str
    workers: int
    timeout: float | None
    start: StartMethod
    retry: bool
    breaker: Breaker
    bounds: Bounds
    scope: Host | None


def part_of_own_code(policy: Policy | None) -> Policy | None:
    """A part of a policy that runs code of the application; None if there is none."""
    parts = () if policy is None else policy.parts()
    own = (one for one in parts if isinstance(one, Changed) or type(one).__module__.partition(".")[0] != "modelguard")
    return next(own, None)


def check_source(function: Any, owner: object, recycle_on: Policy | None, start: StartMethod) -> None:
    """Check that a function fits what isolates it."""
    if hasattr(function, "aio") and hasattr(function, "submit"):
        why = "is batched or isolated already"
        fix = "Put @batched(...) above @isolate(...), which belongs above the guard's decorator."
        raise InvalidOption("function", function, why=why, fix=fix)
    if isinstance(owner, ModelReplicas):
        why = "takes its model from replicas, and a worker runs one call at a time"
        raise InvalidOption("function", function, why=why, fix="Decorate it with a guard, and give workers=.")
    if isinstance(owner, ModelGuard) and (replay := owner.engine.options.swap.replay) is not None:
        why = "compares two models in one process, and under isolate each mold has one"
        raise InvalidOption("replay", replay, why=why, fix="Leave it out, and check each new model with validate=.")
    policy = owner.reload_on if isinstance(owner, ModelGuard) else recycle_on
    if start == "spawn" and isinstance(policy, Policy) and any(part.ends_workers for part in policy.parts()):
        why = "needs workers that are forked from a mold, and start='spawn' has none"
        fix = "Leave keep out: then all workers end, and the next call loads the model again."
        raise InvalidOption("keep", "mold", why=why, fix=fix)
    if recycle_on is None:
        return
    if isinstance(owner, ModelGuard):
        why = "is for functions without a guard"
        raise InvalidOption("recycle_on", recycle_on, why=why, fix="The guard's reload_on decides here.")
    if not isinstance(recycle_on, Policy):
        why = f"must be a policy or None, not {_units.kind_of(recycle_on)}"
        raise InvalidOption("recycle_on", recycle_on, why=why, fix="Write for example Uses(10_000).")
    if owner is not None and subset(recycle_on, renews=True, unloads=True) is not None:
        why = "would renew or unload a pool's models, which the pool does"
        fix = "Give TTL, Changed or Idle to the pool, as its reload_on, and leave them and Modified out here."
        raise InvalidOption("recycle_on", recycle_on, why=why, fix=fix)
    world = system.default()
    check_policy(recycle_on, world.limit, world.gpu)


# Where an isolated function gets its model: from its guard, from a pool, or from none.


class Source(NamedTuple):
    """What runs in a worker."""

    function: Callable[..., Any]
    guard: ModelGuard[Any]

    def for_key(self, _key: Any) -> Source:
        """It has one model, which needs no key."""
        return self


class PoolSource(NamedTuple):
    """What runs in the workers of a pool's keys."""

    function: Callable[..., Any]
    pooled: PooledFunction
    recycle_on: Policy | None

    def options_for(self, key: Any) -> GuardOptions[Any]:
        return replace(self.pooled.options.options_for(key), reload_on=self.recycle_on)

    def for_key(self, key: Any) -> Source:
        """What runs in the workers of one key: the same function, on one model that is not a pool's."""
        model: ModelGuard[Any] = ModelGuard(self.options_for(key), system.default())
        hide(model)
        keyed: Callable[..., Any] = model(self.pooled.function)
        key_of, name = self.pooled.key_of, self.pooled.options.name

        def call(*args: Any, **kwargs: Any) -> Any:
            if key_of(args, kwargs) != key:  # the function calls itself, else its owner has looked
                reason = f"this worker has the model of key {shortened(key)} of pool {name!r} alone"
                raise NotSupported("a call with another key inside an isolated function", reason=reason)
            return keyed(*args, **kwargs)

        return Source(call, model)


class _NoModel:
    pass


def source_of(function: Any, name: str, recycle_on: Policy | None) -> Source | PoolSource:
    """Find the guard or the pool of a function. One without gets a guard that only counts."""
    owner = owner_of(function)
    if isinstance(owner, PooledFunction):
        return PoolSource(function, owner, recycle_on)
    if isinstance(owner, ModelGuard):
        hide(owner)
        return Source(function, owner)
    counting: ModelGuard[_NoModel] = guard(_NoModel, reload_on=recycle_on, name=name)
    hide(counting)
    return Source(counting(_with_model(function)), counting)


def source_of_stub(stub: Stub, name: str, start: StartMethod) -> Source:
    """In a mold: import what a stub stands for, and find its guard, which decorates it or which it uses."""
    found = find_target(stub)
    function = getattr(found, "isolated_function", found)
    kind, why, fix = _units.function_kind(found), "", ""
    owners: list[Any] = [owner_of(function)] if owner_of(function) is not None else _guards_in(function)
    if kind != stub.kind:
        why = f"does not fit: {stub.place} is a {stub.kind}, and {place_of(found)} a {kind}"
        fix = "Write def or async def in both; the stub of a generator is a def that returns Iterator or AsyncIterator."
    elif any(isinstance(one, PooledFunction) for one in owners):
        why = f"takes its models from a pool, and {stub.place} cannot tell which of them a call needs"
        fix = "Decorate it by @isolate() where it is, and import it."
    elif len(owners) > 1:
        guards = " and ".join(sorted(repr(one.name) for one in owners))
        why = f"uses the guards {guards}, and a mold has one model; {stub.place} stands for it"
        fix = "Decorate it with the guard whose model it is to have."
    if why:
        raise InvalidOption("target", ":".join(stub.target), why=why, fix=fix)
    owner = owners[0] if owners else None
    check_source(function, owner, stub.recycle_on, start)
    if isinstance(owner, ModelGuard):
        return Source(function, owner)
    return source_of(function, name, stub.recycle_on).for_key(None)


def _guards_in(function: Any) -> list[Any]:
    """The guards that a function names, itself or by functions of its module that it names."""
    waiting, known, found = [function], set[int](), dict[int, Any]()
    while waiting:
        one = waiting.pop()
        owner = one if isinstance(one, ModelGuard) else owner_of(one)
        if owner is not None:
            found[id(owner)] = owner
        elif isinstance(one, FunctionType) and one.__module__ == function.__module__ and id(one) not in known:
            known.add(id(one))
            waiting += [one.__globals__[name] for name in names_in(one.__code__) if name in one.__globals__]
    return list(found.values())


def names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _with_model(function: Any) -> Any:
    """Put a parameter for the model before the others. What it returns may be a coroutine, which a guard knows."""

    def call(_model: _NoModel, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # no __wrapped__, which has no such parameter
        setattr(call, name, getattr(function, name))
    return call


_public.set_module(globals(), "modelguard")
