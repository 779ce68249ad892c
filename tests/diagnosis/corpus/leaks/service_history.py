"""A service object that keeps all requests, for a page of statistics that nobody looks at."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Request:
    text: str
    started: float = field(default_factory=time.time)
    tokens: list[str] = field(default_factory=list)


class Service:
    def __init__(self) -> None:
        self.history: list[Request] = []

    def answer(self, text: str) -> int:
        request = Request(text)
        request.tokens = text.split()  # LEAK
        self.history.append(request)  # LEAK
        return len(request.tokens)


service = Service()


def predict(text: str) -> int:
    return service.answer(text)


def inputs() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield " ".join(f"{word}{number}" for word in ("invoice", "amount", "date", "sender", "tax") * 6)


EXPECTED = {"causes": ["python objects"], "holders": ["history"], "calls": 5000}
