"""How many CPUs this process may keep busy, by its affinity and the quotas of its cgroups.

``os.cpu_count()`` counts the machine's CPUs. In a container with a quota of two CPUs on a machine with 64, the kernel
stops a pool of 64 threads for most of each tenth of a second.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelguard.environment import _cgroups, _proc

__all__ = ["Cpus", "affinity", "available_cpus"]


@dataclass(frozen=True, slots=True)
class Cpus:
    """How many CPUs a process may keep busy.

    Attributes:
        count: More than 0. A quota may be a fraction, such as 1.5.
        source: Where the number comes from: the file of a quota such as ``"/sys/fs/cgroup/x/cpu.max"``, the file with
            the process's affinity, or ``"os.cpu_count()"``.
    """

    count: float
    source: str


def available_cpus(pid: int | None = None, *, root: Path = _proc.ROOT) -> Cpus:
    """Find how many CPUs a process may keep busy.

    Args:
        pid: The process. Default: this one.
        root: The folder that holds ``proc`` and ``sys``.

    Returns:
        The smallest of the process's affinity (which a cpuset narrows too) and the CPU quotas of its cgroup and all
        cgroups above it; the first if several are equal. Without ``/proc``, the CPUs of the machine.

    Raises:
        ProcessLookupError: There is no such process.
    """
    status = _proc.folder(pid, root) / "status"
    if pid is not None and _proc.is_mounted(root) and not status.exists():
        raise ProcessLookupError(errno.ESRCH, f"process {pid} does not exist")
    allowed = affinity(pid, root=root)
    if allowed is None:
        first = Cpus(os.cpu_count() or 1, "os.cpu_count()")
    else:
        first = Cpus(allowed, _cgroups.shown(status, root))
    return min([first, *_quotas(root, pid)], key=lambda cpus: cpus.count)


def affinity(pid: int | None = None, *, root: Path = _proc.ROOT) -> int | None:
    """The number of CPUs that a process may run on; None if ``/proc`` does not show it."""
    fields = _proc.if_readable(_proc.status, pid, root) or {}
    ranges = fields.get("Cpus_allowed_list")  # such as "0-3,8"
    return None if ranges is None else sum(_length(each) for each in ranges.split(","))


def _length(cpus: str) -> int:
    first, _, last = cpus.partition("-")
    return int(last or first) - int(first) + 1


def _quotas(root: Path, pid: int | None) -> Iterator[Cpus]:
    for version, folders in _cgroups.folders(root, pid, "cpu"):
        for folder in folders:
            source = folder / ("cpu.cfs_quota_us" if version == 1 else "cpu.max")
            count = _quota_v1(folder) if version == 1 else _quota_v2(source)
            if count is not None:
                yield Cpus(count, _cgroups.shown(source, root))


def _quota_v1(folder: Path) -> float | None:
    quota, period = (_cgroups.number(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return quota / period if quota and period else None


def _quota_v2(source: Path) -> float | None:
    """Read a quota such as ``150000 100000``: microseconds of work per microseconds of time; ``max`` means none."""
    quota, _, period = _cgroups.text(source).strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
