"""Eight threads, started as they are needed, which share the work."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

executor = ThreadPoolExecutor(max_workers=8)


def digest(part: bytes) -> str:
    return hashlib.sha256(part * 2000).hexdigest()


def predict(number: int) -> int:
    parts = [b"%d-%d" % (number, part) for part in range(8)]
    return len("".join(executor.map(digest, parts)))


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 1500}
