"""A parser whose trees are cyclic, in a service that turned the garbage collector off "for latency"."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count

gc.disable()


class Node:
    def __init__(self, word: str, parent: Node | None = None) -> None:
        self.word = word
        self.parent = parent
        self.children: list[Node] = []
        if parent is not None:
            parent.children.append(self)


def parse(text: str) -> Node:
    root = Node("ROOT")
    for word in text.split():
        Node(word, root)  # LEAK
    return root


def predict(text: str) -> int:
    return len(parse(text).children)


def inputs() -> Iterator[str]:
    return (" ".join(f"token{number + part}" for part in range(30)) for number in count())


EXPECTED = {"causes": ["cycles"], "holders": ["Node", "gc.disable", "gc.enable"], "calls": 4000}
