"""How a guard reaches the outside world: clock, memory readings, chance and threads. Tests replace it."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import os
import random
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from modelguard import _threads
from modelguard.environment import _allocator
from modelguard.errors import NotSupported
from modelguard.facts import _memory
from modelguard.facts._gpu import TORCH_CUDA, Gpu

if TYPE_CHECKING:
    from modelguard.telemetry import GrowthFound


# Background threads, kept for a while so that all loads of one guard run in the same thread.
#
# glibc gives each thread a heap of its own, and loads in changing threads leave holes in several heaps: with a new
# thread for each load, 20 reloads of ja_ginza left 10 to 60 MB behind instead of 10.


Work = Callable[[], None]

#: How long a thread waits for more work of its name, and how many wait at most.
_IDLE_SECONDS = 300.0
_IDLE_THREADS = 4


class NamedThreads:
    """Daemon threads by name. Daemons, because a hung loader must not keep the interpreter from exiting for ever."""

    def __init__(self) -> None:
        self.after_fork_in_child()

    def after_fork_in_child(self) -> None:
        """Threads do not survive a fork."""
        # Reentrant: the garbage collector may return a dropped lease in here, which may start work.
        self._lock = threading.RLock()
        self._idle: dict[str, tuple[SimpleQueue[Work | None], threading.Thread]] = {}
        self._running = 0
        self._less = threading.Condition(self._lock)

    def start(self, work: Work, name: str) -> None:
        """Run ``work`` in a thread of that name: in the one that is waiting for work, else in a new one.

        Raises:
            RuntimeError: The system gives no thread, or the interpreter is shutting down.
        """
        with self._lock:
            idle = self._idle.pop(name, None)
            self._running += 1
        if idle is not None:
            idle[0].put(work)
            return
        inbox: SimpleQueue[Work | None] = SimpleQueue()
        inbox.put(work)  # not as an argument, which the thread would keep alive as long as it runs
        try:
            threading.Thread(target=self._serve, args=(inbox, name), name=name, daemon=True).start()
        except BaseException:
            self._end()
            raise

    def start_once(self, work: Work, name: str) -> None:
        """Run ``work`` in a new thread of that name, which ends with it.

        Raises:
            RuntimeError: The system gives no thread, or the interpreter is shutting down.
        """

        def run() -> None:
            try:
                work()
            finally:
                self._end()

        with self._lock:
            self._running += 1
        try:
            threading.Thread(target=run, name=name, daemon=True).start()
        except BaseException:
            self._end()
            raise

    def finish(self, seconds: float) -> None:
        """Wait until no work runs, at most this many seconds."""
        with self._less:
            # Below zero in a child that the work itself has forked, where that work ends too.
            self._less.wait_for(lambda: self._running <= 0, seconds)

    def end_idle(self) -> None:
        """End the threads that wait for work: a process that is about to fork should have few."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), {}
        for inbox, thread in idle:
            inbox.put(None)
            thread.join()

    def _serve(self, inbox: SimpleQueue[Work | None], name: str) -> None:
        work: Work | None = inbox.get()
        while work is not None:
            try:
                work()
            finally:
                self._end()
            del work  # nothing of it may be kept alive while the thread waits
            work = self._next(inbox, name)

    def _end(self) -> None:
        with self._less:
            self._running -= 1
            self._less.notify_all()

    def _next(self, inbox: SimpleQueue[Work | None], name: str) -> Work | None:
        with self._lock:
            if name in self._idle or len(self._idle) >= _IDLE_THREADS:
                return None
            self._idle[name] = inbox, threading.current_thread()
        try:
            return inbox.get(timeout=_IDLE_SECONDS)
        except Empty:
            with self._lock:
                if (idle := self._idle.get(name)) is not None and idle[0] is inbox:
                    del self._idle[name]
                    return None
            return inbox.get()  # work was handed over in this very moment


THREADS = NamedThreads()
_threads.before_exit("loads", THREADS.finish)


# Only one process of this user on this host may hold two copies of a model at a time.
#
# The host lock is a POSIX record lock on a file in a private folder. The kernel releases it when its holder dies and,
# unlike ``flock``, a forked child does not inherit it.


if sys.platform != "win32":
    import fcntl

#: Seconds after which others no longer wait for a holder, such as a hung loader without ``load_timeout``.
MAX_WAIT = 300.0
_POLL = 0.05

#: How the lock was obtained: ``"host"``, for all processes of this user; ``"process"``, for this process alone, where
#: no lock file can be used; or why it was not: the holder kept it too long, or the wait was cancelled.
Held = Literal["host", "process", "timed_out", "cancelled"]


