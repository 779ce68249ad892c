"""Start molds, wait for what they report, and keep their timers: one thread per process, which lives as long as that.

The parent-death signal of the molds needs it: the kernel sends that when the thread that started them ends.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from multiprocessing import spawn
from pathlib import Path
from typing import Any, NamedTuple

import wrapt

from modelguard.isolation import _processes
from modelguard.isolation._channel import Channel, dumps, pair, report_pair
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.runtime import fork_hooks
from modelguard.runtime.background import start_thread
from modelguard.telemetry import logger

Work = Callable[[], object]


class Supervisor:
    """Runs work in its thread: at once, later, or when a descriptor can be read."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: the garbage collector may call in, for a function that was dropped
        self._running = False
        self._selector = selectors.DefaultSelector()
        if isinstance(self._selector, fork_hooks.Descriptor):  # gevent's is none
            fork_hooks.closed_in_child.add(self._selector)
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)  # noqa: FBT003 - its only parameter
        self._wake.setblocking(False)  # noqa: FBT003 - its only parameter
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._work: deque[Work] = deque()
        self._timers: list[tuple[float, int, Work]] = []
        self._count = itertools.count()

    def call(self, work: Work) -> None:
        self._work.append(work)
        if not self._running:
            with self._lock:
                if not self._running:
                    self._start(work)
        with suppress(BlockingIOError):
            self._wake.send(b"\0")

    def _start(self, work: Work) -> None:
        self._running = True
        try:
            start_thread(self._run, "modelguard-isolation")
        except BaseException:  # the system gives no thread now; the next call tries again
            self._running = False
            with suppress(ValueError):
                self._work.remove(work)
            raise

    def later(self, seconds: float, work: Work) -> None:
        self.call(lambda: heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), work)))

    def flush(self, timeout: float) -> None:
        """Wait until it has done what was given to it before, at most so many seconds."""
        done = threading.Event()
        self.call(done.set)
        done.wait(timeout)

    # In its thread

    def watch(self, fd: int, work: Work) -> None:
        """Run ``work`` whenever ``fd`` can be read. Only in its thread."""
        self.forget(fd)  # an earlier descriptor of that number, which was closed while it was watched
        self._selector.register(fd, selectors.EVENT_READ, work)

    def forget(self, fd: int) -> None:
        """Watch ``fd`` no more; before it is closed. Only in its thread."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(fd)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            self._woken.recv(4096)

    def _run(self) -> None:
        while True:
            left = None if not self._timers else max(0.0, self._timers[0][0] - time.monotonic())
            for key, _ in self._selector.select(left):
                if self._selector.get_map().get(key.fd) is key:  # else the work before has closed it
                    self._attempt(key.data)
                del key  # while it waits, the thread keeps nothing alive
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._attempt(heapq.heappop(self._timers)[2])
            while self._work:
                self._attempt(self._work.popleft())

    @staticmethod
    def _attempt(work: Work) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the fault of one mold must not stop the supervision of the others
            with suppress(BaseException):  # nor may a log handler that raises
                logger.exception("modelguard could not supervise an isolated function")

    def abandon(self) -> None:
        """In a forked child: close the copies of the parent's descriptors. The thread does not exist there."""
        self._selector.close()
        self._woken.close()
        self._wake.close()


_supervisor: Supervisor | None = None

_making = threading.RLock()  # reentrant, as above


def supervisor() -> Supervisor:
    global _supervisor
    if _supervisor is None:
        with _making:
            made = Supervisor()
            if _supervisor is None:  # nor has the collector asked for one meanwhile
                _supervisor = made
            else:
                made.abandon()
    return _supervisor


def _after_fork_in_child() -> None:
    global _making, _supervisor
    _making = threading.RLock()
    if _supervisor is not None:
        _supervisor.abandon()
    _supervisor = None


fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_after_fork_in_child)


# Which code a mold runs: the files of its modules, so that nobody is served by the code of another time.


#: Path to size in bytes and time of change in nanoseconds.
Files = dict[str, tuple[int, int]]

