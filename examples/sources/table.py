"""A row of a table: a program that checks itself, for docs/recipes.md."""

import sqlite3
from contextlib import closing
from pathlib import Path

from stand_ins import Model, wait_until

from modelguard import Changed, Loaded, Swap, guard


def wanted() -> tuple[str, str]:
    with closing(sqlite3.connect("models.db", timeout=5)) as database:
        row: tuple[str, str] = database.execute("SELECT version, path FROM models WHERE name = 'nlp'").fetchone()
        return row


def load_wanted() -> Loaded[Model]:
    version, path = wanted()
    return Loaded(Model(Path(path).read_bytes()), version=version)


with closing(sqlite3.connect("models.db")) as database, database:
    Path("one.bin").write_bytes(b"one")
    Path("two.bin").write_bytes(b"two")
    database.execute("CREATE TABLE models (name, version, path)")
    database.execute("INSERT INTO models VALUES ('nlp', '1', 'one.bin')")

nlp = guard(load_wanted, reload_on=Changed(wanted, every="200ms"), swap=Swap(defer=0), name="nlp")
with nlp:
    with closing(sqlite3.connect("models.db")) as database, database:
        database.execute("UPDATE models SET version = '2', path = 'two.bin'")
    wait_until(lambda: nlp.version == "2")
