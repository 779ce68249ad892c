"""Memory readings of a process.

The figure that matters is private memory: what the system would get back if the process ended. RSS is misleading: it
counts pages that forked workers share once for each worker.
"""

import importlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from modelguard import _units
from modelguard.errors import NotSupported
from modelguard.facts import _proc
from modelguard.runtime import fork_hooks

# The cgroups of a process, from its own up to the highest that can be seen.
#
# A container's limit is rarely on the process's own cgroup alone: the pod, the slice or the session above may have a
# smaller limit, or one that several containers share. So limits are read along the whole path.


def cgroup_folders(root: Path, pid: int | None, controller: str) -> Iterator[tuple[int, list[Path]]]:
    """Find the folders of a process's cgroup and of all cgroups above it.

    On hybrid hosts there are two paths, one in each version. The kernel assigns a controller to one of them only; in
    the other its files are missing.
    """
    own = pid in (None, os.getpid())
    cgroups = _paths(root, None if own else pid, controller)
    mounted = _proc.if_readable(_proc.mounts, root) or []
    for version, cgroup in cgroups.items():
        kind = "cgroup" if version == 1 else "cgroup2"
        holding = (mount for mount in mounted if mount.kind == kind and (version != 1 or controller in mount.options))
        mounts = [(PurePosixPath(mount.root), root / mount.point.lstrip("/")) for mount in holding]
        seen = [(folder, point) for top, point in mounts if (folder := _under(cgroup, top, point)) is not None]
        # In a container the path may be the host's ("/docker/123", "/../x"), while the mount shows the container's
        # own cgroup. For another process this guess could be wrong: it may run in another container.
        guessed = [(point, point) for _, point in mounts] if own else []
        for folder, top in (seen or guessed)[:1]:
            yield version, [folder, *(each for each in folder.parents if each.is_relative_to(top))]


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
    return str(PurePosixPath("/") / file.relative_to(root))


def _paths(root: Path, pid: int | None, controller: str) -> dict[int, PurePosixPath]:
    found: dict[int, PurePosixPath] = {}
    for hierarchy, controllers, cgroup in _proc.if_readable(_proc.cgroups, pid, root) or []:
        if controller in controllers:
            found[1] = PurePosixPath(cgroup)
        elif hierarchy == "0" and controllers == ("",):
            found[2] = PurePosixPath(cgroup)
    return found


def _under(cgroup: PurePosixPath, top: PurePosixPath, point: Path) -> Path | None:
    """The folder of a cgroup under a mount; None if the mount does not show it."""
    if ".." in cgroup.parts or not cgroup.is_relative_to(top):
        return None
    folder = point / cgroup.relative_to(top)
    return folder if folder.is_dir() else None


