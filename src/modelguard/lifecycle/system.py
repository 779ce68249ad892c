"""How a guard reaches the outside world: clock, memory readings, chance and threads. Tests replace it."""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from modelguard.environment import _allocator
from modelguard.errors import NotSupported
from modelguard.facts import _memory
from modelguard.facts._gpu import TORCH_CUDA, Gpu
from modelguard.runtime.background import THREADS
from modelguard.runtime.host_lock import HOST_LOCK, HostLock

if TYPE_CHECKING:
    from modelguard.telemetry import GrowthFound


# Whether a watched path has changed: the identity of its files.


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


T = TypeVar("T")


def known(read: Callable[[], T]) -> T | None:
    """A figure, None where the platform gives none, no descriptor is left to read it with, or the interpreter ends."""
    try:
        return read()
    except (NotSupported, OSError, ImportError):
        return None


def private() -> int:
    """Private memory in bytes: the last reading where none can be taken, 0 where the platform gives no figure.

    So loads, releases, and policies on time and use go on without one.
    """
    return known(lambda: _memory.private(fresh=True)) or known(_memory.private) or 0


def headroom() -> int | None:
    """Bytes that this process may still allocate, None if unknown."""
    return known(lambda: _memory.usage().headroom)


def trim() -> str:
    """Return free memory to the system; returns the kind of allocator that did it.

    Raises:
        NotSupported: It cannot be done here.
    """
    _allocator.trim(private=lambda: 0)  # how much came back, the caller reads
    return _allocator.in_force().kind


def in_use() -> int | None:
    """Bytes that malloc has handed out, None if it gives no figure."""
    return known(lambda: _allocator.stats().allocated)


def python_in_use() -> int | None:
    """Bytes that Python's allocator of small objects has handed out, None if it gives no figure."""
    from modelguard.environment import _linker  # imports ctypes, which takes 2 - 3 ms

    return _linker.python_in_use()


def held() -> int | None:
    """Bytes that malloc has taken from the system and not returned, None if it gives no figure."""
    return known(lambda: _allocator.stats().resident)


def check_trim() -> None:
    """Check that free memory can be returned to the system.

    Raises:
        NotSupported: The allocator in force is not known, or this is not Linux.
    """
    serving = _allocator.in_force()
    if serving.kind == "unknown":
        raise NotSupported("trim_every", reason=f"malloc is served by an unknown allocator ({serving.path})")


class Trim(NamedTuple):
    """What came of an attempt to return free memory."""

    allocator: str | None  # the kind of allocator that did it, None if none could
    error: str | None  # why none could, None if one did


@dataclass(frozen=True, kw_only=True)
class System:
    """The outside world of one guard or pool."""

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time  # seconds since the epoch
    cpu: Callable[[], float] = time.process_time  # seconds of processor time that this process has taken
    thread_cpu: Callable[[], float] = time.thread_time  # those of this thread
    sleep: Callable[[float], None] = time.sleep  # waits for that many seconds
    private: Callable[[], int] = private  # private memory of this process, in bytes
    headroom: Callable[[], int | None] = headroom  # bytes that may still be allocated, None if unknown
    #: The effective memory limit in bytes, None if there is none.
    limit: Callable[[], int | None] = lambda: _memory.memory_limit().bytes
    #: Returns free memory to the system and gives the allocator's kind, or raises NotSupported.
    trim: Callable[[], str] = trim
    in_use: Callable[[], int | None] = in_use  # bytes that malloc has handed out, None if unknown
    #: Bytes that Python's allocator of small objects has handed out, None if unknown.
    python_in_use: Callable[[], int | None] = python_in_use
    #: A block for a load or a release, in which what is freed goes back to the system.
    returning: Callable[[], AbstractContextManager[None]] = _allocator.returning
    #: Bytes that malloc has taken from the system and not returned, None if unknown.
    held: Callable[[], int | None] = held
    check_trim: Callable[[], None] = check_trim  # raises NotSupported where trimming is not possible
    gpu: Gpu = TORCH_CUDA  # the GPU memory of this process
    #: Identity of a watched path, None while it is missing.
    fingerprint: Callable[[Path], Fingerprint | None] = fingerprint
    random: Callable[[], float] = random.random  # a number in [0, 1)
    #: Runs a callable in a background thread of the given name.
    start_thread: Callable[[Callable[[], None], str], None] = THREADS.start
    #: The same in a thread that ends with the callable, and is not kept for more work.
    start_once: Callable[[Callable[[], None], str], None] = THREADS.start_once
    host_lock: HostLock = HOST_LOCK  # the right to hold two copies of a model
    ticks: bool = True  # whether the process's ticker thread asks the policies in the background
    #: Whether the probes of ``Changed`` are asked in this process, and not in the one that it belongs to.
    probes: bool = True
    in_mold: bool = False  # whether this process is a mold or one of its workers, which ``Idle(keep="mold")`` may end
    #: As ``private``, at some moment of the last second; None where a reading takes no time.
    private_lately: Callable[[], int] | None = None

    def recent_private(self) -> int:
        """Private memory within the last second, for what only reports it."""
        return (self.private_lately or self.private)()

    def handed_out(self) -> int | None:
        """Bytes that malloc and Python's allocator have handed out, None if malloc's are not known."""
        by_malloc = self.in_use()
        return None if by_malloc is None else by_malloc + (self.python_in_use() or 0)

    def in_background(self, work: Callable[[], None], name: str) -> None:
        """Do something in another thread; in this one if the system gives none.

        Nothing is done while the interpreter shuts down: a finalizer asks for it, no thread runs any more, and those
        that have ended may hold any lock.
        """
        if sys.is_finalizing():
            return
        try:
            self.start_thread(work, name)
        except RuntimeError:
            work()

    def try_trim(self) -> Trim:
        """Return free memory to the system if that is possible here."""
        try:
            return Trim(self.trim(), None)
        except NotSupported as error:
            return Trim(None, error.reason)
        except ImportError as error:  # the interpreter ends
            return Trim(None, str(error))


_make: Callable[[], System] = System


def default() -> System:
    """The system of a guard or pool that is made now: the real one, unless :func:`use` says otherwise."""
    return _make()


@contextmanager
def use(make: Callable[[], System]) -> Iterator[None]:
    """Give guards and pools that are made inside the block the system that ``make`` returns. For tests."""
    global _make
    before, _make = _make, make
    try:
        yield
    finally:
        _make = before


# What is known about the growth of this process. Set by ``modelguard.diagnosis.watch``, shown by guards.


_found: GrowthFound | None = None
_pid = 0


def note(event: GrowthFound | None) -> None:
    """Remember what was found; None if memory no longer grows."""
    global _found, _pid
    _found, _pid = event, os.getpid()


def found() -> GrowthFound | None:
    """What was found last; None if nothing was, or if nobody watches. A forked child starts with None."""
    return _found if _found is not None and _pid == os.getpid() else None
