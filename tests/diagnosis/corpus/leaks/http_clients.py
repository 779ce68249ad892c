"""A client for each tenant's back end; each has an SSL context of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import httpx

CLIENTS: dict[str, httpx.Client] = {}


def predict(tenant: str) -> str:
    if tenant not in CLIENTS:
        CLIENTS[tenant] = httpx.Client(base_url=f"https://{tenant}.example.org")  # LEAK
    return str(CLIENTS[tenant].base_url)


def inputs() -> Iterator[str]:
    return (f"tenant{number}" for number in count())


EXPECTED = {"causes": ["ssl contexts"], "holders": ["CLIENTS"], "calls": 72, "libraries": ["httpx"]}
