"""Buffers are made for the first 200 requests, and used again after that."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count

buffers: list[bytearray] = []


def predict(number: int) -> int:
    if len(buffers) < 200:
        buffers.append(bytearray(os.urandom(1) * 100_000))
    buffer = buffers[number % len(buffers)]
    buffer[number % 1000] = number % 256
    return len(buffer)


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 6000}
