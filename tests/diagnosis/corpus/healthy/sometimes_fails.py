"""A third of the requests is not valid, and refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count


def predict(body: str) -> int:
    request = json.loads(body)
    return sum(request["values"])


def inputs() -> Iterator[str]:
    for number in count():
        body = json.dumps({"values": list(range(number % 300))})
        yield body if number % 3 else body[:-1]


EXPECTED = {"calls": 6000}
