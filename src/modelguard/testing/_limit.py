"""The marker ``modelguard_memory``: its argument, and how it reads memory."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from typing import Any

from modelguard import _units
from modelguard.environment import _memory
from modelguard.errors import InvalidOption, NotSupported
from modelguard.testing import _reading

__all__ = ["fault", "settled_memory"]

#: Bytes that any test may leave behind: an allocator's arena, a code cache.
_LEAST = 1_000_000

_WRITE = "Write @pytest.mark.modelguard_memory('50 MB')."


def fault(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    """What is wrong with a use of the marker, and the fix; None if nothing is."""
    if options or len(arguments) != 1:
        given = ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())])
        return f"modelguard_memory({given}): it takes one size and nothing else. {_WRITE}"
    try:
        limit = _units.size(arguments[0], "modelguard_memory")
    except InvalidOption as error:
        return f"{error} {_WRITE}"
    if limit < _LEAST:
        why = "any test may leave that much behind: allocators take memory in pieces of up to a megabyte"
        return f"modelguard_memory({arguments[0]!r}): {why}. Give '1 MB' or more, or use assert_no_growth()."
    try:
        _memory.private(fresh=True)
    except NotSupported as error:
        return f"modelguard_memory({arguments[0]!r}): {error}. Skip the test on this platform."
    return None


def settled_memory() -> int:
    """Private memory in bytes, without garbage and without what the allocator keeps for later."""
    # pytest does this a moment later: the frames of a failed test would be freed in the middle of the next test.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    gc.collect()
    return _reading.trimmed()
