"""Templates with ever new names, of which jinja2 keeps 400: cycles that are old when they go, and collected late."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import jinja2

ENVIRONMENT = jinja2.Environment(loader=jinja2.FunctionLoader(lambda name: f"hello {name} {{{{ x }}}}"))


def predict(name: str) -> str:
    return ENVIRONMENT.get_template(name).render(x=1)


def inputs() -> Iterator[str]:
    return (f"mail-{number}" for number in count())


EXPECTED = {"calls": 2000, "libraries": ["jinja2"]}
