"""Uploads between 10 KB and 8 MB, in any order."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator


def predict(upload: bytes) -> int:
    return len(zlib.compress(upload[: len(upload) // 2] + upload[len(upload) // 2 :], 1))


def inputs() -> Iterator[bytes]:
    chance = random.Random(1)
    while True:
        yield chance.randbytes(1000) * int(10 ** chance.uniform(1, 3.9))


EXPECTED = {"calls": 600}
