"""How many CPUs this process may keep busy: those that it may run on, and no more than its cgroups' quota pays for.

``os.cpu_count()`` counts the machine's. A container with a quota of two on a machine of sixty-four that starts
sixty-four threads is stopped by the kernel for most of each tenth of a second.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelguard.environment import _cgroups

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Cpus", "effective"]


@dataclass(frozen=True, slots=True)
class Cpus:
    """How many CPUs a process may keep busy.

    Attributes:
        count: More than 0, and whole unless a quota says otherwise, such as 1.5.
        source: Where that comes from: the file of a quota such as ``"/sys/fs/cgroup/x/cpu.max"``, the file that lists
            the CPUs that the process may run on, or ``"os.cpu_count()"``.
    """

    count: float
    source: str


def effective(root: Path = Path("/"), *, pid: int | None = None) -> Cpus:
    """Find how many CPUs a process may keep busy.

    Args:
        root: Where ``/proc`` and ``/sys`` are found.
        pid: The process, by default this one.

    Returns:
        The least of the CPUs that it may run on (its affinity, which a cpuset narrows too) and the CPU quotas of its
        cgroup and all cgroups above; of equals the first. Where there is no ``/proc``, the CPUs of the machine.

    Raises:
        ProcessLookupError: There is no such process.
    """
    affinity = root / "proc" / ("self" if pid is None else str(pid)) / "status"
    if pid is not None and (root / "proc" / "self").exists() and not affinity.exists():
        raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone")
    allowed = _allowed(affinity)
    machine = Cpus(os.cpu_count() or 1, "os.cpu_count()")
    first = machine if allowed is None else Cpus(allowed, _cgroups.name_of(affinity, root))
    return min([first, *_quotas(root, pid)], key=lambda cpus: cpus.count)


def _allowed(status: Path) -> int | None:
    """How many CPUs a process may run on, of a line such as ``Cpus_allowed_list:	0-3,8``."""
    for line in _cgroups.text(status).splitlines():
        name, _, ranges = line.partition(":")
        if name == "Cpus_allowed_list":
            return sum(_length(each) for each in ranges.strip().split(","))
    return None


def _length(cpus: str) -> int:
    first, _, last = cpus.partition("-")
    return int(last or first) - int(first) + 1


def _quotas(root: Path, pid: int | None) -> Iterator[Cpus]:
    for version, folders in _cgroups.path(root, pid, "cpu"):
        for folder in folders:
            source = folder / ("cpu.cfs_quota_us" if version == 1 else "cpu.max")
            count = _quota_v1(folder) if version == 1 else _quota_v2(source)
            if count is not None:
                yield Cpus(count, _cgroups.name_of(source, root))


def _quota_v1(folder: Path) -> float | None:
    quota, period = (_cgroups.number(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return quota / period if quota and period else None


def _quota_v2(source: Path) -> float | None:
    """The quota of a file such as ``150000 100000``: microseconds of work in so many of time; ``max`` is none."""
    quota, _, period = _cgroups.text(source).strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None
