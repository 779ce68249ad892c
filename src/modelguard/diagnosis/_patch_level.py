"""Which patch of a Python a file holds, where only the minor version is in its name."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

__all__ = ["patch_level"]


def patch_level(file: Path, version: tuple[int, int]) -> int | None:
    """The last number of an interpreter's version, from the text of it in its program or library; None if unknown.

    Args:
        file: ``python3.14`` or ``libpython3.14.so.1.0``. Nothing is executed.
        version: Major and minor.
    """
    text = "\\.".join(map(str, version)).encode()
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            found = re.search(rb"(?<![\d.])" + text + rb"\.(\d{1,3})\+?\x00", content)
            return int(found[1]) if found else None
    except (OSError, ValueError):  # not there, not readable, or empty
        return None
