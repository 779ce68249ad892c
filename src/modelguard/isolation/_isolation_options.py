"""The options of an isolated function, and where its mold finds the function and its model."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pkgutil import resolve_name
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, NamedTuple, get_args

from modelguard import _public, _units
from modelguard._units import FunctionKind
from modelguard.errors import InvalidOption, NotSupported, shortened
from modelguard.facts._proc import MODEL_LIBRARIES
from modelguard.isolation import _processes
from modelguard.lifecycle import runtime
from modelguard.lifecycle._engine import engines
from modelguard.lifecycle._guard_options import GuardOptions, check_policy
from modelguard.lifecycle._lease import owner_of
from modelguard.lifecycle.guard import ModelGuard, guard, hide
from modelguard.lifecycle.policies import Changed, Policy, subset
from modelguard.lifecycle.pool import PooledFunction
from modelguard.lifecycle.replicas import ModelReplicas
from modelguard.serving.breaker import Breaker
from modelguard.telemetry import logger

__all__ = ["Bounds", "Host"]

# How a fresh interpreter finds the function: by its module and name, after it was made like its owner.
#
# A function may be named instead of imported: a stub stands for it in the owner, which never imports its module.


#: Module and qualified name.
Reference = tuple[str, str]

#: A parameter's name, the number of its kind, and whether it has a default.
Parameter = tuple[str, int, bool]

_IMPORT_FIX = "Move it to the top level of a module that can be imported, and isolate it there."

#: What the annotation of a stub's result says of the function's kind, where ``def`` does not.
_STREAMS: Mapping[str, FunctionKind] = {
    "Iterator": "generator",
    "Generator": "generator",
    "AsyncIterator": "async generator",
    "AsyncGenerator": "async generator",
}


class Stub(NamedTuple):
    """A function that stands for one of a module that this process does not import."""

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


def reference(function: Any) -> Reference:
    return function.__module__, function.__qualname__


def check_importable(function: Any, *, stub: bool = False) -> None:
    """Check that another interpreter can find the function. Nobody looks for a stub, which may stand anywhere."""
    why, fix = "", _IMPORT_FIX
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    in_class = name is not None and "." in name and "<" not in name and not isinstance(function, staticmethod)
    other = isinstance(function, type) or hasattr(function, "lease")  # as guards and pools have
    if other or not (callable(function) or isinstance(function, classmethod)):
        why = f"must be a function, not {_units.kind_of(function)}"
        fix = "Write @isolate() above the guard's decorator, and that above def predict(model, text): ..."
    elif isinstance(function, classmethod) or in_class:
        why = "is a method, and a change of its object or class in a worker would be lost"
        fix = "Isolate a function, and call it in the method; or a static method, with @staticmethod next to the def."
    elif stub:
        pass
    elif module is None or name is None:
        why = "has no module and name by which a worker process could import it"
    elif "<lambda>" in name:
        why = "is a lambda, which a worker process cannot import by name"
    elif "<locals>" in name:
        why = "is defined inside another function, where a worker process cannot import it"
    elif module == "__main__" and not _has_main_file():
        why = "is in no file (a notebook, python -c, standard input), so a worker process cannot import it"
        fix = "Write it to a file, in a notebook with %%writefile predict.py, and import it from there."
    elif module == "__main__" and _runs_as_package():
        why = "is defined in the __main__.py of an archive, a folder or a package, which a worker process cannot import"
        fix = "Move it to another module beside that, and import it in __main__.py."
    if why:
        raise InvalidOption("function", function, why=why, fix=fix)


def _has_main_file() -> bool:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (path is not None and os.path.exists(path))  # noqa: PTH110


def _runs_as_package() -> bool:
    """Whether the main module is a ``__main__.py``, which :mod:`multiprocessing` leaves alone: to import it runs it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.rpartition(".")[2] == "__main__"


# In the owner


def stub_of(function: Any, target: Any, recycle_on: Any) -> tuple[Reference, Stub]:
    """What stands for the function that ``target`` names, and where that is."""
    module, _, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    why, fix = "", ""
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        why, fix = "must name a function of a module", "Write for example target='pipeline:entities'."
    elif module in {function.__module__, "__main__"}:
        why = "is in a module that this process imports"
        fix = "Move it to a module of its own, which nothing here imports."
    elif _is_missing(module):
        why, fix = f"cannot be imported: there is no module {module}", "Correct the name, or sys.path."
    elif not _is_empty(function):
        why = f"is what runs, and {place_of(function)} has a body of its own, which never would"
        fix = "Let the body be ... or raise NotImplementedError."
    if why:
        raise InvalidOption("target", target, why=why, fix=fix)
    kind: FunctionKind = "coroutine" if inspect.iscoroutinefunction(function) else _kind_by_result(function)
    shown = str(inspect.signature(function))
    return (module, name), Stub(place_of(function), kind, shown, parameters_of(function), recycle_on)


