"""Memory readings of a process.

The figure that matters is private memory: what would come back if the process ended. RSS is no guide: it counts pages
that forked workers share once for each of them.
"""

from __future__ import annotations

import errno
import importlib
import math
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelguard.environment import limits
from modelguard.errors import InvalidOption, NotSupported

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MemoryUsage", "PrivateMeter", "private", "usage"]

#: A reading may cost one part in a hundred of the time, and no more.
_PATIENCE = 100


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """What one process holds, in bytes. A field is None where the platform does not tell.

    On Linux the figures come from ``/proc/PID/smaps_rollup``; pages of hugetlbfs are in none of them. Elsewhere they
    come from psutil.

    Attributes:
        rss: All pages in memory, shared or not.
        pss: The same, each shared page divided by the number of processes that map it.
        uss: Private memory: ``private_clean`` and ``private_dirty``.
        shared_clean: Pages that other processes map too, as they are on disk.
        shared_dirty: Pages that other processes map too, written to since they were mapped.
        private_clean: Pages of this process alone, as they are on disk.
        private_dirty: Pages of this process alone, written to.
        swap: What was moved out of memory.
        limit: The effective memory limit of the process's cgroups.
        limit_source: The file that says so.
        headroom: How many bytes may still be allocated: the least of what the cgroup limits leave and what the
            machine has available.
    """

    rss: int
    pss: int | None
    uss: int | None
    shared_clean: int | None
    shared_dirty: int | None
    private_clean: int | None
    private_dirty: int | None
    swap: int | None
    limit: int | None
    limit_source: str | None
    headroom: int | None


def usage(pid: int | None = None, *, root: Path = Path("/")) -> MemoryUsage:
    """Read what a process holds and what it may still take.

    Args:
        pid: The process, by default this one.
        root: Where ``/proc`` and ``/sys`` are found.

    Returns:
        The figures. Reading them walks the process's page tables, about 6 ms in a process of 600 MB.

    Raises:
        InvalidOption: ``pid`` is not the number of a process.
        ProcessLookupError: There is no such process, or it has exited.
        PermissionError: The process belongs to someone else.
        NotSupported: Nothing here tells what a process holds.
    """
    if pid is not None and (type(pid) is not int or pid < 1):
        why = "it is not the number of a process"
        raise InvalidOption("pid", pid, why=why, fix="Give a positive whole number, or None for this process.")
    if not _has_smaps(root):
        return _from_psutil(pid)
    try:
        sums = _smaps(root / "proc" / ("self" if pid is None else str(pid)))
    except PermissionError:
        raise _not_ours(pid) from None
    except ProcessLookupError:
        sums = {}
    if not sums:
        raise _gone(pid)
    limit = limits.effective(root, pid=pid)
    return MemoryUsage(
        rss=sums["Rss"],
        pss=sums.get("Pss"),
        uss=_uss(sums),
        shared_clean=sums.get("Shared_Clean"),
        shared_dirty=sums.get("Shared_Dirty"),
        private_clean=sums.get("Private_Clean"),
        private_dirty=sums.get("Private_Dirty"),
        swap=sums.get("Swap"),
        limit=limit.bytes,
        limit_source=limit.source,
        headroom=_least(limit.headroom, _available(root)),
    )


class PrivateMeter:
    """A reading that may be asked for on every call: it takes a fresh one only when that is cheap by now.

    A reading of private memory walks the page tables, about 6 ms in a process of 600 MB. A fresh one is taken once a
    hundred times the cost of the last one has passed, so readings take at most 1 % of the time; until then the last
    one is returned. Safe under threads: while one of them reads, the others get the last reading.

    Args:
        read: Takes a reading.
        clock: Seconds from any start, never going back.
    """

    def __init__(self, read: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._read = read
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Drop the last reading. A child calls this right after its birth: what was read is its parent's."""
        # One tuple, replaced whole, so that no thread ever pairs a value with another one's time.
        self._last: tuple[int | None, float] = (None, -math.inf)
        # A thread of the parent may have held the old lock; in the child it would never be released.
        self._reading = threading.Lock()

    def __call__(self, *, fresh: bool = False) -> int:
        """Give private memory in bytes.

        Args:
            fresh: Take a reading now, whatever it costs.

        Raises:
            NotSupported: Nothing here tells what this process holds.
        """
        last, due = self._last
        if fresh or last is None:
            return self._measure()
        reading = self._reading
        if self._clock() < due or not reading.acquire(blocking=False):
            return last
        try:
            return self._measure()
        finally:
            reading.release()

    def _measure(self) -> int:
        start = self._clock()
        value = self._read()
        end = self._clock()
        self._last = (value, end + _PATIENCE * (end - start))
        return value


def _read_private() -> int:
    root = Path("/")
    held = _dirty(_smaps(root / "proc" / "self")) if _has_smaps(root) else _from_psutil(None).uss
    if held is None:
        raise NotSupported("private memory", reason="this platform tells only the resident set, shared pages included")
    return held


_meter = PrivateMeter(_read_private)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_meter.forget)


