"""The marker ``modelguard_memory``: the check of its argument, and its memory reading."""

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

#: Bytes that any test may leave behind, such as an allocator's arena or a code cache.
_SMALLEST = 1_000_000

_WRITE = "Write @pytest.mark.modelguard_memory('50 MB')."


def fault(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    """Describe what is wrong with a use of the marker, and the fix; None if it is correct."""
    if options or len(arguments) != 1:
        given = ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())])
        return f"modelguard_memory({given}): takes exactly one argument, a size. {_WRITE}"
    try:
        limit = _units.size(arguments[0], "modelguard_memory")
    except InvalidOption as error:
        return f"{error} {_WRITE}"
    if limit < _SMALLEST:
        why = "is too small: allocators request memory in pieces of up to a megabyte, which any test may leave behind"
        return f"modelguard_memory({arguments[0]!r}): {why}. Give '1 MB' or more, or use assert_no_growth()."
    try:
        _memory.private(fresh=True)
    except NotSupported as error:
        return f"modelguard_memory({arguments[0]!r}): {error}. Skip the test on this platform."
    return None


def settled_memory() -> int:
    """Private memory in bytes, without garbage and without free memory that the allocator keeps."""
    # pytest does this only later: the frames of a failed test would be freed during the next test.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)
    gc.collect()
    return _reading.trimmed()
