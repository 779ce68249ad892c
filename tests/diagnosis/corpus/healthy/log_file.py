"""A log file that grows, and is begun anew at 50 MB: that fills the kernel's cache and not the process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

log = Path(tempfile.gettempdir(), f"service-{os.getpid()}.log")


def predict(number: int) -> int:
    large = log.exists() and log.stat().st_size > 50_000_000
    with log.open("w" if large else "a", encoding="utf-8") as stream:
        stream.write(f"request {number} was answered\n" * 400)
    return number


def inputs() -> Iterator[int]:
    return count()


EXPECTED = {"calls": 6000}
