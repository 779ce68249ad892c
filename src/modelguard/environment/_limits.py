"""The memory that a process may use before the kernel kills it: the limits of its cgroup and of all cgroups above.

The whole path of cgroups is read, in version 1 and in version 2, because any of them may have the smallest limit.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from modelguard.environment import _cgroups, _proc

__all__ = ["Limit", "Strain", "memory_limit", "oom_kills", "strain"]

#: Version 1 writes "no limit" as the largest number of whole pages that fits, which differs with the page size.
_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class Limit:
    """The memory limit of a process. A field is None if nothing limits the process.

    Attributes:
        bytes: The smallest hard limit of its cgroup and all cgroups above.
        source: The file with that limit, such as ``"/sys/fs/cgroup/x/memory.max"``.
        usage: The bytes that this cgroup uses: its working set, which is usage minus the file cache that the kernel
            drops first (``inactive_file``).
        high: The smallest ``memory.high`` of the same path (version 2): above it the kernel slows the process down
            and reclaims pages, but does not kill it.
        headroom: How many bytes may still be allocated: the smallest difference of limit and working set, over all
            cgroups of the path that have a limit. A large limit that neighbours share may leave less room than a
            small one. Swap is not counted: a model that is swapped out cannot serve.
        swap: How many bytes may be moved to swap, 0 for none: the smallest ``memory.swap.max`` of the path, or in
            version 1 what ``memory.memsw.limit_in_bytes`` allows beyond the limit of the same cgroup.
    """

    bytes: int | None
    source: str | None
    usage: int | None
    high: int | None
    headroom: int | None = None
    swap: int | None = None


@dataclass(frozen=True, slots=True)
class Strain:
    """How short of memory the cgroup of a process is, and has been. A field is None if it could not be seen.

    Attributes:
        killed: How many of its processes the kernel has killed for want of memory.
        held: The bytes, without file cache, that the cgroup with the smallest limit uses: the kernel cannot drop them.
        peak: The most bytes that this cgroup has used, file cache included.
    """

    killed: int | None = None
    held: int | None = None
    peak: int | None = None


def memory_limit(pid: int | None = None, *, root: Path = _proc.ROOT) -> Limit:
    """Find the memory limit of a process.

    Args:
        pid: The process. Default: this one.
        root: The folder that holds ``proc`` and ``sys``.

    Returns:
        The limit. All fields are None if nothing limits the process, if its cgroup cannot be seen from here, and on
        systems other than Linux.
    """
    levels = list(_levels(root, pid))
    high = _smallest(level.high for level in levels)
    swap = _smallest(level.swap for level in levels)
    hard = [level for level in levels if level.bytes is not None]
    if not hard:
        return Limit(None, None, None, high, swap=swap)
    # If several are equal, this is the cgroup nearest to the process.
    nearest = min(hard, key=lambda level: level.bytes or 0)
    headroom = _smallest(level.headroom for level in hard)
    return Limit(nearest.bytes, nearest.source, nearest.usage, high, headroom, swap)


def oom_kills(pid: int | None = None, *, root: Path = _proc.ROOT) -> int | None:
    """How many processes of a process's cgroup the kernel has killed for want of memory; None if it does not say.

    In version 2 those of all cgroups below count too.

    Args:
        pid: The process. Default: this one.
        root: The folder that holds ``proc`` and ``sys``.
    """
    for version, folders in _cgroups.folders(root, pid, "memory"):
        counted = _statistics(folders[0] / ("memory.oom_control" if version == 1 else "memory.events"))
        if "oom_kill" in counted:
            return counted["oom_kill"]
    return None


def strain(limit: Limit, pid: int | None = None, *, root: Path = _proc.ROOT) -> Strain:
    """Find how short of memory a process's cgroup is.

    Args:
        limit: The process's limit.
        pid: The process. Default: this one.
        root: The folder that holds ``proc`` and ``sys``.
    """
    killed = oom_kills(pid, root=root)
    if limit.source is None:
        return Strain(killed)
    folder = (root / limit.source.lstrip("/")).parent
    figures = _statistics(folder / "memory.stat")
    used = _cgroups.number(folder / "memory.current")
    if used is None:
        used, peak = (_cgroups.number(folder / f"memory.{name}_in_bytes") for name in ("usage", "max_usage"))
        droppable = figures.get("total_inactive_file", 0) + figures.get("total_active_file", 0)
    else:
        peak = _cgroups.number(folder / "memory.peak")
        droppable = sum(figures.get(name, 0) for name in ("inactive_file", "active_file", "slab_reclaimable"))
    return Strain(killed, None if used is None else max(0, used - droppable), peak)


def _levels(root: Path, pid: int | None) -> Iterator[Limit]:
    """The limit of each cgroup on the process's path."""
    for version, folders in _cgroups.folders(root, pid, "memory"):
        for folder in folders:
            yield _level_v1(root, folder) if version == 1 else _level_v2(root, folder)
        if version == 1:
            yield _above_v1(root, folders[0])


def _level_v2(root: Path, folder: Path) -> Limit:
    source = folder / "memory.max"
    usage = _working_set(folder, "memory.current", "inactive_file")
    high, swap = (_cgroups.number(folder / name) for name in ("memory.high", "memory.swap.max"))
    return _level(root, source, _cgroups.number(source), usage, high=high, swap=swap)


def _level_v1(root: Path, folder: Path) -> Limit:
    source = folder / "memory.limit_in_bytes"
    limit = _cgroups.number(source)
    with_swap = _cgroups.number(folder / "memory.memsw.limit_in_bytes")
    return _level(root, source, limit, _usage_v1(folder), swap=_beyond(limit, with_swap))


def _above_v1(root: Path, folder: Path) -> Limit:
    """The kernel's own figures for all cgroups above, including those that a container cannot see.

    The kernel does not show their usage. The usage here is that of the process's own cgroup, which is a part of it.
    """
    source = folder / "memory.stat"
    figures = _statistics(source)
    limit = figures.get("hierarchical_memory_limit")
    swap = _beyond(limit, figures.get("hierarchical_memsw_limit"))
    return _level(root, source, limit, _usage_v1(folder), swap=swap)


def _level(
    root: Path, source: Path, limit: int | None, usage: int | None, *, high: int | None = None, swap: int | None = None
) -> Limit:
    if limit is None or limit >= _UNLIMITED:
        return Limit(None, None, usage, high, swap=swap)
    room = None if usage is None else max(0, limit - usage)
    return Limit(limit, _cgroups.shown(source, root), usage, high, room, swap)


def _beyond(limit: int | None, with_swap: int | None) -> int | None:
    """The swap that is allowed by a limit on memory, and one on memory and swap together."""
    if limit is None or with_swap is None or with_swap >= _UNLIMITED:
        return None
    return max(0, with_swap - limit)


def _usage_v1(folder: Path) -> int | None:
    return _working_set(folder, "memory.usage_in_bytes", "total_inactive_file")


def _working_set(folder: Path, usage: str, inactive: str) -> int | None:
    used = _cgroups.number(folder / usage)
    return None if used is None else max(0, used - _statistics(folder / "memory.stat").get(inactive, 0))


def _smallest(bounds: Iterable[int | None]) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _statistics(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in _cgroups.text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs}
