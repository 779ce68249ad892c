"""Functions that leak below Python."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
libc.free.argtypes = (ctypes.c_void_p,)
libc.mallopt(-3, 1 << 24)  # M_MMAP_THRESHOLD: all blocks come from the heap; 32 MB is the most that it takes
libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD: and the heap never shrinks by itself


def numbers() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def unfreed(number: int) -> None:
    block = libc.malloc(5000)
    libc.memset(block, number % 256, 5000)


def retained(number: int) -> None:
    """The freed block is too small for the next call, and the block behind it keeps the heap from shrinking."""
    size = 300_000 + 16 * number  # more than any hole that imports have left
    block = libc.malloc(size)
    libc.memset(block, 1, size)
    libc.malloc(size)  # never written to: it takes addresses, and one page
    libc.free(block)
