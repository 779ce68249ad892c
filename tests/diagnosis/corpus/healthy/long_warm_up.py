"""The curves of 6,000 products are computed when they are first asked for: that takes half of the run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

curves: dict[int, list[float]] = {}


def predict(product: int) -> float:
    if product not in curves:
        curves[product] = [product / (1 + day) for day in range(90)]
    return max(curves[product])


def inputs() -> Iterator[int]:
    return (number * 7 % 6000 for number in count())


EXPECTED = {"calls": 12000}
