"""Cyclic trees, and a collector that was told to come seldom: memory is a sawtooth."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count

gc.set_threshold(20_000, 5, 5)


class Node:
    def __init__(self, parent: Node | None = None) -> None:
        self.parent = parent
        self.children: list[Node] = []
        self.text = [0.0] * 20
        if parent is not None:
            parent.children.append(self)


def predict(number: int) -> int:
    root = Node()
    for _ in range(number % 20):
        Node(root)
    return len(root.children)


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 12000}