#: Files of this process's modules, as they were soon after their import.
imported: Files = {}


def files() -> Files:
    """The files of the modules of this process that were found on ``sys.path``, without Python's own.

    Others are generated while the program runs, and may change or disappear.
    """
    own = sysconfig.get_path("stdlib") + os.sep
    try:
        places = tuple(os.path.abspath(one) + os.sep for one in sys.path if one is not None)  # noqa: PTH100 - "" is here
    except FileNotFoundError:  # here is a folder that was removed, with all that was in it
        places = tuple(one + os.sep for one in sys.path if one and os.path.isabs(one))  # noqa: PTH117 - as text
    found: Files = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.startswith(places):
            continue
        if path.startswith(own) and not path.startswith((own + "site-packages", own + "dist-packages")):
            continue
        if (stamp := _stamp(path)) is not None:
            found[path] = stamp
    return found


def note_imported() -> None:
    """Add the modules that have been imported since to :data:`imported`."""
    for path, stamp in files().items():
        imported.setdefault(path, stamp)


def changed(known: Files, now: Files | None = None) -> str | None:
    """The first of these files that is not as it was; None if there is none."""
    now = now or {}
    return next((path for path, was in known.items() if (now.get(path) or _stamp(path)) != was), None)


def check_unchanged(known: Files) -> None:
    if (path := changed(known)) is not None:
        raise RuntimeError(f"{path} has changed since this server imported it; restart the server")


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - thousands of them
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


#: Of multiprocessing's data, what makes an interpreter resemble its owner; the rest concerns multiprocessing itself.
_KEYS = ("dir", "init_main_from_name", "init_main_from_path", "orig_dir", "sys_argv", "sys_path")

#: What :func:`preparation` has found last.
_known: dict[str, Any] = {}

#: What was on ``sys.path`` when functions were isolated. Celery takes the folder of the tasks away after the import.
_path: dict[str, None] = {}


def note_path() -> None:
    _path.update((place, None) for place in sys.path if isinstance(place, str) and os.path.isabs(place))  # noqa: PTH117


_NO_FOLDER = "this process's working directory was removed before its first mold was made; start it in another one"


def preparation() -> dict[str, Any]:
    """What :func:`become_like` needs: path, arguments and main module of this process, as ``multiprocessing`` sends."""
    try:
        _known.update(spawn.get_preparation_data("modelguard"))
    except FileNotFoundError:  # the working directory was removed, as by a deploy; new processes are in it all the same
        if not _known:
            raise RuntimeError(_NO_FOLDER) from None
        _known.pop("dir", None)
    chosen = {key: _known[key] for key in _KEYS if key in _known}
    chosen["sys_path"] = [*dict.fromkeys([*chosen["sys_path"], *_path])]
    main = chosen.get("init_main_from_path")
    if main is not None and (main.endswith("<stdin>") or _is_of_a_server(os.path.abspath(main))):  # noqa: PTH100
        del chosen["init_main_from_path"]
    return chosen


def _is_of_a_server(main: str) -> bool:
    """Whether the main script is a console script, or belongs to an installed program that runs one's functions.

    There is nothing of the application in it. To import Ray's again would take a second.
    """
    if os.path.dirname(main) == sysconfig.get_path("scripts"):  # noqa: PTH120
        return True
    return main.endswith(os.path.join("ray", "_private", "workers", "default_worker.py"))  # noqa: PTH118


# In the fresh interpreter


def become_like(owner: Mapping[str, Any], *, main: bool) -> None:
    """Take over path, arguments, working directory of the owner, and its main module if the function may be there."""
    taken = {key: value for key, value in owner.items() if main or not key.startswith("init_main")}
    if not os.path.isdir(taken.get("dir", "")):  # noqa: PTH112 - removed, as above, which a broker is not told
        taken.pop("dir", None)
    spawn.prepare(taken)


# What a new mold is told.