# The memory that a process may use before the kernel kills it: the limits of its cgroup and of all cgroups above.
#
# The whole path of cgroups is read, in version 1 and in version 2, because any of them may have the smallest limit.

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
    """How short of memory the cgroup of a process is, and has been. A field is None if it could not be seen."""

    killed: int | None = None  # how many of its processes the kernel has killed for want of memory
    #: The bytes, without file cache, that the cgroup with the smallest limit uses: the kernel cannot drop them.
    held: int | None = None
    peak: int | None = None  # the most bytes that this cgroup has used, file cache included


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
    """
    for version, folders in cgroup_folders(root, pid, "memory"):
        counted = _statistics(folders[0] / ("memory.oom_control" if version == 1 else "memory.events"))
        if "oom_kill" in counted:
            return counted["oom_kill"]
    return None


def strain(limit: Limit, pid: int | None = None, *, root: Path = _proc.ROOT) -> Strain:
    killed = oom_kills(pid, root=root)
    if limit.source is None:
        return Strain(killed)
    folder = (root / limit.source.lstrip("/")).parent
    held = _used(folder / "memory.current", "inactive_file", "active_file", "slab_reclaimable")
    if held is not None:
        return Strain(killed, held, number(folder / "memory.peak"))
    held = _used(folder / "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
    return Strain(killed, held, number(folder / "memory.max_usage_in_bytes"))


def _levels(root: Path, pid: int | None) -> Iterator[Limit]:
    for version, folders in cgroup_folders(root, pid, "memory"):
        if version != 1:
            yield from (_level_v2(root, folder) for folder in folders)
            continue
        for folder in folders:
            source = folder / "memory.limit_in_bytes"
            yield _level_v1(root, folder, source, number(source), number(folder / "memory.memsw.limit_in_bytes"))
        # The kernel's own figures for all cgroups above, including those that a container cannot see. It does not show
        # their usage; that of the process's own cgroup, which is a part of it, stands for it.
        source = folders[0] / "memory.stat"
        limit, with_swap = (_statistics(source).get(f"hierarchical_{name}_limit") for name in ("memory", "memsw"))
        yield _level_v1(root, folders[0], source, limit, with_swap)


def _level_v2(root: Path, folder: Path) -> Limit:
    source = folder / "memory.max"
    usage = _used(folder / "memory.current", "inactive_file")
    high, swap = (number(folder / name) for name in ("memory.high", "memory.swap.max"))
    return _level(root, source, number(source), usage, high=high, swap=swap)


def _level_v1(root: Path, folder: Path, source: Path, limit: int | None, with_swap: int | None) -> Limit:
    bounded = limit is not None and with_swap is not None and with_swap < _UNLIMITED
    swap = max(0, (with_swap or 0) - (limit or 0)) if bounded else None
    return _level(root, source, limit, _used(folder / "memory.usage_in_bytes", "total_inactive_file"), swap=swap)


def _level(
    root: Path, source: Path, limit: int | None, usage: int | None, *, high: int | None = None, swap: int | None
) -> Limit:
    if limit is None or limit >= _UNLIMITED:
        return Limit(None, None, usage, high, swap=swap)
    room = None if usage is None else max(0, limit - usage)
    return Limit(limit, shown(source, root), usage, high, room, swap)


def _used(file: Path, *droppable: str) -> int | None:
    """What a cgroup uses, without file cache that the kernel would drop."""
    used, figures = number(file), _statistics(file.with_name("memory.stat"))
    return None if used is None else max(0, used - sum(figures.get(name, 0) for name in droppable))


def _smallest(bounds: Iterable[int | None]) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _statistics(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs}


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
    pss: int | None = None
    uss: int | None = None
    shared_clean: int | None = None
    shared_dirty: int | None = None
    private_clean: int | None = None
    private_dirty: int | None = None
    swap: int | None = None
    limit: int | None = None
    limit_source: str | None = None
    headroom: int | None = None


_IN_SMAPS = ("pss", "shared_clean", "shared_dirty", "private_clean", "private_dirty", "swap")


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
    limit = memory_limit(pid, root=root)
    figures = {name: sums.get(name.title()) for name in _IN_SMAPS}  # private_clean is Private_Clean there
    private = figures["private_clean"], figures["private_dirty"]
    return MemoryUsage(
        rss=sums["Rss"],
        uss=None if None in private else sum(filter(None, private)),
        **figures,
        limit=limit.bytes,
        limit_source=limit.source,
        headroom=_smallest((limit.headroom, (_proc.if_readable(_proc.meminfo, root) or {}).get("MemAvailable"))),
    )


class PrivateMeter:
    """Readings of private memory that are cheap enough to be taken on every call.

    A reading walks the page tables, about 6 ms in a process of 600 MB. After each reading, the meter returns the same
    value for a hundred times the processor time of the reading, so readings take at most 1 % of a processor. Waiting
    for one, or for the GIL, does not count: the busier the machine, the sooner a leak fills it.
    Thread-safe: while one thread reads, the others get the last reading. So do all while no descriptor is left.

    Args:
        read: Takes a reading in bytes.
        clock: A monotonic clock, in seconds.
        cpu: Seconds of processor time that this thread has taken.
    """

    def __init__(
        self,
        read: Callable[[], int],
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read, self._clock, self._cpu = read, clock, cpu
        self.forget()

    def forget(self) -> None:
        """Drop the last reading. A forked child does this first: the reading is its parent's."""
        # One tuple, replaced as a whole, so that no thread combines a value with the time of another reading.
        self._last: tuple[int | None, float] = (None, -math.inf)
        # A thread of the parent may have held the old lock; in the child it would never be released.
        self._reading = threading.Lock()

    def __call__(self, *, fresh: bool = False) -> int:
        """Private memory in bytes; with ``fresh`` of now, whatever it costs."""
        last, due = self._last
        if fresh or last is None:
            return self._measure()
        reading = self._reading
        if self._clock() < due or not reading.acquire(blocking=False):
            return last
        try:
            return self._measure()
        except OSError:
            return last
        finally:
            reading.release()

    def _measure(self) -> int:
        start = self._cpu()
        value = self._read()
        self._last = (value, self._clock() + _INTERVAL_PER_COST * (self._cpu() - start))
        return value


