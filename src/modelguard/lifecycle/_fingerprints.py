"""Whether a watched path has changed: the identity of its files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

Entry = tuple[str, int, int, int, int, int]
Fingerprint = tuple[Entry, ...]

#: A model folder holds tens of files. A path with more entries than this is not one, and reading it would take time.
MAX_ENTRIES = 10_000


def fingerprint(path: Path) -> Fingerprint | None:
    """Identity of a file, or of every file below a folder: name, device, inode, size and times of change.

    Links are followed, so that a swapped link (as Kubernetes does with mounted configuration) is a change. The time of
    the last change of the inode is part of it, because tools such as ``rsync --times`` set back the file's own time.

    Returns:
        None while the path is missing or cannot be read.
    """
    try:
        if not path.is_dir():
            return (_entry(path, ""),)
        return tuple(_entry_below(path, file) for file in _below(path))
    except OSError:
        return None


def _entry(path: Path, name: str) -> Entry:
    found = path.stat()
    return name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _entry_below(folder: Path, file: Path) -> Entry:
    name = os.fspath(file.relative_to(folder))
    try:
        return _entry(file, name)
    except OSError:  # a link that leads nowhere, or a file that was removed just now: the others count all the same
        return name, 0, 0, 0, 0, 0


def _below(folder: Path) -> Iterator[Path]:
    count = 0
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > MAX_ENTRIES:
                return
            yield Path(parent, name)
