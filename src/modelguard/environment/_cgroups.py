"""The cgroups that a process is in, from its own up to the highest that can be seen.

A container's limit is rarely on the process's own cgroup alone: the pod, the slice or the session above it may have a
smaller one, or the same one shared with neighbours. So what reads a limit reads the whole path.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["name_of", "number", "path", "text"]


def path(root: Path, pid: int | None, controller: str) -> Iterator[tuple[int, list[Path]]]:
    """Find the folders of a process's cgroup and of all cgroups above it.

    On hybrid hosts there are two paths, one in each version. The kernel lets only one of them have a controller: the
    other has no files of it, and so says nothing.

    Args:
        root: Where ``/proc`` and ``/sys`` are found.
        pid: The process, None for this one.
        controller: Which hierarchy of version 1 is meant, such as ``"memory"``; version 2 has only one.

    Yields:
        The version, 1 or 2, and the folders, the process's own first. Nothing where its cgroup cannot be seen.
    """
    own = pid in (None, os.getpid())
    cgroups = _cgroups(text(root / "proc" / ("self" if own else str(pid)) / "cgroup"), controller)
    mountinfo = text(root / "proc" / "self" / "mountinfo")
    for version, cgroup in cgroups.items():
        mounts = [(shown, root / point.lstrip("/")) for shown, point in _mounts(mountinfo, version, controller)]
        seen = [(folder, point) for shown, point in mounts if (folder := _inside(cgroup, shown, point)) is not None]
        # In a container the path may be told from outside it ("/docker/123", "/../x"), while the mount shows the
        # container's own cgroup. For another process that guess would be wrong: it may sit in another container.
        guessed = [(point, point) for _, point in mounts] if own else []
        for folder, top in (seen or guessed)[:1]:
            yield version, list(_upwards(folder, top))


def text(file: Path) -> str:
    """The text of a file, empty if it cannot be read: a cgroup may vanish between two looks."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    return ""


def number(file: Path) -> int | None:
    """The number in a file; None if it says ``max`` or -1, or is not there, as in the root cgroup."""
    found = text(file).strip()
    return int(found) if found.isdecimal() else None


def name_of(file: Path, root: Path) -> str:
    """The name of a file as it is without a root of one's own."""
    return str(PurePosixPath("/") / file.relative_to(root))


def _cgroups(told: str, controller: str) -> dict[int, PurePosixPath]:
    """The process's cgroup in the controller's hierarchy of version 1 and in that of version 2."""
    found: dict[int, PurePosixPath] = {}
    for line in told.splitlines():
        hierarchy, controllers, cgroup = line.split(":", 2)
        if controller in controllers.split(","):
            found[1] = PurePosixPath(cgroup)
        elif hierarchy == "0" and not controllers:
            found[2] = PurePosixPath(cgroup)
    return found


def _mounts(mountinfo: str, version: int, controller: str) -> Iterator[tuple[PurePosixPath, str]]:
    """Where a hierarchy is mounted: the cgroup that shows there, and the mount point."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        # Split at each single blank: the middle field, the mount's source, may be empty.
        fields, (kind, _, options) = before.split(" "), after.split(" ", 2)
        if (version == 1 and kind == "cgroup" and controller in options.split(",")) or (version, kind) == (
            2,
            "cgroup2",
        ):
            yield PurePosixPath(_unescape(fields[3])), _unescape(fields[4])


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes of blanks and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


def _inside(cgroup: PurePosixPath, shown: PurePosixPath, point: Path) -> Path | None:
    """The folder of a cgroup under a mount, None if the mount does not show it."""
    if ".." in cgroup.parts or not cgroup.is_relative_to(shown):
        return None
    folder = point / cgroup.relative_to(shown)
    return folder if folder.is_dir() else None


def _upwards(folder: Path, top: Path) -> Iterator[Path]:
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder
