"""A handler per request, which nobody removes from its logger."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from itertools import count

logger = logging.getLogger("shop.requests")
logger.setLevel(logging.WARNING)
logger.propagate = False


def predict(text: str) -> int:
    record = io.StringIO(text * 50)  # LEAK
    handler = logging.StreamHandler(record)  # LEAK
    handler.setFormatter(logging.Formatter(f"%(asctime)s {text[:12]} %(message)s"))  # LEAK
    logger.addHandler(handler)
    logger.debug("classified %s", text)
    return len(record.getvalue())


def inputs() -> Iterator[str]:
    return (f"request {number:08d} of the shop" for number in count())


EXPECTED = {"causes": ["python objects"], "holders": ["shop.requests", "handlers"], "calls": 2500}
