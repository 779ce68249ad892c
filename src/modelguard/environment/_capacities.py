"""How torch's two libraries for convolutions read the capacities of their caches from variables.

Both read numbers as C's ``atoi`` does: blanks, a sign, decimal digits, and whatever follows is ignored. Text without a
number is 0. Measured with torch 2.13 on x86-64.
"""

from __future__ import annotations

import re

__all__ = ["IDEEP", "ONEDNN", "capacity", "why_unusable"]

ONEDNN = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
IDEEP = "LRU_CACHE_CAPACITY"

#: oneDNN reads the value into a buffer of this size, and ignores a value that does not fit (src/common/utils.cpp).
_ONEDNN_BUFFER = 12

_LONG, _INT = 2**63, 2**32


def capacity(name: str, value: str) -> int | None:
    """The number of entries that a library makes of a value.

    Args:
        name: The variable; every name except :data:`IDEEP` is one of oneDNN's.
        value: Its value.

    Returns:
        Entries. A negative number means no limit; 0 means no cache in oneDNN, and a crash in ideep. None if oneDNN
        ignores the value, which is empty or too long.
    """
    if name != IDEEP and not 0 < len(value.encode(errors="surrogateescape")) < _ONEDNN_BUFFER:
        return None
    number = re.match(r"[ \t\n\v\f\r]*([+-]?[0-9]{1,4000})", value)  # more digits than any variable has a use for
    if number is None:
        return 0
    # atoi is strtol, which ends at the limits of a long, and of this the lowest 32 bits.
    low = max(-_LONG, min(_LONG - 1, int(number[1]))) % _INT
    return low - _INT if low >= _INT // 2 else low


def why_unusable(name: str, value: str) -> str | None:
    """Why a process must not start with a value, as a clause; None if it may."""
    if name == IDEEP and capacity(name, value) == 0:
        return "is read as 0, and torch crashes at its first convolution on CPU (SIGSEGV)"
    return None
