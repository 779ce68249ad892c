"""Functions that look like leaks and are none."""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

buffer: list[bytes] = []
warm: list[bytes] = []
file = Path(tempfile.gettempdir(), f"modelguard-corpus-{os.getpid()}")


def texts() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield f"{number:012d}"


def sawtooth(text: str) -> None:
    """A buffer that is flushed."""
    buffer.append(os.urandom(1) * 20_000 + text.encode())
    if len(buffer) == 1500:
        buffer.clear()


def warm_up(text: str) -> None:
    if len(warm) < 200:
        warm.append(os.urandom(1) * 100_000)


def page_cache(text: str) -> None:
    """A file that grows fills the kernel's cache, not the process."""
    with file.open("ab" if not file.exists() or file.stat().st_size < 50_000_000 else "wb") as stream:
        stream.write(text.encode() * 1000)


def batches() -> Iterator[int]:
    """Batches that grow up to a limit."""
    yield from itertools.chain(range(1, 200), itertools.repeat(200))


def growing_batch(size: int) -> int:
    return sum(bytearray(50_000 * size)[::4096])


@functools.lru_cache(maxsize=300)
def full_cache(text: str) -> bytes:
    return os.urandom(1) * 50_000 + text.encode()


def forked(text: str) -> None:
    """Children that write to their copies."""
    if os.fork() == 0:
        shared[:] = b"y" * len(shared)
        os._exit(0)
    os.wait()


shared = bytearray(b"x" * 5_000_000)