def _kind_by_result(function: Any) -> FunctionKind:
    result = getattr(function, "__annotations__", {}).get("return")
    text = result if isinstance(result, str) else getattr(result, "__name__", "")
    return _STREAMS.get(text.partition("[")[0].rpartition(".")[2].strip(), "function")


def _is_missing(module: str) -> bool:
    """Whether there is certainly no such module. Imports nothing, its packages neither."""
    path: Iterable[str] | None = None
    if module in sys.modules:
        return False
    for name in accumulate(module.split("."), "{}.{}".format):
        try:
            specs = (finder.find_spec(name, path) for finder in sys.meta_path)  # type: ignore[arg-type]
            spec = next((one for one in specs if one is not None), None)
        except Exception:  # noqa: BLE001 - of a finder that needs the package imported; the mold will tell
            return False
        if spec is None:
            return True
        path = spec.submodule_search_locations
        if path is None:
            return name != module
    return False


def _is_empty(function: Any) -> bool:
    """Whether the body of a function is ``...``, or what type checkers take for it, under a docstring or none."""
    code, text = getattr(function, "__code__", None), getattr(function, "__doc__", None)
    for body in ("...", "raise NotImplementedError", "raise NotImplementedError()"):
        made: dict[str, Any] = {}
        kind = "async def" if inspect.iscoroutinefunction(function) else "def"
        exec(f"{kind} f():\n {text!r}\n {body}" if text else f"{kind} f():\n {body}", made)  # noqa: S102 - our own text
        twin = made["f"].__code__
        if code is not None and (code.co_code, code.co_consts) == (twin.co_code, twin.co_consts):
            return bool(code.co_names == twin.co_names)
    return False


def find(where: Reference, is_isolated: Callable[[Any], bool]) -> Any:
    """Import a function, and find the isolated one below other decorators."""
    module, name = where
    importlib.import_module(module)
    found = _below(resolve_name(f"{module}:{name}"), is_isolated)
    if found is None:
        why = "is not isolated where a worker process imports it"
        raise InvalidOption("function", f"{module}.{name}", why=why, fix="Decorate it where it is defined.")
    return found


def find_target(where: Reference, stub: Stub, is_isolated: Callable[[Any], bool]) -> Any:
    """Import what a stub stands for; the isolated function below other decorators, if there is one."""
    module, name = where
    target, fix = ":".join(where), "Correct the name."
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
    return _below(found, is_isolated) or found


def _below(found: Any, is_isolated: Callable[[Any], bool]) -> Any:
    while found is not None and not is_isolated(found):
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


_START_FIX = "Write 'spawn', or 'fork', which is right for most models."
_SCOPE_FIX = "Write 'process', or 'host', which lets all processes of this host share one mold."
_BOUNDS_FIX = "Write bounds=Bounds(queue=1000)."


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


def parse(function: Callable[..., Any], target: tuple[Reference, Stub] | None, **given: Any) -> IsolationOptions:
    where, stub = (reference(function), None) if target is None else target
    name, timeout, start = given["name"], given["timeout"], given["start"]
    breaker, bounds, scope = given["breaker"], given["bounds"], Host.parse(given["scope"])
    _units.one_of(start, "start", get_args(StartMethod), fix=_START_FIX)
    if scope is not None and isinstance(owner_of(function), PooledFunction):
        why = "cannot hold the molds of a pool's keys, which its budget ends"
        raise InvalidOption("scope", "host", why=why, fix="Leave it out, or give each model a guard of its own.")
    kind = _units.function_kind(inspect.unwrap(function)) if stub is None else stub.kind
    if _units.flag(given["retry"], "retry") and "generator" in kind:
        raise InvalidOption(
            "retry", given["retry"], why="cannot send a stream again", fix="Leave it out for a generator."
        )
    return IsolationOptions(
        function=where,
        stub=stub,
        kind=kind,
        name=".".join(reference(function)) if name is None else _units.name(name),
        workers=_units.whole_number(given["workers"], "workers"),
        timeout=None if timeout is None else _units.seconds(timeout, "timeout"),
        start=start,
        retry=given["retry"],
        breaker=Breaker() if breaker is None else _checked_breaker(breaker),
        bounds=Bounds() if bounds is None else _units.instance(bounds, "bounds", Bounds, "Bounds", fix=_BOUNDS_FIX),
        scope=scope,
    )


