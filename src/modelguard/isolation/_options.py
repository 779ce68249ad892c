"""The options of an isolated function, checked where they are written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from modelguard import _units
from modelguard._function_kinds import FunctionKind, kind_of
from modelguard.errors import InvalidOption
from modelguard.isolation._target import Reference, Stub, check_importable, reference
from modelguard.lifecycle import runtime
from modelguard.lifecycle._options import check_policy
from modelguard.lifecycle._policy import Policy, subset
from modelguard.lifecycle._pool_leases import PooledFunction
from modelguard.lifecycle._wrappers import owner_of
from modelguard.lifecycle.model_guard import ModelGuard
from modelguard.lifecycle.policies import Changed
from modelguard.lifecycle.replicas import ModelReplicas
from modelguard.serving.breaker import Breaker

__all__ = ["IsolationOptions", "ScopeName", "StartMethod", "check_function", "check_source", "check_stub", "parse"]

#: How workers come into being: forked from a mold, or each as a fresh interpreter.
StartMethod = Literal["fork", "spawn"]


#: Which processes share a mold: each has its own, or all of the host have one.
ScopeName = Literal["process", "host"]


@dataclass(frozen=True, kw_only=True)
class IsolationOptions:
    """Options of an isolated function, parsed. Times are seconds, sizes are bytes."""

    name: str
    function: Reference
    stub: Stub | None
    kind: FunctionKind
    workers: int
    timeout: float | None
    start: StartMethod
    max_queue: int
    retry: bool
    breaker: Breaker
    max_transfer: int
    refork_after: int | None
    scope: ScopeName
    version: str | None


def parse(
    function: Callable[..., Any],
    target: tuple[Reference, Stub] | None,
    *,
    workers: int,
    timeout: _units.Duration | None,
    start: StartMethod,
    max_queue: int,
    retry: bool,
    breaker: Breaker | None,
    max_transfer: int | str,
    refork_after: int | None,
    scope: ScopeName,
    version: str | None,
    name: str | None,
) -> IsolationOptions:
    """Check and parse the options.

    Raises:
        InvalidOption: One of them is invalid.
    """
    if not isinstance(retry, bool):
        raise InvalidOption("retry", retry, why="must be True or False", fix="Write retry=True.")
    if start not in get_args(StartMethod):
        raise InvalidOption("start", start, why="must be 'fork' or 'spawn'", fix="'fork' is right for most models.")
    if scope not in get_args(ScopeName):
        fix = "'host' lets all processes of this host share one mold."
        raise InvalidOption("scope", scope, why="must be 'process' or 'host'", fix=fix)
    if version is not None and scope == "process":
        fix = "Leave it out, or write scope='host'."
        raise InvalidOption("version", version, why="needs scope='host': other molds are not shared", fix=fix)
    if version is not None and not isinstance(version, str):
        why = f"must be text, not {_units.kind_of(version)}"
        raise InvalidOption("version", version, why=why, fix="Write for example version='2026-10'.")
    if breaker is not None and not isinstance(breaker, Breaker):
        raise InvalidOption("breaker", breaker, why="must be a Breaker", fix="Write Breaker(failures=5).")
    name = None if name is None else _units.name(name)
    if scope == "host" and isinstance(owner_of(function), PooledFunction):
        why = "cannot hold the molds of a pool's keys, which its budget ends"
        raise InvalidOption("scope", scope, why=why, fix="Leave it out, or give each model a guard of its own.")
    where, stub = (reference(function), None) if target is None else target
    kind = kind_of(inspect.unwrap(function)) if stub is None else stub.kind
    if refork_after is not None:
        _check_refork(refork_after, start, kind)
    return IsolationOptions(
        name=".".join(reference(function)) if name is None else name,
        function=where,
        stub=stub,
        kind=kind,
        workers=_units.whole_number(workers, "workers"),
        timeout=None if timeout is None else _units.seconds(timeout, "timeout"),
        start=start,
        max_queue=_units.whole_number(max_queue, "max_queue"),
        retry=retry,
        breaker=Breaker() if breaker is None else breaker,
        max_transfer=_units.size(max_transfer, "max_transfer"),
        refork_after=refork_after,
        scope=scope,
        version=version,
    )


def _check_refork(refork_after: int, start: StartMethod, kind: FunctionKind) -> None:
    _units.whole_number(refork_after, "refork_after")
    why = ""
    if start == "spawn":
        why = "needs workers that are forked, and start='spawn' forks none"
    elif kind in {"coroutine", "async generator"}:
        why = "is not for coroutines: the event loop of a worker does not survive a fork"
    if why:
        raise InvalidOption("refork_after", refork_after, why=why, fix="Leave it out.")


def check_function(function: Any, recycle_on: Policy | None, start: StartMethod) -> None:
    """Check that a function can be isolated.

    Raises:
        InvalidOption: It cannot be imported by name, or :func:`check_source` refuses it.
    """
    check_importable(function)
    check_source(function, owner_of(function), recycle_on, start)


def check_stub(function: Any, recycle_on: Policy | None, start: StartMethod) -> None:
    """Check that a function can stand for another one.

    Raises:
        InvalidOption: It is a method, has a guard, or ``recycle_on`` is no policy that a process without its module can
            read.
    """
    check_importable(function, stub=True)
    if owner_of(function) is not None:
        why = "stands for another one by target=, and takes no model"
        raise InvalidOption("function", function, why=why, fix="Decorate the function that target= names.")
    check_source(function, None, recycle_on, start)
    foreign = () if recycle_on is None else recycle_on.parts()
    for part in foreign:
        if isinstance(part, Changed) or type(part).__module__.partition(".")[0] != "modelguard":
            why = "is of this program's own code, which the module of target= does not know"
            raise InvalidOption("recycle_on", part, why=why, fix="Give the function in that module a guard with it.")


def check_source(function: Any, owner: object, recycle_on: Policy | None, start: StartMethod) -> None:
    """Check that a function fits what isolates it.

    Args:
        function: The function.
        owner: Its guard, its pool or its replicas; None if it has none.
        recycle_on: The option.
        start: The option.

    Raises:
        InvalidOption: It is batched or isolated already, ``recycle_on`` does not fit it, or ``start="spawn"`` has no
            mold to keep.
    """
    if hasattr(function, "aio") and hasattr(function, "submit"):
        why = "is batched or isolated already"
        fix = "Put @batched(...) above @isolate(...), which belongs above the guard's decorator."
        raise InvalidOption("function", function, why=why, fix=fix)
    if isinstance(owner, ModelReplicas):
        why = "takes its model from replicas, and a worker runs one call at a time"
        raise InvalidOption("function", function, why=why, fix="Decorate it with a guard, and give workers=.")
    if isinstance(owner, ModelGuard) and (replay := owner.engine.guard.options.replay) is not None:
        why = "compares two models in one process, and under isolate each mold has one"
        raise InvalidOption("replay", replay, why=why, fix="Leave it out, and check each new model with validate=.")
    if start == "spawn":
        _check_keeps_nothing(owner.reload_on if isinstance(owner, ModelGuard) else recycle_on)
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
        fix = "Give the pool a ttl or idle, and leave TTL, Modified, Changed and Idle out."
        raise InvalidOption("recycle_on", recycle_on, why=why, fix=fix)
    world = runtime.default()
    check_policy(recycle_on, world.limit, world.gpu)


def _check_keeps_nothing(policy: object) -> None:
    if isinstance(policy, Policy) and any(part.ends_workers for part in policy.parts()):
        why = "needs workers that are forked from a mold, and start='spawn' has none"
        fix = "Leave keep out: then all workers end, and the next call loads the model again."
        raise InvalidOption("keep", "mold", why=why, fix=fix)
