"""A context variable whose default is one list for all requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from itertools import count

request_log: ContextVar[list[dict[str, object]]] = ContextVar("request_log", default=[])  # noqa: B039 - the leak


def log(step: str, detail: object) -> None:
    request_log.get().append({"step": step, "detail": detail})  # LEAK


def predict(text: str) -> int:
    words = text.split()  # LEAK
    log("split", words)
    log("counted", len(words))
    return len(words)


def inputs() -> Iterator[str]:
    return (" ".join(f"word{number + part}" for part in range(25)) for number in count())


EXPECTED = {"causes": ["python objects"], "holders": ["request_log"], "calls": 5000}
