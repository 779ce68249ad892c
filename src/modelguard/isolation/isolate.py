"""``isolate``: run a guarded function in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never, ParamSpec, Protocol, TypeVar

from modelguard import _public, _units
from modelguard.errors import InvalidOption
from modelguard.isolation import _processes
from modelguard.isolation._isolated import Isolated
from modelguard.isolation._options import ScopeName, StartMethod, check_function, check_stub, parse
from modelguard.isolation._source import source_of, warn_of_other_loaders
from modelguard.isolation._target import stub_of
from modelguard.lifecycle.policies import Policy
from modelguard.serving.breaker import Breaker

__all__ = ["Isolated", "isolate"]

P = ParamSpec("P")
R = TypeVar("R")


class Decorator(Protocol):
    """What ``isolate(...)`` returns."""

    def __call__(self, function: Callable[P, R], /) -> Isolated[P, R]: ...


def isolate(
    *others: Never,
    target: str | None = None,
    workers: int = 2,
    timeout: _units.Duration | None = 60.0,
    start: StartMethod = "fork",
    recycle_on: Policy | None = None,
    retry: bool = False,
    max_queue: int = 256,
    max_transfer: int | str = "1 GB",
    breaker: Breaker | None = None,
    refork_after: int | None = None,
    scope: ScopeName = "process",
    version: str | None = None,
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
        retry: Run a call once more if its worker crashed. Only for functions that may safely run twice.
        max_queue: How many calls may wait for a worker; more get ``QueueFull``. While a model loads, as many as there
            are workers may wait besides. Calls that were cancelled, or whose time is over, do not count.
        max_transfer: The largest arguments or result, in bytes or as text such as ``"100 MB"``.
        breaker: When calls are refused because workers crash or exceed ``timeout`` one after the other. Default:
            ``Breaker()``. Of its options, ``ignore`` and ``reload`` do not apply here.
        refork_after: After so many calls of one worker, that worker takes the place of the mold, once for each load:
            what its calls have filled is then shared by all workers. For models whose caches fill with traffic. None:
            never.
        scope: ``"process"``: the mold and the workers belong to this process, and end with it. ``"host"``: all
            processes of this user on this host that run the same code share them, under any server; they end with the
            last one.
        version: With ``scope="host"``: text that processes must have in common to share, beside code and options. For
            models that are chosen by an environment variable.
        name: For events, logs and errors. Default: the function's module and name.

    Raises:
        InvalidOption: An option is invalid, or the function cannot be imported by name: it is a lambda, a method, or
            defined inside another function or in a notebook. Or there is no module of ``target``, or the decorated
            function has a body; whether it fits that one is seen by the first load, as a ``LoadFailed``.
        NotSupported: This is not Linux.
    """
    if others:
        fix = "Write @isolate() or @isolate(workers=2) above the function."
        raise InvalidOption("function", others[0], why="is no option: isolate takes keywords only", fix=fix)

    def decorate(function: Callable[P, R], /) -> Isolated[P, R]:
        _processes.check_supported()
        if target is None:
            check_function(function, recycle_on, start)
            warn_of_other_loaders(function)
        else:
            check_stub(function, recycle_on, start)
        options = parse(
            function,
            None if target is None else stub_of(function, target, recycle_on),
            workers=workers,
            timeout=timeout,
            start=start,
            max_queue=max_queue,
            retry=retry,
            breaker=breaker,
            max_transfer=max_transfer,
            refork_after=refork_after,
            scope=scope,
            version=version,
            name=name,
        )
        return Isolated(function, options, source_of(function, options.name, options.kind, recycle_on))

    return decorate


_public.set_module(globals(), "modelguard")