def _read_private() -> int:
    held = _written(None, _proc.ROOT) if _has_smaps(_proc.ROOT) else _from_psutil(None).uss
    if held is None:
        reason = "this platform shows only the resident set, which includes shared pages"
        raise NotSupported("private memory", reason=reason)
    return held


_meter = PrivateMeter(_read_private)
fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_meter.forget)


def private(*, fresh: bool = False) -> int:
    """The private memory of this process; cheap enough to be read on every call.

    It counts what this process alone has written and the system cannot reclaim: private dirty pages, and those in
    swap. USS would add the clean pages of files that no other process maps at the moment, so it jumps when another
    process opens or closes the same model file. Pages of a file on disk do not count while they are dirty either: the
    system writes them to the disk, and takes them back. Without ``/proc`` it is USS.

    Args:
        fresh: Take a reading now. Otherwise the last one may be returned; readings take at most 1 % of a processor.

    Returns:
        Bytes. A forked child never gets its parent's reading.

    Raises:
        NotSupported: Neither ``/proc`` nor psutil shows the memory of this process.
    """
    return _meter(fresh=fresh)


def _has_smaps(root: Path) -> bool:
    return (_proc.folder(None, root) / "smaps").exists()


def private_of(pid: int, root: Path = _proc.ROOT) -> int:
    """:func:`private` of any process; 0 if it has ended, or belongs to another user."""
    return _proc.if_readable(_written, pid, root) or 0


def _written(pid: int | None, root: Path) -> int | None:
    """What a process alone has written and the system cannot reclaim, in bytes; None if the kernel does not show it.

    The kernel counts each page of a mapped file as dirty until it is on the disk, also where this process only reads
    it: a model that was just downloaded would count as private memory. The rollup does not say how many of the dirty
    pages are those, but nearly always between which figures their number lies, and that these are the same. Before
    Linux 5.4 it does not tell them from shared memory either: then all of them count.
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
        sizes = [mapping.sizes for mapping in _proc.smaps(pid, root)]
        private = sum(min(one.get("Private_Dirty", 0), one.get("Anonymous", 0)) for one in sizes)
        most = min(dirty, private + shared_memory)
    return most + swap


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
    others = {name: getattr(full, name, None) for name in ("pss", "uss", "swap")}
    return MemoryUsage(rss, **others, headroom=psutil.virtual_memory().available)


def _gone(pid: int | None) -> Exception:
    if pid is None:
        return NotSupported("memory readings", reason="neither /proc nor psutil shows this process")
    return _proc.not_found(pid)


def _no_permission(pid: int | None) -> Exception:
    if pid is None:
        return NotSupported("memory readings", reason="this process may not read its own memory figures")
    return _proc.not_permitted(pid)


# How many CPUs this process may keep busy, by its affinity and the quotas of its cgroups.
#
# ``os.cpu_count()`` counts the machine's CPUs. In a container with a quota of two CPUs on a machine with 64, the kernel
# stops a pool of 64 threads for most of each tenth of a second.


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
        raise _proc.not_found(pid, "does not exist")
    fields = _proc.if_readable(_proc.status, pid, root) or {}
    first = Cpus(os.cpu_count() or 1, "os.cpu_count()")
    if (allowed := fields.get("Cpus_allowed_list")) is not None:  # such as "0-3,8"
        first = Cpus(sum(map(_length, allowed.split(","))), shown(status, root))
    return min([first, *_quotas(root, pid)], key=lambda cpus: cpus.count)


def _length(cpus: str) -> int:
    first, _, last = cpus.partition("-")
    return int(last or first) - int(first) + 1


def _quotas(root: Path, pid: int | None) -> Iterator[Cpus]:
    for version, folders in cgroup_folders(root, pid, "cpu"):
        for folder in folders:
            source = folder / ("cpu.cfs_quota_us" if version == 1 else "cpu.max")
            # Microseconds of work per microseconds of time; in version 2 in one file: "150000 100000". "max" is none.
            words = [*text(source).split(), *(text(folder / "cpu.cfs_period_us").split() if version == 1 else ())]
            if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):  # noqa: PLR2004 - as above
                yield Cpus(int(words[0]) / int(words[1]), shown(source, root))