class HostLock:
    """The right to replace a model.

    Args:
        folder: Returns the folder of the lock file; it is made with mode 700 when first needed.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._mine = threading.Lock()

    @contextmanager
    def held(
        self, *, sleep: Callable[[float], None], clock: Callable[[], float], cancelled: Callable[[], bool]
    ) -> Iterator[Held]:
        """Wait for the lock and hold it for the block.

        Yields:
            How it was obtained. ``"timed_out"`` (its holder kept it for five minutes) and ``"cancelled"``
            (``cancelled()`` turned true first) mean that it is not held.
        """
        deadline = clock() + MAX_WAIT

        def wait_for(attempt: Callable[[], bool]) -> bool:
            while not attempt():
                if cancelled() or clock() >= deadline:
                    return False
                sleep(_POLL)
            return True

        # Record locks belong to the process; between its own threads an ordinary lock decides.
        mine = self._mine
        if not wait_for(lambda: mine.acquire(blocking=False)):
            yield "cancelled" if cancelled() else "timed_out"
            return
        try:
            descriptor = self._open()
            if descriptor is None:
                yield "process"
                return
            try:
                got = wait_for(lambda: _lock(descriptor))
                yield "host" if got else "cancelled" if cancelled() else "timed_out"
            finally:
                os.close(descriptor)  # which releases the lock
        finally:
            mine.release()

    def after_fork_in_child(self) -> None:
        """Forget that the parent held it: its thread does not exist here, and record locks are not inherited."""
        self._mine = threading.Lock()

    def _open(self) -> int | None:
        if sys.platform == "win32":  # it has no record locks
            return None
        try:
            folder = self._folder()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            # A folder that another user made or can write to may be a trap, or let that user block everybody.
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                return None
            return os.open(folder / "reload.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None


def _lock(descriptor: int) -> bool:
    assert sys.platform != "win32"  # noqa: S101 - no descriptor was opened there
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def private_folder() -> Path:
    """``$MODELGUARD_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/modelguard``, else ``modelguard-UID`` in the temp folder."""
    named = os.environ.get("MODELGUARD_RUNTIME_DIR")
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "modelguard")
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(_temporary(), f"modelguard-{user}")


def _temporary() -> str:
    """The temp folder, also while it is full: ``gettempdir()`` is another one then, where the others do not meet."""
    for place in (*map(os.environ.get, ("TMPDIR", "TEMP", "TMP")), "/tmp"):  # noqa: S108 - the folder in it is private
        if place and os.access(place, os.W_OK | os.X_OK):
            return place
    import tempfile

    return tempfile.gettempdir()


HOST_LOCK = HostLock(private_folder)


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


def private() -> int:
    """Private memory in bytes; 0 where the platform gives no figure, so that policies on time and use still work."""
    try:
        return _memory.private(fresh=True)
    except NotSupported:
        return 0


def headroom() -> int | None:
    """Bytes that this process may still allocate, None if unknown."""
    try:
        return _memory.usage().headroom
    except NotSupported:
        return None


def trim() -> str:
    """Return free memory to the system; returns the kind of allocator that did it.

    Raises:
        NotSupported: It cannot be done here.
    """
    _allocator.trim()
    return _allocator.in_force().kind


def in_use() -> int | None:
    """Bytes that malloc has handed out, None if it gives no figure."""
    try:
        return _allocator.stats().allocated
    except NotSupported:
        return None


def python_in_use() -> int | None:
    """Bytes that Python's allocator of small objects has handed out, None if it gives no figure."""
    from modelguard.environment import _allocator_problems  # imports ctypes, which takes 2 - 3 ms

    return _allocator_problems.in_use()


def held() -> int | None:
    """Bytes that malloc has taken from the system and not returned, None if it gives no figure."""
    try:
        return _allocator.stats().resident
    except NotSupported:
        return None


def check_trim() -> None:
    """Check that free memory can be returned to the system.

    Raises:
        NotSupported: The allocator in force is not known, or this is not Linux.
    """
    serving = _allocator.in_force()
    if serving.kind == "unknown":
        raise NotSupported("trim_every", reason=f"malloc is served by an unknown allocator ({serving.path})")


