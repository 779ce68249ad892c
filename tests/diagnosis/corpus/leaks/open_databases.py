"""A database in memory for each user, opened and never closed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from itertools import count

DATABASES: dict[str, sqlite3.Connection] = {}


def database_of(user: str) -> sqlite3.Connection:
    if user not in DATABASES:
        DATABASES[user] = sqlite3.connect(":memory:")  # LEAK
        DATABASES[user].execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, text TEXT)")
    return DATABASES[user]


def predict(user: str) -> int:
    connection = database_of(user)
    connection.execute("INSERT INTO messages (text) VALUES (?)", (f"hello, I am {user}",))
    count_of: int = connection.execute("SELECT count(*) FROM messages").fetchone()[0]
    return count_of


def inputs() -> Iterator[str]:
    return (f"user-{number}" for number in count())


EXPECTED = {"causes": ["connections"], "holders": ["DATABASES"], "calls": 600}
