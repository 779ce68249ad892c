"""A child for each page, which writes to its copy of a table and ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count

table = bytearray(b"x" * 2_000_000)


def predict(page: int) -> int:
    child = os.fork()
    if child == 0:
        table[:] = bytes([page % 256]) * len(table)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 150}
