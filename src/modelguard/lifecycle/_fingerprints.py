"""Whether a watched path has changed: the identity of its files."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

Entry = tuple[str, int, int, int, int, int]
Fingerprint = tuple[Entry, ...]

#: A model folder holds tens of files. A path with more entries than this is not one, and reading it would take time.
MAX_ENTRIES = 10_000
#: The last entry where there are more.
_MORE: Entry = ("", -1, -1, -1, -1, -1)


def fingerprint(path: Path) -> Fingerprint | None:
    """Identity of a file, or of every file below a folder: name, device, inode, size and times of change.

    Links are followed, so that a swapped link (as Kubernetes does with mounted configuration) is a change: also those
    to folders, each folder once. The time of the last change of the inode is part of it, because tools such as
    ``rsync --times`` set back the file's own time.

    Returns:
        None while the path is missing or cannot be read.
    """
    try:
        if not path.is_dir():
            return (_entry(path, ""),)
        entries = tuple(itertools.islice(_below(path), MAX_ENTRIES + 1))
    except OSError:
        return None
    return entries if len(entries) <= MAX_ENTRIES else (*entries[:-1], _MORE)


def is_whole(found: Fingerprint | None) -> bool:
    """Whether nothing was left out because there is too much."""
    return found is None or _MORE not in found[-1:]


def _entry(path: Path, name: str) -> Entry:
    found = path.stat()
    return name, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _entry_below(folder: Path, path: Path) -> Entry:
    name = os.fspath(path.relative_to(folder))
    try:
        return _entry(path, name)
    except OSError:  # a link that leads nowhere, or a file that was removed just now: the others count all the same
        return name, 0, 0, 0, 0, 0


def _below(folder: Path) -> Iterator[Entry]:
    """The files below a folder, and the links to folders."""
    known = {_entry(folder, "")[1:3]}
    for parent, folders, names in os.walk(folder, followlinks=True):
        followed = []
        for name in sorted(folders):
            path = Path(parent, name)
            entry = _entry_below(folder, path)
            if path.is_symlink():
                yield (*entry[:3], 0, 0, 0)  # what is in that folder counts by itself
            if entry[1:3] not in known:
                known.add(entry[1:3])
                followed.append(name)
        folders[:] = followed
        for name in sorted(names):
            yield _entry_below(folder, Path(parent, name))
