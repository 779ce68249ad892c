"""A C function returns memory that the caller has to free, and the caller does not know."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import count

libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.strdup.argtypes = (ctypes.c_char_p,)


def normalized(text: bytes) -> bytes:
    copy = libc.strdup(text)  # LEAK
    return ctypes.string_at(copy).lower()


def predict(text: bytes) -> int:
    return len(normalized(text))


def inputs() -> Iterator[bytes]:
    return (b"Document %d " % number * 300 for number in count(100_000))


EXPECTED = {
    "causes": ["native memory"],
    "holders": ["strdup"],
    "calls": 4000,
    "open": "tracemalloc does not see malloc, and memray no function of the C library that ctypes calls",
}