class Origin(NamedTuple):
    """How to resemble the owner: :func:`preparation` of it, and the levels of its loggers."""

    preparation: dict[str, Any]
    levels: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """What the owner sends to a new mold."""

    owner: int  # its process id
    origin: Origin
    options: IsolationOptions
    key: Any  # of the pool's model that it loads; None if its function has no pool
    beside_calls: bool  # calls run while it loads
    code: Files  # what files of its modules must be like
    shared: bool  # its owner serves callers of other processes, and knows nothing of their modules
    priority: int = 0  # the nice value of a worker: that of the thread that starts the mold


if sys.platform != "win32":
    import fcntl


#: Where this package and what it needs are imported from: the fresh interpreter finds them there before it knows the
#: owner's path. A program may keep each distribution in a folder of its own, as PEX and buildout do.
_PACKAGES = [str(Path(__file__).parents[2]), str(Path(wrapt.__file__).parents[1])]

#: Python's own modules come first: there may be a ``queue.py`` in the working directory, or an old ``pathlib.py`` among
#: the packages. The signal mask is that of the thread that starts the process, and may keep SIGCHLD from a mold.
_PROGRAM = (
    "import os, sys; del sys.path[: 0 if sys.flags.safe_path else 1]; own = os.path.dirname(os.__file__); "
    "at = sys.path.index(own) + 1 if own in sys.path else 0; sys.path[at:at] = {packages!r}; "
    "import signal; signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    "from modelguard.isolation.{module} import main; main({numbers})"
)

#: The highest of the descriptors for input, output and errors.
_STANDARD = 2


@dataclass(frozen=True, slots=True)
class Launched:
    process: subprocess.Popen[bytes]
    control: Channel
    news: socket.socket

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors. Takes no lock."""
        self.process.returncode = 0  # it is no child of this process, and must not warn when it is dropped
        self.control.close()
        self.news.close()


def launch(instructions: Instructions) -> Launched:
    """Start a mold. It dies with the calling thread, so that must be one that lives as long as this process."""
    # Whoever asked for it may stand back himself, which is his own affair.
    priority = _processes.priority()
    content = dumps(replace(instructions, priority=priority))  # first: what cannot be sent starts nothing
    with ExitStack() as ours, ExitStack() as theirs:
        control, its_control = pair()
        ours.enter_context(control)
        theirs.enter_context(its_control)
        news, its_news = report_pair()
        ours.enter_context(news)
        theirs.enter_context(its_news)
        words = "mold", ".".join(instructions.options.function)
        with _processes.at_lower_priority(priority) if instructions.beside_calls else nullcontext():
            process = start_interpreter("_mold_program", (its_control.fileno(), its_news.fileno()), *words)
        ours.pop_all()
    channel = Channel(control)
    channel.send_pickled(*content)
    return Launched(process, channel, news)


def start_interpreter(
    module: str, fds: Sequence[int], *words: str, outlives_this: bool = False
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter like this one, which runs the ``main`` of a module of this package in a process group.

    Where this process has closed its own input or output, or something else has the number, the new one gets
    ``/dev/null``: what it prints must not reach a descriptor of another purpose. The module's ``main`` gets the numbers
    of the descriptors, and lists of processes show the words. One that outlives this process has a session of its own,
    without this one's output.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing
    executable = os.fsdecode(spawn.get_executable() or sys.executable)
    with ExitStack() as copies:
        passed = [_above_standard(fd, copies) for fd in fds]
        numbers = ", ".join(map(str, passed))
        program = _PROGRAM.format(packages=_PACKAGES, module=module, numbers=numbers)
        command = [executable, *flags, "-c", program, *words]
        return subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if _is_inherited(1) and not outlives_this else subprocess.DEVNULL,
            stderr=None if _is_inherited(2) and not outlives_this else subprocess.DEVNULL,
            pass_fds=passed,
            process_group=None if outlives_this else 0,
            start_new_session=outlives_this,
        )


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # it is closed
        return False


def _above_standard(fd: int, copies: ExitStack) -> int:
    """The descriptor, or a copy that leaves room for input and output, where this process has closed its own."""
    if fd > _STANDARD:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STANDARD + 1)
    copies.callback(os.close, copy)
    return copy