def private(*, fresh: bool = False) -> int:
    """Give the private memory of this process, cheaply enough to be asked on every call.

    What this process alone has written and the system cannot take back: private dirty pages, and those in swap. USS
    would add the clean pages of files that no other process maps just now, and so it jumps when a neighbour opens or
    closes the same model file. Where there is no ``/proc`` it is USS.

    Args:
        fresh: Take a reading now. Otherwise the last one may be returned; at most 1 % of the time goes into readings.

    Returns:
        Bytes. A forked child never gets its parent's reading.

    Raises:
        NotSupported: Nothing here tells what this process holds.
    """
    return _meter(fresh=fresh)


def _has_smaps(root: Path) -> bool:
    return (root / "proc" / "self" / "smaps").exists()


def _smaps(process: Path) -> dict[str, int]:
    """The sums over all mappings of a process, in bytes; empty if it has none or is gone."""
    # Kernels before 4.14 and some sandboxes have no rollup: there the mappings are added up here.
    for name in ("smaps_rollup", "smaps"):
        try:
            text = (process / name).read_bytes()
        except FileNotFoundError:
            continue
        return _add_up(text)
    return {}


def _add_up(text: bytes) -> dict[str, int]:
    sums: dict[str, int] = {}
    for line in text.splitlines():
        # "Rss:   123 kB"; other lines describe the mapping itself.
        words = line.split()
        if len(words) == 3 and words[2] == b"kB" and words[0].endswith(b":"):  # noqa: PLR2004 - the three words above
            key = words[0][:-1].decode()
            sums[key] = sums.get(key, 0) + int(words[1]) * 1024
    return sums


def _uss(sums: dict[str, int]) -> int | None:
    if "Private_Clean" not in sums or "Private_Dirty" not in sums:
        return None
    return sums["Private_Clean"] + sums["Private_Dirty"]


def _dirty(sums: dict[str, int]) -> int | None:
    dirty = sums.get("Private_Dirty")
    return None if dirty is None else dirty + sums.get("SwapPss", sums.get("Swap", 0))


def _available(root: Path) -> int | None:
    try:
        text = (root / "proc" / "meminfo").read_bytes()
    except OSError:
        return None
    return _add_up(text).get("MemAvailable")


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _from_psutil(pid: int | None) -> MemoryUsage:
    # Where /proc tells, psutil is not needed, and its import is not free.
    psutil: Any = importlib.import_module("psutil")
    try:
        process = psutil.Process(pid)
        rss = process.memory_info().rss
        # psutil 8 moves these figures from memory_full_info to memory_footprint.
        name = "memory_footprint" if hasattr(process, "memory_footprint") else "memory_full_info"
        full = getattr(process, name)()
    except psutil.NoSuchProcess:
        raise _gone(pid) from None
    except psutil.AccessDenied:
        raise _not_ours(pid) from None
    return MemoryUsage(
        rss=rss,
        pss=getattr(full, "pss", None),
        uss=getattr(full, "uss", None),
        shared_clean=None,
        shared_dirty=None,
        private_clean=None,
        private_dirty=None,
        swap=getattr(full, "swap", None),
        limit=None,
        limit_source=None,
        headroom=psutil.virtual_memory().available,
    )


def _gone(pid: int | None) -> Exception:
    if pid is None:
        return NotSupported("memory readings", reason="neither /proc nor psutil tells about this process")
    return ProcessLookupError(errno.ESRCH, f"process {pid} is gone, or is a part of the kernel")


def _not_ours(pid: int | None) -> Exception:
    if pid is None:
        return NotSupported("memory readings", reason="this process may not look at itself")
    fix = "read it as its own user or as root"
    return PermissionError(errno.EACCES, f"process {pid} belongs to someone else; {fix}")
