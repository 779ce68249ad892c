"""Scratch memory is mapped for each picture, and the maps are kept."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from itertools import count

BUFFERS: list[mmap.mmap] = []


def predict(picture: bytes) -> int:
    buffer = mmap.mmap(-1, 16 * 1024)  # LEAK
    for _ in range(8):
        buffer.write(picture)
    BUFFERS.append(buffer)
    return buffer.tell()


def inputs() -> Iterator[bytes]:
    return (number.to_bytes(8, "big") * 250 for number in count())


EXPECTED = {"causes": ["mappings"], "holders": ["BUFFERS"], "calls": 2000}
