"""``isolate``: run a guarded function in worker processes."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from types import CodeType, ModuleType
from typing import Any, Never, ParamSpec, Protocol, TypeVar, get_args

from modelguard import _public, _units
from modelguard._units import FunctionKind
from modelguard.errors import InvalidOption
from modelguard.facts._proc import MODEL_LIBRARIES
from modelguard.isolation import _processes
from modelguard.isolation._calls import Isolated
from modelguard.isolation._isolation_options import (
    Bounds,
    Host,
    IsolationOptions,
    ScopeName,
    StartMethod,
    Stub,
    check_source,
    names_in,
    parameters_of,
    part_of_own_code,
    place_of,
    source_of,
)
from modelguard.lifecycle._engine import engines
from modelguard.lifecycle._lease import owner_of
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.policies import Policy
from modelguard.lifecycle.pool import PooledFunction
from modelguard.serving.breaker import Breaker
from modelguard.telemetry import logger

__all__ = ["Isolated", "isolate"]

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What ``isolate(...)`` returns."""

    def __call__(self, function: Callable[P, R], /) -> Isolated[P, R]: ...


@_public.with_fixes(bounds="Bounds", scope="Host", breaker="Breaker")
def isolate(
    *others: Never,
    target: str | None = None,
    workers: int = 2,
    timeout: _units.Duration | None = 60.0,
    start: StartMethod = "fork",
    recycle_on: Policy | None = None,
    retry: bool = False,
    breaker: Breaker | None = None,
    bounds: Bounds | None = None,
    scope: ScopeName | Host = "process",
    name: str | None = None,
) -> Decorator:
    """Run a guarded function in worker processes, so that no load, leak, hang or crash of its model reaches this one.

    A fresh interpreter, the mold, imports the function's module, loads the guard's model, validates it, warms it up and
    passes the fork gate of :func:`modelguard.prefork.prepare`. Then it forks workers, which share the model's memory. A
    worker runs one call at a time. This process never loads the model. Linux only.

    The guard's policies decide. ``Uses``, ``MemoryGrowth``, ``MemoryLimit``, ``Errors`` and policies of your own are
    asked in each worker, and replace that worker by a fresh fork, which takes calls before the old worker ends.
    ``TTL``, ``Modified``, ``Changed`` and :meth:`Isolated.reload` make a new mold; the old one serves until the workers
    of the new one are ready.

    Decorate a function at the top level of a module::

        @isolate(workers=2, timeout="10s")
        @guard(load_model, reload_on=TTL("1h") | Uses(50_000))
        def entities(nlp, text: str) -> list[str]: ...

    Args:
        others: None; every option is passed by keyword.
        target: ``"module:function"``: what runs, if this process is not to import it. The decorated function gives its
            name and signature to callers, and has ``...`` for a body; the mold imports the module, and takes the model
            and its policies from the guard that it finds there. Default: the decorated function.
        workers: How many calls run at a time, each in a worker process. One more worker is kept ready, which takes the
            place of one that is replaced or has died; with ``start="spawn"`` only while one is replaced.
        timeout: The longest that a call may run in a worker, after which the worker is killed and the call gets
            ``DeadlineExceeded``; also the longest that a call waits for a free worker. Of a generator, each step.
            None: no limit.
        start: ``"fork"``: workers are forked from a mold and share its memory. ``"spawn"``: each worker is a fresh
            interpreter that loads the model for itself, for models that do not survive a fork (CUDA). Workers share no
            memory, and one takes as long to replace as the model takes to load.
        recycle_on: For functions without a guard: when to replace a worker (or, for ``TTL``, ``Modified`` and
            ``Changed``, all).
        retry: Run a call once more if its worker crashed. Only for functions that may safely run twice, and no
            generators.
        breaker: When calls are refused because workers crash or exceed ``timeout`` one after the other. Default:
            ``Breaker()``. It counts no errors, so it takes no ``ignore``, and no ``reload``.
        bounds: How many calls may wait, and how large their arguments and results may be. Default: ``Bounds()``, 256
            calls and 1 GB.
        scope: ``"process"``: the mold and the workers belong to this process, and end with it. ``"host"``: all
            processes of this user on this host that run the same code share them, under any server; they end with the
            last one. :class:`Host` bounds that to those that have a ``version`` in common, too.
        name: For events, logs and errors. Default: the function's module and name.

    Raises:
        InvalidOption: An option is invalid, or the function cannot be imported by name: it is a lambda, a method, or
            defined inside another function or in no file (a notebook, ``python -c``). Or there is no module of
            ``target``, or the decorated function has a body; whether it fits that one is seen by the first load, as a
            ``LoadFailed``.
        NotSupported: This is not Linux.
    """
    if others:
        fix = "Write @isolate() or @isolate(workers=2) above the function."
        raise InvalidOption("function", others[0], why="is no option: isolate takes keywords only", fix=fix)

    def decorate(function: Callable[P, R], /) -> Isolated[P, R]:
        _processes.check_supported()
        check_importable(function, stub=target is not None)
        own, stub = (function.__module__, function.__qualname__), None
        owner, host = owner_of(function), Host.parse(scope)
        if target is not None and owner is not None:
            why = "stands for another one by target=, and takes no model"
            raise InvalidOption("function", function, why=why, fix="Decorate the function that target= names.")
        check_source(function, owner, recycle_on, start)
        if target is None:
            warn_of_other_loaders(function)
        else:
            stub = stub_of(function, target, recycle_on)
        _units.one_of(start, "start", get_args(StartMethod), fix=_START_FIX)
        if host is not None and isinstance(owner, PooledFunction):
            why = "cannot hold the molds of a pool's keys, which its budget ends"
            raise InvalidOption("scope", "host", why=why, fix="Leave it out, or give each model a guard of its own.")
        kind = _units.function_kind(inspect.unwrap(function)) if stub is None else stub.kind
        if _units.flag(retry, "retry") and "generator" in kind:
            fix = "Leave it out for a generator."
            raise InvalidOption("retry", retry, why="cannot send a stream again", fix=fix)
        options = IsolationOptions(
            function=own if stub is None else stub.target,
            stub=stub,
            kind=kind,
            name=".".join(own) if name is None else _units.name(name),
            workers=_units.whole_number(workers, "workers"),
            timeout=None if timeout is None else _units.seconds(timeout, "timeout"),
            start=start,
            retry=retry,
            breaker=Breaker() if breaker is None else _checked_breaker(breaker),
            bounds=Bounds() if bounds is None else _units.instance(bounds, "bounds", Bounds, "Bounds", fix=_BOUNDS_FIX),
            scope=host,
        )
        return Isolated(options, function, source_of(function, options.name, recycle_on))

    return decorate


