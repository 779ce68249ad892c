"""Who still refers to a model that should be gone."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from typing import Any

#: How many holders are named.
MAX_HOLDERS = 5


def holders(watch: weakref.ref[Any]) -> tuple[str, ...]:
    """Describe who refers to an object, at most five of them."""
    target = watch()
    if target is None:
        return ()
    found: list[str] = []
    # A plain loop: a comprehension or generator would itself hold `target`, and be found.
    for referrer in gc.get_referrers(target):
        description = _describe(referrer, target)
        if description not in found:
            found.append(description)
        if len(found) == MAX_HOLDERS:
            break
    return tuple(found)


_SUSPENDED = (
    (types.GeneratorType, "gi_code", "gi_frame"),
    (types.CoroutineType, "cr_code", "cr_frame"),
    (types.AsyncGeneratorType, "ag_code", "ag_frame"),
)


def _describe(referrer: Any, target: object) -> str:
    try:
        return _describe_known(referrer, target)
    except Exception:  # noqa: BLE001 - a referrer may be anything, with a repr or attributes that raise
        return f"a {type(referrer).__qualname__}"


def _describe_known(referrer: Any, target: object) -> str:
    description = _describe_call(referrer) or _describe_place(referrer, target)
    if description is not None:
        return description
    kind = type(referrer).__qualname__
    if not isinstance(referrer, list | tuple | set | dict):
        return f"a {kind}"
    container = (
        f"key {_key(referrer, target)} of a dict" if isinstance(referrer, dict) else f"a {kind} of {len(referrer)}"
    )
    owner = _owner(referrer)
    return container if owner is None else f"{container}, which is {owner}"


def _describe_place(referrer: Any, target: object) -> str | None:
    """A name by which a programmer finds the reference: an attribute, a global, a closure; None if there is none."""
    if isinstance(referrer, types.CellType):
        return "a closure's variable"
    if isinstance(referrer, types.MethodType):
        return f"the bound method {referrer.__qualname__}"
    if isinstance(referrer, dict):
        modules = (one for one in list(sys.modules.values()) if getattr(one, "__dict__", None) is referrer)
        names = (f"the global {_key(referrer, target)} of module {module.__name__}" for module in modules)
        return next(names, None)
    attributes = getattr(referrer, "__dict__", {})
    for name, value in list(attributes.items()):
        if value is target:
            owner = referrer if isinstance(referrer, type) else type(referrer)
            article = "class" if isinstance(referrer, type) else "a"
            return f"attribute {name!r} of {article} {owner.__module__}.{owner.__qualname__}"
    return None


def _owner(container: Any) -> str | None:
    """Who holds a container that holds the model: one level up, and over the ``__dict__`` of an instance two."""
    for referrer in gc.get_referrers(container):
        if isinstance(referrer, types.CellType):  # no name by which anybody finds it
            continue
        description = _describe_place(referrer, container)
        if description is None and isinstance(referrer, dict):
            instances = [one for one in gc.get_referrers(referrer) if getattr(one, "__dict__", None) is referrer]
            description = next(filter(None, (_describe_place(one, container) for one in instances)), None)
        if description is not None:
            return description
    return None


def _key(holder: dict[Any, Any], target: object) -> str:
    return next((repr(name) for name, value in list(holder.items()) if value is target), "?")


def _describe_call(referrer: Any) -> str | None:
    if isinstance(referrer, types.FrameType):  # the garbage collector does not track the frames of running calls
        return f"a traceback, through an ended call of {_place(referrer.f_code, referrer)}"
    for kind, code, frame in _SUSPENDED:
        if isinstance(referrer, kind):
            return f"a suspended call of {_place(getattr(referrer, code), getattr(referrer, frame))}"
    return None


def _place(code: types.CodeType, frame: types.FrameType | None) -> str:
    line = code.co_firstlineno if frame is None else frame.f_lineno
    return f"{code.co_qualname} ({code.co_filename}:{line})"
