"""Buffers that grow by a little each time, with small blocks between them: no hole is large enough for the next."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import count

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
libc.free.argtypes = (ctypes.c_void_p,)
libc.mallopt(-3, 1 << 24)  # M_MMAP_THRESHOLD: all blocks come from the heap; 32 MB is the most that it takes
libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: and the heap never shrinks by itself


def predict(number: int) -> int:
    size = 300_000 + 16 * number  # more than any hole that imports have left
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.malloc(size)  # never written to: it takes addresses, and one page
    libc.free(block)  # LEAK
    return size


def inputs() -> Iterator[int]:
    return count(1)


EXPECTED = {"causes": ["retention"], "holders": ["malloc_trim", "allocator"], "calls": 600}
