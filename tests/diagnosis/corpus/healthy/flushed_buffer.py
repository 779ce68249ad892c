"""Records are gathered, and written when there are 1,500."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

pending: list[bytes] = []


def flush() -> None:
    Path("/dev/null").write_bytes(b"".join(pending))
    pending.clear()


def predict(number: int) -> int:
    pending.append(str(number).encode() * 1500)
    if len(pending) >= 1500:
        flush()
    return len(pending)


def inputs() -> Iterator[int]:
    return count(1_000_000)


EXPECTED = {"calls": 25000}
