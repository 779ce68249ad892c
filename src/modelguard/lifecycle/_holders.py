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
    call = _describe_call(referrer)
    if call is not None:
        return call
    if isinstance(referrer, types.CellType):
        return "a closure's variable"
    if isinstance(referrer, types.MethodType):
        return f"the bound method {referrer.__qualname__}"
    if isinstance(referrer, dict):
        return _describe_dict(referrer, target)
    attributes = getattr(referrer, "__dict__", None)
    if isinstance(attributes, dict):
        for name, value in list(attributes.items()):
            if value is target:
                return f"attribute {name!r} of a {type(referrer).__module__}.{type(referrer).__qualname__}"
    return f"a {type(referrer).__qualname__}" + (
        f" of {len(referrer)}" if isinstance(referrer, list | tuple | set) else ""
    )


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


def _describe_dict(referrer: dict[Any, Any], target: object) -> str:
    key = next((repr(name) for name, value in list(referrer.items()) if value is target), "?")
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", None) is referrer:
            return f"the global {key} of module {module.__name__}"
    return f"key {key} of a dict"
