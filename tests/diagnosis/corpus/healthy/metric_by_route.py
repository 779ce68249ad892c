"""Metrics by route and status: few labels, all known."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from prometheus_client import Histogram

SECONDS = Histogram("app_seconds", "Seconds of a request.", ["route", "status"])
ROUTES = ("/predict", "/batch", "/health", "/metrics")


def predict(number: int) -> str:
    route = ROUTES[number % 4]
    SECONDS.labels(route=route, status="500" if number % 97 == 0 else "200").observe(number % 10 / 10)
    return route


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 6000, "libraries": ["prometheus_client"]}
