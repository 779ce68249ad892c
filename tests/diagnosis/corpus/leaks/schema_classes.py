"""A class is made for each request's schema, and a registry keeps them all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import ClassVar


class Schema:
    registry: ClassVar[list[type]] = []

    def __init_subclass__(cls) -> None:
        Schema.registry.append(cls)


def predict(*fields: str) -> int:
    made = type("RequestSchema", (Schema,), dict.fromkeys(fields))  # LEAK
    return len(vars(made))


def inputs() -> Iterator[list[str]]:
    return ([f"field_{number}_{part}" for part in range(10)] for number in count())


EXPECTED = {"causes": ["python objects"], "holders": ["Schema.registry"], "calls": 2500}
