"""Memory readings of a process.

The figure that matters is private memory: what the system would get back if the process ended. RSS is misleading: it
counts pages that forked workers share once for each worker.
"""

import errno
import importlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelguard import _units
from modelguard.environment import _limits, _proc
from modelguard.environment._mappings import MemoryMapping
from modelguard.errors import NotSupported

__all__ = ["MemoryUsage", "PrivateMeter", "private", "private_of", "usage"]

#: Readings may take one hundredth of the time.
_INTERVAL_PER_COST = 100

#: Bytes that the rollup may leave open before the single mappings are read, which takes ten times as long.
_LEFT_OPEN = 2**20


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """The memory of one process, in bytes. A field is None if the platform does not show it.

    On Linux the figures come from ``/proc/PID/smaps_rollup``; pages of hugetlbfs are in none of them. Elsewhere they
    come from psutil.

    Attributes:
        rss: All pages in memory, shared or not.
        pss: The same, with each shared page divided by the number of processes that map it.
        uss: Private memory: ``private_clean`` and ``private_dirty``.
        shared_clean: Pages that other processes map too, unchanged since they were read from disk.
        shared_dirty: Pages that other processes map too, written to since they were mapped.
        private_clean: Pages of this process alone, unchanged since they were read from disk.
        private_dirty: Pages of this process alone, written to.
        swap: Memory that was moved to swap.
        limit: The memory limit of the process's cgroups.
        limit_source: The file with that limit.
        headroom: How many bytes may still be allocated: what the cgroup limits leave, or what the machine has
            available, whichever is less.
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


def usage(pid: int | None = None, *, root: Path = _proc.ROOT) -> MemoryUsage:
    """Read how much memory a process uses and may still allocate.

    Args:
        pid: The process. Default: this one.
        root: The folder that holds ``proc`` and ``sys``.

    Returns:
        The figures. Reading them walks the process's page tables: about 6 ms in a process of 600 MB.

    Raises:
        InvalidOption: ``pid`` is not a process id.
        ProcessLookupError: There is no such process, or it has exited.
        PermissionError: The process belongs to another user.
        NotSupported: Neither ``/proc`` nor psutil shows the memory of a process.
    """
    if pid is not None:
        _units.process_id(pid, "pid")
    if not _has_smaps(root):
        return _from_psutil(pid)
    try:
        sums = _proc.memory_sums(pid, root)
    except PermissionError:
        raise _no_permission(pid) from None
    if not sums:
        raise _gone(pid)
    limit = _limits.memory_limit(pid, root=root)
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
        headroom=_smaller(limit.headroom, _available(root)),
    )


class PrivateMeter:
    """Readings of private memory that are cheap enough to be taken on every call.

    A reading walks the page tables, about 6 ms in a process of 600 MB. After each reading, the meter returns the same
    value for a hundred times as long as the reading took, so readings take at most 1 % of the time.
    Thread-safe: while one thread reads, the others get the last reading.

    Args:
        read: Takes a reading in bytes.
        clock: A monotonic clock, in seconds.
    """

    def __init__(self, read: Callable[[], int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._read = read
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Drop the last reading. A forked child does this first: the reading is its parent's."""
        # One tuple, replaced as a whole, so that no thread combines a value with the time of another reading.
        self._last: tuple[int | None, float] = (None, -math.inf)
        # A thread of the parent may have held the old lock; in the child it would never be released.
        self._reading = threading.Lock()

    def __call__(self, *, fresh: bool = False) -> int:
        """Private memory in bytes.

        Args:
            fresh: Take a reading now, whatever it costs.

        Raises:
            NotSupported: Neither ``/proc`` nor psutil shows the memory of this process.
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
        self._last = (value, end + _INTERVAL_PER_COST * (end - start))
        return value


def _read_private() -> int:
    held = _written(None, _proc.ROOT) if _has_smaps(_proc.ROOT) else _from_psutil(None).uss
    if held is None:
        reason = "this platform shows only the resident set, which includes shared pages"
        raise NotSupported("private memory", reason=reason)
    return held


_meter = PrivateMeter(_read_private)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_meter.forget)


def private(*, fresh: bool = False) -> int:
    """The private memory of this process; cheap enough to be read on every call.

    It counts what this process alone has written and the system cannot reclaim: private dirty pages, and those in
    swap. USS would add the clean pages of files that no other process maps at the moment, so it jumps when another
    process opens or closes the same model file. Pages of a file on disk do not count while they are dirty either: the
    system writes them to the disk, and takes them back. Without ``/proc`` it is USS.

    Args:
        fresh: Take a reading now. Otherwise the last one may be returned; readings take at most 1 % of the time.

    Returns:
        Bytes. A forked child never gets its parent's reading.

    Raises:
        NotSupported: Neither ``/proc`` nor psutil shows the memory of this process.
    """
    return _meter(fresh=fresh)


def _has_smaps(root: Path) -> bool:
    return (_proc.folder(None, root) / "smaps").exists()


def _uss(sums: dict[str, int]) -> int | None:
    if "Private_Clean" not in sums or "Private_Dirty" not in sums:
        return None
    return sums["Private_Clean"] + sums["Private_Dirty"]


def private_of(pid: int, root: Path = _proc.ROOT) -> int:
    """:func:`private` of any process; 0 if it has ended, or belongs to another user."""
    try:
        return _written(pid, root) or 0
    except OSError:
        return 0


def _written(pid: int | None, root: Path) -> int | None:
    """What a process alone has written and the system cannot reclaim, in bytes; None if the kernel does not show it.

    The kernel counts each page of a mapped file as dirty until it is on the disk, also where this process only reads
    it: a model that was just downloaded would count as private memory. The rollup does not say how many of the dirty
    pages are those, but nearly always between which figures their number lies, and that these are the same. Before
    Linux 5.4 it does not tell them from shared memory either: then all of them count.

    Args:
        pid: The process. Default: this one.
        root: The folder that holds ``proc``.
    """
    sums = _proc.memory_sums(pid, root)
    dirty = sums.get("Private_Dirty")
    if dirty is None:
        return None
    swap = sums.get("SwapPss", sums.get("Swap", 0))
    if not {"Anonymous", "Pss_Anon", "Pss_Shmem"} <= sums.keys():  # before Linux 5.4
        return dirty + swap
    shared_memory = sums["Pss_Shmem"]  # memfd, /dev/shm and MAP_ANONYMOUS | MAP_SHARED
    all_anonymous = sums["Anonymous"]
    # Of n processes that share a page each is charged 1/n of it, so at least half of what they share is missing here.
    charged = sums["Pss_Anon"]
    shared = min(sums.get("Shared_Dirty", 0), 2 * (all_anonymous - charged))
    anonymous = all_anonymous - sums.get("LazyFree", 0)
    least = min(dirty, anonymous - shared + shared_memory)
    most = min(dirty, anonymous + shared_memory, charged + shared_memory)
    if most - least > _LEFT_OPEN:  # a forked process that also maps dirty files or shared memory together with others
        most = min(dirty, _private_anonymous(_proc.smaps(pid, root)) + shared_memory)
    return most + swap


def _private_anonymous(mappings: Iterable[MemoryMapping]) -> int:
    sizes = [mapping.sizes for mapping in mappings]
    return sum(min(one.get("Private_Dirty", 0), one.get("Anonymous", 0)) for one in sizes)


def _available(root: Path) -> int | None:
    return (_proc.if_readable(_proc.meminfo, root) or {}).get("MemAvailable")


def _smaller(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _from_psutil(pid: int | None) -> MemoryUsage:
    # Imported only if there is no /proc: the import takes time.
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
        raise _no_permission(pid) from None
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
        return NotSupported("memory readings", reason="neither /proc nor psutil shows this process")
    return ProcessLookupError(errno.ESRCH, f"process {pid} does not exist, or is a kernel thread")


def _no_permission(pid: int | None) -> Exception:
    if pid is None:
        return NotSupported("memory readings", reason="this process may not read its own memory figures")
    fix = "read it as its owner or as root"
    return PermissionError(errno.EACCES, f"process {pid} belongs to another user; {fix}")