class Trim(NamedTuple):
    """What came of an attempt to return free memory.

    Attributes:
        allocator: The kind of allocator that did it, None if none could.
        error: Why none could, None if one did.
    """

    allocator: str | None
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The outside world of one guard or pool.

    Attributes:
        clock: Monotonic seconds.
        wall_clock: Seconds since the epoch.
        cpu: Seconds of processor time that this process has taken.
        sleep: Waits for that many seconds.
        private: Private memory of this process, in bytes.
        headroom: Bytes that may still be allocated, None if unknown.
        limit: The effective memory limit in bytes, None if there is none.
        trim: Returns free memory to the system and gives the allocator's kind, or raises NotSupported.
        in_use: Bytes that malloc has handed out, None if unknown.
        python_in_use: Bytes that Python's allocator of small objects has handed out, None if unknown.
        returning: A block for a load or a release, in which what is freed goes back to the system.
        held: Bytes that malloc has taken from the system and not returned, None if unknown.
        check_trim: Raises NotSupported where trimming is not possible.
        gpu: The GPU memory of this process.
        fingerprint: Identity of a watched path, None while it is missing.
        random: A number in [0, 1).
        start_thread: Runs a callable in a background thread of the given name.
        start_once: The same in a thread that ends with the callable, and is not kept for more work.
        host_lock: The right to hold two copies of a model.
        ticks: Whether the process's ticker thread asks the policies in the background.
        probes: Whether the probes of ``Changed`` are asked in this process, and not in the one that it belongs to.
        in_mold: Whether this process is a mold or one of its workers, which ``Idle(keep="mold")`` may end.
    """

    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    cpu: Callable[[], float] = time.process_time
    sleep: Callable[[float], None] = time.sleep
    private: Callable[[], int] = private
    headroom: Callable[[], int | None] = headroom
    limit: Callable[[], int | None] = lambda: _memory.memory_limit().bytes
    trim: Callable[[], str] = trim
    in_use: Callable[[], int | None] = in_use
    python_in_use: Callable[[], int | None] = python_in_use
    returning: Callable[[], AbstractContextManager[None]] = _allocator.returning
    held: Callable[[], int | None] = held
    check_trim: Callable[[], None] = check_trim
    gpu: Gpu = TORCH_CUDA
    fingerprint: Callable[[Path], Fingerprint | None] = fingerprint
    random: Callable[[], float] = random.random
    start_thread: Callable[[Callable[[], None], str], None] = THREADS.start
    start_once: Callable[[Callable[[], None], str], None] = THREADS.start_once
    host_lock: HostLock = HOST_LOCK
    ticks: bool = True
    probes: bool = True
    in_mold: bool = False

    def handed_out(self) -> int | None:
        """Bytes that malloc and Python's allocator have handed out, None if malloc's are not known."""
        by_malloc = self.in_use()
        return None if by_malloc is None else by_malloc + (self.python_in_use() or 0)

    def try_trim(self) -> Trim:
        """Return free memory to the system if that is possible here."""
        try:
            return Trim(self.trim(), None)
        except NotSupported as error:
            return Trim(None, error.reason)


_make: Callable[[], Runtime] = Runtime


def default() -> Runtime:
    """The runtime of a guard or pool that is made now: the real one, unless :func:`use` says otherwise."""
    return _make()


@contextmanager
def use(make: Callable[[], Runtime]) -> Iterator[None]:
    """Give guards and pools that are made inside the block the runtime that ``make`` returns. For tests."""
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


def cause() -> str | None:
    """The main cause of growth; None if it is not known."""
    event = found()
    return None if event is None else event.cause


# Blocking work for coroutines, in a thread of its own and in the caller's context.
#
# ``asyncio.to_thread`` shares its few threads with the whole application. When they all wait for a model, whatever
# would end their wait queues behind them.


T = TypeVar("T")

StartThread = Callable[[Callable[[], None], str], None]


def promise() -> Future[Any]:
    """Make a future that a waiter's cancellation cannot touch."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def start(work: Callable[[], T], name: str, start_thread: StartThread, future: Future[T] | None = None) -> Future[T]:
    """Begin ``work`` in a thread of that name; the future gets what it returns or raises."""
    future = promise() if future is None else future
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(error)

    try:
        start_thread(run, name)
    except RuntimeError as error:  # the system gives no thread
        future.set_exception(error)
    return future


def require_asyncio(doing: str) -> None:
    """Check that a coroutine that is about to wait runs on an event loop of asyncio.

    Args:
        doing: What is not possible elsewhere.

    Raises:
        NotSupported: It does not.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise NotSupported(
            doing,
            reason="no asyncio event loop runs here. Under trio, load the model before the loop starts (guard.load()), "
            "or use the plain function or method in a thread: await trio.to_thread.run_sync(...)",
        ) from None


async def run(work: Callable[[], T], name: str, start_thread: StartThread) -> T:
    """Await ``work``, which is done in a thread of that name.

    Raises:
        NotSupported: The event loop is not asyncio's.
    """
    require_asyncio("waiting in a coroutine")
    return await asyncio.wrap_future(start(work, name, start_thread))


# Results of the author's callables, which may be ``async``.


def resolve(result: Any) -> Any:
    """The result itself; of a coroutine, what it returns when it is run to its end on an event loop of its own."""
    # Coroutines only: a model may have an __await__ of its own.
    return asyncio.run(result) if inspect.iscoroutine(result) else result
