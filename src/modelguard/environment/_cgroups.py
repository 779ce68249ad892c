"""The cgroups of a process, from its own up to the highest that can be seen.

A container's limit is rarely on the process's own cgroup alone: the pod, the slice or the session above may have a
smaller limit, or one that several containers share. So limits are read along the whole path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from modelguard.environment import _proc

__all__ = ["folders", "number", "shown", "text"]


def folders(root: Path, pid: int | None, controller: str) -> Iterator[tuple[int, list[Path]]]:
    """Find the folders of a process's cgroup and of all cgroups above it.

    On hybrid hosts there are two paths, one in each version. The kernel assigns a controller to one of them only; in
    the other its files are missing.

    Args:
        root: The folder that holds ``proc`` and ``sys``.
        pid: The process, None for this one.
        controller: The controller in version 1, such as ``"memory"``; version 2 has one hierarchy for all.

    Yields:
        The version, 1 or 2, and the folders, the process's own first. Nothing if its cgroup cannot be seen.
    """
    own = pid in (None, os.getpid())
    cgroups = _paths(root, None if own else pid, controller)
    mounted = _proc.if_readable(_proc.mounts, root) or []
    for version, cgroup in cgroups.items():
        mounts = [
            (PurePosixPath(mount.root), root / mount.point.lstrip("/"))
            for mount in mounted
            if _holds(mount, version, controller)
        ]
        seen = [(folder, point) for top, point in mounts if (folder := _under(cgroup, top, point)) is not None]
        # In a container the path may be the host's ("/docker/123", "/../x"), while the mount shows the container's
        # own cgroup. For another process this guess could be wrong: it may run in another container.
        guessed = [(point, point) for _, point in mounts] if own else []
        for folder, top in (seen or guessed)[:1]:
            yield version, list(_upwards(folder, top))


def text(file: Path) -> str:
    """The text of a file; empty if it cannot be read: a cgroup may be removed between two reads."""
    with suppress(OSError):
        return file.read_text(encoding="utf-8", errors="surrogateescape")
    return ""


def number(file: Path) -> int | None:
    """The number in a file; None if the file contains ``max`` or -1, or is missing, as in the root cgroup."""
    found = text(file).strip()
    return int(found) if found.isdecimal() else None


def shown(file: Path, root: Path) -> str:
    """The path of a file, without ``root``."""
    return str(PurePosixPath("/") / file.relative_to(root))


def _paths(root: Path, pid: int | None, controller: str) -> dict[int, PurePosixPath]:
    """The process's cgroup in the controller's hierarchy of version 1, and in that of version 2."""
    found: dict[int, PurePosixPath] = {}
    for hierarchy, controllers, cgroup in _proc.if_readable(_proc.cgroups, pid, root) or []:
        if controller in controllers:
            found[1] = PurePosixPath(cgroup)
        elif hierarchy == "0" and controllers == ("",):
            found[2] = PurePosixPath(cgroup)
    return found


def _holds(mount: _proc.Mount, version: int, controller: str) -> bool:
    """Whether a mount shows the controller's hierarchy of this version."""
    if version == 1:
        return mount.kind == "cgroup" and controller in mount.options
    return mount.kind == "cgroup2"


def _under(cgroup: PurePosixPath, top: PurePosixPath, point: Path) -> Path | None:
    """The folder of a cgroup under a mount; None if the mount does not show it."""
    if ".." in cgroup.parts or not cgroup.is_relative_to(top):
        return None
    folder = point / cgroup.relative_to(top)
    return folder if folder.is_dir() else None


def _upwards(folder: Path, top: Path) -> Iterator[Path]:
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder
