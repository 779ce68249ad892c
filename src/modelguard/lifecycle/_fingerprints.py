"""Whether a watched path has changed: the identity of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

Fingerprint = tuple[tuple[str, int, int, int, int], ...]

#: A model folder holds tens of files; a path with more entries than this is not one, and reading it would cost time.
MAX_ENTRIES = 10_000


def fingerprint(path: Path) -> Fingerprint | None:
    """Identity of a file, or of every file below a folder: name, device, inode, size and change time.

    Links are followed, so that a swapped link (as Kubernetes does with mounted configuration) is a change.

    Returns:
        None while the path is missing or cannot be read.
    """
    try:
        if not path.is_dir():
            return (_entry(path, ""),)
        return tuple(_entry(file, os.fspath(file.relative_to(path))) for file in _below(path))
    except OSError:
        return None


def _entry(path: Path, name: str) -> tuple[str, int, int, int, int]:
    found = path.stat()
    return name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _below(folder: Path) -> Iterator[Path]:
    count = 0
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > MAX_ENTRIES:
                return
            yield Path(parent, name)
