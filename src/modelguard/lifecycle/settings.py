"""The options of a guard, checked where they are written."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from modelguard import _units
from modelguard.errors import InvalidOption, NoMemoryLimit, PolicyNeverFires
from modelguard.lifecycle.backoff import Backoff
from modelguard.lifecycle.policies import MemoryGrowth, MemoryLimit, Modified, Policy
from modelguard.lifecycle.trimming import Rhythm

M = TypeVar("M")

Swap = Literal["auto", "load_first", "drain_first"]

# As code objects spell it (links unresolved), and no neighbour whose name begins the same.
_PACKAGE = f"{Path(__file__).parent.parent}{os.sep}"


@dataclass(frozen=True, kw_only=True)
class Settings(Generic[M]):
    """Options of a guard, parsed. Durations are seconds."""

    load: Callable[[], Any]
    reload_on: Policy | None
    swap: Swap
    warmup: Callable[[M], object] | None
    validate: Callable[[M], object] | None
    unload: Callable[[M], object] | None
    load_timeout: float | None
    wait_timeout: float
    drain_timeout: float
    defer: float
    backoff: Backoff
    rhythm: Rhythm | None
    prefork: bool
    name: str

    def __post_init__(self) -> None:
        for argument in ("warmup", "validate", "unload"):
            check_callable(argument, getattr(self, argument), arguments=1, optional=True)
        if self.swap not in get_args(Swap):
            names = ", ".join(repr(name) for name in get_args(Swap))
            raise InvalidOption("swap", self.swap, why="there is no such way to swap", fix=f"Choose one of {names}.")
        if not isinstance(self.backoff, Backoff):
            raise InvalidOption("backoff", self.backoff, why="it is no Backoff", fix="Write Backoff('1s', '1m').")
        if not isinstance(self.prefork, bool):
            raise InvalidOption("prefork", self.prefork, why="it says neither yes nor no", fix="Write True or False.")
        if not isinstance(self.name, str) or not self.name:
            raise InvalidOption("name", self.name, why="it names nothing", fix="Give a short text, or leave it out.")


_HOW = ("a function without arguments", "a function of one argument")


def check_callable(argument: str, value: object, *, arguments: int, optional: bool = False) -> None:
    """Refuse what cannot be called with so many arguments, and say so where it is written."""
    if value is None and optional:
        return
    how = _HOW[arguments]
    if not callable(value):
        hint = "Pass the function itself, without calling it: load=lambda: make_model()."
        raise InvalidOption(argument, value, why=f"{how} is needed, and this is a {type(value).__name__}", fix=hint)
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):  # many built-in callables have none
        return
    try:
        signature.bind(*(object() for _ in range(arguments)))
    except TypeError as error:
        fix = "Bind its other arguments, as in lambda: load(path)."
        raise InvalidOption(argument, value, why=f"it is called as {how}, but {error}", fix=fix) from None


def loader_name(load: object) -> str:
    """A name for a guard that was given none: that of its loader, with its place where it has no name."""
    name = getattr(load, "__qualname__", None) or type(load).__qualname__
    code = getattr(load, "__code__", None)
    module = getattr(load, "__module__", None) or "?"
    return f"{module}:{code.co_firstlineno}" if code is not None and "<lambda>" in name else f"{module}.{name}"


def check_policy(policy: Policy, limit: Callable[[], int | None]) -> None:
    """Refuse a policy that cannot be meant here, and warn of one that cannot fire."""
    if not isinstance(policy, Policy):
        raise InvalidOption(
            "reload_on",
            policy,
            why=f"a policy is needed, and this is a {type(policy).__name__}",
            fix="Write for example TTL('1h') | MemoryGrowth('500 MB'), or None to reload only when told to.",
        )
    for part in policy.parts():
        if isinstance(part, MemoryLimit | MemoryGrowth):
            _check_memory(part, limit())
        elif isinstance(part, Modified) and not part.path.exists():
            never(part, f"{part.path} does not exist yet; until it does, nothing can be seen to change")


def memory_bound(argument: str, value: int | str | _units.Percentage, limit: Callable[[], int | None]) -> int:
    """Bytes of a size, or of a share of the memory limit.

    Raises:
        NoMemoryLimit: It is a share, and nothing limits this process.
    """
    size = value if isinstance(value, _units.Percentage) else _units.size_or_percentage(value, argument)
    if not isinstance(size, _units.Percentage):
        return size
    whole = limit()
    if whole is None:
        raise NoMemoryLimit(
            argument,
            str(size),
            why="it is a share of the memory limit, and no cgroup limits this process",
            fix="Give bytes, as in '2 GB', or run the service under a memory limit.",
        )
    return int(whole * size.fraction)


def _check_memory(policy: MemoryLimit | MemoryGrowth, limit: int | None) -> None:
    if isinstance(policy.size, _units.Percentage):
        memory_bound("size", policy.size, lambda: limit)
    elif limit is not None and policy.size >= limit:
        never(policy, f"the process is killed at its limit of {_units.format_bytes(limit)} before")


def never(policy: Policy, why: str) -> None:
    """Warn, at the line outside modelguard that wrote it, of a policy that cannot fire."""
    warnings.warn(f"{policy!r} never fires: {why}", PolicyNeverFires, stacklevel=outside())


def outside() -> int:
    """The ``stacklevel`` (seen from the caller) of the nearest frame that is not modelguard's own."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    return level