def _checked_breaker(breaker: Any) -> Breaker:
    given = _units.instance(breaker, "breaker", Breaker, "a Breaker", fix="Write Breaker(failures=5).")
    for option in ("ignore", "reload"):
        if value := getattr(given, option):
            why = "does nothing here: workers that crash or exceed timeout count, and no errors of the function"
            raise InvalidOption(option, value, why=why, fix="Leave it out.")
    return given


def check_function(function: Any, recycle_on: Policy | None, start: StartMethod) -> None:
    """Check that a function can be isolated."""
    check_importable(function)
    check_source(function, owner_of(function), recycle_on, start)


def check_stub(function: Any, recycle_on: Policy | None, start: StartMethod) -> None:
    """Check that a function can stand for another one."""
    check_importable(function, stub=True)
    if owner_of(function) is not None:
        why = "stands for another one by target=, and takes no model"
        raise InvalidOption("function", function, why=why, fix="Decorate the function that target= names.")
    check_source(function, None, recycle_on, start)
    if (part := part_of_own_code(recycle_on)) is not None:
        why = "is of this program's own code, which the module of target= does not know"
        raise InvalidOption("recycle_on", part, why=why, fix="Give the function in that module a guard with it.")


def part_of_own_code(policy: Policy | None) -> Policy | None:
    """A part of a policy that runs code of the application; None if there is none."""
    for part in () if policy is None else policy.parts():
        if isinstance(part, Changed) or type(part).__module__.partition(".")[0] != "modelguard":
            return part
    return None


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
    world = runtime.default()
    check_policy(recycle_on, world.limit, world.gpu)


# Where an isolated function gets its model: from its guard, from a pool, or from none.


#: The modules of which it was logged what their molds import for nothing.
_told: set[str] = set()


class Source(NamedTuple):
    """What runs in a worker."""

    function: Callable[..., Any]
    guard: ModelGuard[Any]

    def for_key(self, key: Any) -> Source:
        """It has one model, which needs no key."""
        del key
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
        model: ModelGuard[Any] = ModelGuard(self.options_for(key), runtime.default())
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


def source_of_stub(where: Reference, stub: Stub, name: str, start: StartMethod) -> Source:
    """In a mold: import what a stub stands for, and find its guard, which decorates it or which it uses."""
    found = find_target(where, stub, lambda one: hasattr(one, "isolated_function"))
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
        raise InvalidOption("target", ":".join(where), why=why, fix=fix)
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
            waiting += [one.__globals__[name] for name in _names_in(one.__code__) if name in one.__globals__]
    return list(found.values())


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def warn_of_other_loaders(function: Any) -> None:
    """Log once for a module which libraries a mold of this function imports for the loaders of other guards alone."""
    owner, module = owner_of(function), function.__module__
    own = owner.engine.options.load if isinstance(owner, ModelGuard) else None
    needed = _libraries_in(own) | _libraries_in(inspect.unwrap(function))
    loads = [(engine.name, engine.options.load) for engine in engines]
    for name, load in loads if _processes.role == "owner" else ():
        extra = _libraries_in(load) - needed if getattr(load, "__module__", None) == module else ()
        if extra and module not in _told:
            _told.add(module)
            logger.warning(
                "%s: its mold imports all of %s, and so %s, which only the loader of guard %r needs; move that guard "
                "to a module of its own, or name the function there: @isolate(target='module:function')",
                function.__qualname__,
                module,
                ", ".join(sorted(extra)),
                name,
            )


def _libraries_in(function: Any) -> set[str]:
    """The model libraries that a function names and its module has imported."""
    code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    values = [names.get(name) for name in _names_in(code)] if isinstance(code, CodeType) else []
    origins = (one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None) for one in values)
    return {str(origin).partition(".")[0] for origin in origins} & MODEL_LIBRARIES


def _with_model(function: Any) -> Any:
    """Put a parameter for the model before the others. What it returns may be a coroutine, which a guard knows."""

    def call(_model: _NoModel, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    for name in ("__name__", "__qualname__", "__module__", "__doc__"):  # no __wrapped__, which has no such parameter
        setattr(call, name, getattr(function, name))
    return call


_public.set_module(globals(), "modelguard")
