"""A database for each call, which is closed at its end."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count


def predict(user: str) -> int:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, text TEXT)")
        connection.execute("INSERT INTO messages (text) VALUES (?)", (user * 1000,))
        found: int = connection.execute("SELECT count(*) FROM messages").fetchone()[0]
        return found


def inputs() -> Iterator[str]:
    return (f"user-{number}" for number in count())


EXPECTED = {"calls": 1500}
