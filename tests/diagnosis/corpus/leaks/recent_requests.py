"""The recent requests in a deque, without a maxlen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

RECENT: deque[tuple[int, bytes]] = deque()


def predict(body: bytes) -> int:
    RECENT.append((len(body), body.upper()))  # LEAK
    return sum(size for size, _ in list(RECENT)[-10:]) // 10


def inputs() -> Iterator[bytes]:
    return (b"%d," % number * 400 for number in count(100_000))


EXPECTED = {"causes": ["python objects"], "holders": ["RECENT"], "calls": 3000}
