"""A metric with the user as a label: small, and for ever."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from prometheus_client import Counter

REQUESTS = Counter("app_requests", "Requests by user.", ["user"])


def predict(user: str) -> int:
    REQUESTS.labels(user=user).inc()  # LEAK
    return len(user)


def inputs() -> Iterator[str]:
    return (f"user-{number:09d}" for number in count())


EXPECTED = {
    "causes": ["metric labels"],
    "holders": ["REQUESTS", "app_requests"],
    "calls": 9000,
    "libraries": ["prometheus_client"],
}
