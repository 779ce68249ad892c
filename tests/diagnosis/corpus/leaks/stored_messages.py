"""All messages in one database in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import count


class Archive:
    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("CREATE TABLE messages (text TEXT, answer TEXT)")

    def add(self, text: str, answer: str) -> None:
        self.database.execute("INSERT INTO messages VALUES (?, ?)", (text, answer))  # LEAK


archive = Archive()


def predict(text: str) -> int:
    archive.add(text, text[::-1] * 60)
    return len(text)


def inputs() -> Iterator[str]:
    return (f"message {number} of a long conversation" for number in count())


EXPECTED = {"causes": ["databases"], "holders": ["archive.database"], "calls": 3000}