# What is checked where a function is isolated.


_IMPORT_FIX = "Move it to the top level of a module that can be imported, and isolate it there."

_START_FIX = "Write 'spawn', or 'fork', which is right for most models."

_BOUNDS_FIX = "Write bounds=Bounds(queue=1000)."

#: What the annotation of a stub's result says of the function's kind, where ``def`` does not.
_STREAMS: Mapping[str, FunctionKind] = {
    "Iterator": "generator",
    "Generator": "generator",
    "AsyncIterator": "async generator",
    "AsyncGenerator": "async generator",
}

#: The modules of which it was logged what their molds import for nothing.
_told: set[str] = set()


def _checked_breaker(breaker: Any) -> Breaker:
    given = _units.instance(breaker, "breaker", Breaker, "a Breaker", fix="Write Breaker(failures=5).")
    for option in ("ignore", "reload"):
        if value := getattr(given, option):
            why = "does nothing here: workers that crash or exceed timeout count, and no errors of the function"
            raise InvalidOption(option, value, why=why, fix="Leave it out.")
    return given


def check_importable(function: Any, *, stub: bool = False) -> None:
    """Check that another interpreter can find the function. Nobody looks for a stub, which may stand anywhere."""
    why, fix = "", _IMPORT_FIX
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
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
    elif module == "__main__" and spec is None and not (path is not None and os.path.exists(path)):  # noqa: PTH110
        why = "is in no file (a notebook, python -c, standard input), so a worker process cannot import it"
        fix = "Write it to a file, in a notebook with %%writefile predict.py, and import it from there."
    elif module == "__main__" and spec is not None and spec.name.rpartition(".")[2] == "__main__":
        # multiprocessing leaves it alone: to import it runs it
        why = "is defined in the __main__.py of an archive, a folder or a package, which a worker process cannot import"
        fix = "Move it to another module beside that, and import it in __main__.py."
    if why:
        raise InvalidOption("function", function, why=why, fix=fix)


def stub_of(function: Any, target: Any, recycle_on: Any) -> Stub:
    """What stands for the function that ``target`` names."""
    if (part := part_of_own_code(recycle_on)) is not None:
        why = "is of this program's own code, which the module of target= does not know"
        raise InvalidOption("recycle_on", part, why=why, fix="Give the function in that module a guard with it.")
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
    return Stub((module, name), place_of(function), kind, shown, parameters_of(function), recycle_on)


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
    values = [names.get(name) for name in names_in(code)] if isinstance(code, CodeType) else []
    origins = (one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None) for one in values)
    return {str(origin).partition(".")[0] for origin in origins} & MODEL_LIBRARIES


_public.set_module(globals(), "modelguard")
