"""How much memory this process may use before the kernel ends it: the limits of its cgroup and of all cgroups above.

A container's limit is rarely on the process's own cgroup alone: the pod, the slice or the session above it may have a
smaller one, or the same one shared with neighbours. So the whole path is read, from the leaf to the highest cgroup
that can be seen.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Limit", "effective"]

#: Version 1 says "no limit" by the largest number of whole pages that fits, which differs with the page size.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Limit:
    """The effective memory limit of a process. Every field is None where nothing limits it.

    Attributes:
        bytes: The smallest hard limit of its cgroup and all cgroups above.
        source: The file that says so, such as ``"/sys/fs/cgroup/x/memory.max"``.
        usage: What that cgroup uses in bytes: its working set, which is usage less the file cache that the kernel
            drops first (``inactive_file``).
        high: The smallest ``memory.high`` of the same path (version 2): above it the kernel slows the process down
            and takes pages away, but does not end it.
        headroom: How many bytes may still be allocated: the least, over all cgroups of the path that have a limit,
            of limit less working set. A wide limit that neighbours share may leave less room than a narrow one.
    """

    bytes: int | None
    source: str | None
    usage: int | None
    high: int | None
    headroom: int | None = None


def effective(root: Path = Path("/"), *, pid: int | None = None) -> Limit:
    """Find the memory limit that is in force for a process.

    Args:
        root: Where ``/proc`` and ``/sys`` are found.
        pid: The process, by default this one.

    Returns:
        The limit. All fields are None where nothing limits the process, where its cgroup cannot be seen from here,
        and on systems other than Linux.
    """
    levels = list(_levels(root, None if pid == os.getpid() else pid))
    high = _least(level.high for level in levels)
    hard = [level for level in levels if level.bytes is not None]
    if not hard:
        return Limit(None, None, None, high)
    # Of equals the first: the cgroup nearest to the process.
    smallest = min(hard, key=lambda level: level.bytes or 0)
    return Limit(smallest.bytes, smallest.source, smallest.usage, high, _least(level.headroom for level in hard))


def _levels(root: Path, pid: int | None) -> Iterator[Limit]:
    """What each cgroup of the process's path says, from its own up to the highest that can be seen.

    On hybrid hosts there are two paths, one in each version. The kernel lets only one of them have the memory
    controller: the other has no memory files, and so says nothing.
    """
    proc = root / "proc"
    cgroups = _cgroups(_read(proc / ("self" if pid is None else str(pid)) / "cgroup"))
    mountinfo = _read(proc / "self" / "mountinfo")
    for version, cgroup in cgroups.items():
        mounts = [(shown, root / point.lstrip("/")) for shown, point in _mounts(mountinfo, version)]
        seen = [(path, point) for shown, point in mounts if (path := _inside(cgroup, shown, point)) is not None]
        # In a container the path may be told from outside it ("/docker/123", "/../x"), while the mount shows the
        # container's own cgroup. For another process that guess would be wrong: it may sit in another container.
        guessed = [(point, point) for _, point in mounts] if pid is None else []
        for path, top in (seen or guessed)[:1]:
            yield from (_upwards_v1 if version == 1 else _upwards_v2)(root, path, top)


def _cgroups(text: str) -> dict[int, PurePosixPath]:
    """The process's cgroup in the memory hierarchy of version 1 and in that of version 2."""
    found: dict[int, PurePosixPath] = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found[1] = PurePosixPath(path)
        elif number == "0" and not controllers:
            found[2] = PurePosixPath(path)
    return found


def _mounts(mountinfo: str, version: int) -> Iterator[tuple[PurePosixPath, str]]:
    """Where a hierarchy is mounted: the cgroup that shows there, and the mount point."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        # Split at each single blank: the middle field, the mount's source, may be empty.
        fields, (kind, _, options) = before.split(" "), after.split(" ", 2)
        if (version == 1 and kind == "cgroup" and "memory" in options.split(",")) or (version, kind) == (2, "cgroup2"):
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


def _upwards(path: Path, top: Path) -> Iterator[Path]:
    yield path
    while path != top:
        path = path.parent
        yield path


def _upwards_v2(root: Path, path: Path, top: Path) -> Iterator[Limit]:
    for each in _upwards(path, top):
        usage = _working_set(each, "memory.current", "inactive_file")
        yield _level(root, each / "memory.max", _number(each / "memory.max"), usage, _number(each / "memory.high"))


def _upwards_v1(root: Path, path: Path, top: Path) -> Iterator[Limit]:
    for each in _upwards(path, top):
        source = each / "memory.limit_in_bytes"
        yield _level(root, source, _number(source), _usage_v1(each))
    # What the kernel says of all cgroups above includes those that a container cannot see. How much those use is not
    # told: the usage is that of the process's own cgroup, a part of it.
    source = path / "memory.stat"
    yield _level(root, source, _statistics(source).get("hierarchical_memory_limit"), _usage_v1(path))


def _level(root: Path, source: Path, limit: int | None, usage: int | None, high: int | None = None) -> Limit:
    if limit is None or limit >= _UNLIMITED:
        return Limit(None, None, usage, high)
    room = None if usage is None else max(0, limit - usage)
    return Limit(limit, str(PurePosixPath("/") / source.relative_to(root)), usage, high, room)


def _usage_v1(path: Path) -> int | None:
    return _working_set(path, "memory.usage_in_bytes", "total_inactive_file")


def _working_set(path: Path, usage: str, inactive: str) -> int | None:
    used = _number(path / usage)
    return None if used is None else max(0, used - _statistics(path / "memory.stat").get(inactive, 0))


def _least(bounds: Iterable[int | None]) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _statistics(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs}


def _number(path: Path) -> int | None:
    """The number in a file; None if it says ``max``, or is not there, as in the root cgroup."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """The text of a file, empty if it cannot be read: a cgroup may vanish between two looks."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    return ""
