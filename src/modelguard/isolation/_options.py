"""The options of an isolated function, checked where they are written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from modelguard import _units
from modelguard._function_kinds import FunctionKind, kind_of
from modelguard.errors import InvalidOption
from modelguard.isolation._target import Reference, check_importable, reference
from modelguard.lifecycle import runtime
from modelguard.lifecycle._options import check_policy
from modelguard.lifecycle._wrappers import Guarded, owner_of
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.policies import Policy
from modelguard.serving.breaker import Breaker

__all__ = ["IsolationOptions", "StartMethod", "check_function", "parse"]

#: How workers come into being: forked from a mold, or each as a fresh interpreter.
StartMethod = Literal["fork", "spawn"]


@dataclass(frozen=True, kw_only=True)
class IsolationOptions:
    """Options of an isolated function, parsed. Times are seconds, sizes are bytes."""

    name: str
    function: Reference
    kind: FunctionKind
    workers: int
    timeout: float | None
    start: StartMethod
    max_queue: int
    retry: bool
    breaker: Breaker
    max_transfer: int


def parse(
    function: Callable[..., Any],
    *,
    workers: int,
    timeout: _units.Duration | None,
    start: StartMethod,
    max_queue: int,
    retry: bool,
    breaker: Breaker | None,
    max_transfer: int | str,
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
    if breaker is not None and not isinstance(breaker, Breaker):
        raise InvalidOption("breaker", breaker, why="must be a Breaker", fix="Write Breaker(failures=5).")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        why = "must be text that is not empty"
        raise InvalidOption("name", name, why=why, fix="Give a short name, or leave it out.")
    where = reference(function)
    return IsolationOptions(
        name=".".join(where) if name is None else name,
        function=where,
        kind=kind_of(inspect.unwrap(function)),
        workers=_units.whole_number(workers, "workers"),
        timeout=None if timeout is None else _units.seconds(timeout, "timeout"),
        start=start,
        max_queue=_units.whole_number(max_queue, "max_queue"),
        retry=retry,
        breaker=Breaker() if breaker is None else breaker,
        max_transfer=_units.size(max_transfer, "max_transfer"),
    )


def check_function(function: Any, recycle_on: Policy | None) -> None:
    """Check that a function can be isolated.

    Raises:
        InvalidOption: It cannot be imported by name, is batched or isolated already, or ``recycle_on`` does not fit it.
    """
    if hasattr(function, "aio") and hasattr(function, "submit"):
        why = "is batched or isolated already"
        fix = "Put @batched(...) above @isolate(...), which belongs above the guard's decorator."
        raise InvalidOption("function", function, why=why, fix=fix)
    check_importable(function)
    owner = owner_of(function)
    if isinstance(function, Guarded) and not isinstance(owner, ModelGuard):
        why = "takes its model from a pool or from replicas, and isolate needs a guard"
        raise InvalidOption("function", function, why=why, fix="Give each model a guard and a function of its own.")
    if recycle_on is None:
        return
    if owner is not None:
        why = "is for functions without a guard"
        raise InvalidOption("recycle_on", recycle_on, why=why, fix="The guard's reload_on decides here.")
    if not isinstance(recycle_on, Policy):
        why = f"must be a policy or None, not {_units.kind_of(recycle_on)}"
        raise InvalidOption("recycle_on", recycle_on, why=why, fix="Write for example Uses(10_000).")
    check_policy(recycle_on, runtime.default().limit)
