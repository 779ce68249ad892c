"""What processes must have in common to share the molds of an isolated function, and where they meet."""

from __future__ import annotations

import errno
import functools
import hashlib
import math
import os
import re
import secrets
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from modelguard.errors import InvalidOption, LoadFailed, NotSupported
from modelguard.facts._proc import peer
from modelguard.isolation import _channel, _isolation_options, _processes, _supervisor
from modelguard.isolation._channel import Channel, RemoteTraceback, pair
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation._supervisor import Files, Origin, start_interpreter, supervisor
from modelguard.lifecycle._guard_options import GuardOptions
from modelguard.lifecycle.policies import subset
from modelguard.runtime import child_processes, fork_hooks
from modelguard.runtime.host_lock import private_folder
from modelguard.telemetry import logger

# What a process and the broker of its isolated function say to each other.


#: What a client asks on one of its connections:
#:
#: * ``join`` (token, code; with a socket for reports): become a client. The connection stands for the process.
#: * ``call`` (token): this connection is for calls of that client.
#: * ``take`` (whether the call is run again, whether it was admitted before), ``release`` (worn, whether it counts),
#:   ``end`` (cause, blame): one worker. Who no longer wants one hangs up.
#: * ``load`` (), ``reload`` (wait, whether who waits has the turn of this host), ``unload`` (), ``status`` (),
#:   ``pause`` (whether to pause or to resume).
#: * ``leave`` (): be a client no more.
Request = Literal["join", "call", "take", "release", "end", "load", "reload", "unload", "pause", "status", "leave"]

#: What the broker answers:
#:
#: * ``welcome`` (its pid) and ``unwelcome`` (path) to ``join``: that file is not as it was for the process that has
#:   started it, or for its mold.
#: * ``loading`` (), ``waiting`` (), ``granted`` (worker's pid; with its socket) to ``take``.
#: * ``ended`` (how) to ``end``, ``done`` (value) to the others, ``failed`` (error) to all of them.
Answer = Literal["welcome", "unwelcome", "loading", "waiting", "granted", "ended", "done", "failed"]

#: How a message on a client's socket for reports starts: with what follows.
REPORT, STATE = b"r", b"s"

#: What must be equal for processes to share molds: words for people, and values.
Identity = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class BrokerOrders:
    starter: int
    folder: str
    socket: str
    code: Files
    options: IsolationOptions
    source: GuardOptions[Any]
    origin: Origin
    paused: bool


#: Characters of the digest in a name.
_DIGEST = 24

#: The names of sockets: a digest of the identity, and a number.
NAME = re.compile(rf"[0-9a-f]{{{_DIGEST}}}\.[0-9]+")

#: Where each function was decorated: working directory and ``sys.path``.
_places: dict[_isolation_options.Reference, tuple[str, str]] = {}


def check_shareable(source: GuardOptions[Any], option: str = "scope", value: str = "host") -> None:
    """Check that a broker, or an owner, that does not import the application can decide when a mold is replaced."""
    if source.swap.keep_previous and option == "scope":
        why = "cannot be used with keep_previous=True: the broker keeps no previous mold"
        raise InvalidOption("scope", "host", why=why, fix="Leave keep_previous out, or write scope='process'.")
    part = _isolation_options.part_of_own_code(subset(source.reload_on, renews=True, unloads=True))
    if part is not None:
        why = f"cannot be used with {type(part).__qualname__}, which asks for new models by code of your own"
        fix = "Use TTL or Modified, or call reload() when it is time."
        raise InvalidOption(option, value, why=why, fix=fix)


def identity_of(options: IsolationOptions, source: GuardOptions[Any]) -> Identity:
    """What must be equal. Not the environment and not the files of the code: these are compared one by one.

    Arguments count only where the function stands in the main script: those of a server are its own. Paths are those of
    the first call of this, when the function is decorated: later on, processes may change theirs.
    """
    module, name = options.function
    if options.function not in _places:
        # By a way that also works in a folder that was removed, as by a deploy: molds import the module there.
        _places[options.function] = os.readlink("/proc/self/cwd"), repr(sys.path)  # noqa: PTH115 - as text
        _supervisor.note_imported()
    folder, path = _places[options.function]
    return {
        "function": f"{module}.{name}",
        "file": str(getattr(sys.modules.get(module), "__file__", None)),
        "version": str(options.scope and options.scope.version),
        "options": repr(options),
        "guard": repr(for_broker(source)),
        "arguments": repr(sys.argv) if module == "__main__" else "",
        "working directory": folder,
        "sys.path": path,
        "interpreter": f"{sys.executable} {sys.version}",
        "modelguard": _version(),
        # A folder that containers share must not make them share processes.
        "container": f"{os.stat('/proc/self/ns/mnt').st_ino} {os.stat('/proc/self/ns/pid').st_ino}",  # noqa: PTH116
    }


def prefix_of(identity: Identity) -> str:
    return f"{hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:_DIGEST]}."


@functools.cache  # a call must not need a descriptor for it
def _version() -> str:
    try:
        return metadata.version("modelguard-lifecycle")
    except metadata.PackageNotFoundError:  # it runs from its sources
        return ""


def for_broker(source: GuardOptions[Any]) -> GuardOptions[Any]:
    """The options of a guard without what would need the application's modules."""
    return replace(
        source,
        family=None,
        load=object,  # which nobody calls, and whose repr is the same in each process
        reload_on=subset(source.reload_on, renews=True, unloads=True),
        warmup=None,
        validate=None,
        unload=None,
    )


# Where the processes of one user meet: sockets in a private folder, and a lock on it.
#
# The lock is ``flock`` on the folder itself, so there is no lock file to leave behind: the kernel releases it when the
# last process that holds it dies. A socket whose process is gone refuses connections, and the next election removes it.


if sys.platform != "win32":
    import fcntl


#: Seconds between two attempts at the lock.
_LOCK_POLL = 0.01

#: Connections that wait to be accepted.
_BACKLOG = 512

#: Descriptors with which this process may hold the lock, for the children that it forks meanwhile.
_held: set[int] = set()


class ForeignPeer(Exception):
    """The other end of a connection belongs to another user."""


class Folder:
    """The private folder, held open: what is checked once stays what it was."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            found = os.fstat(self._fd)
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise
            why = "it is a link, or no folder" if error.errno in {errno.ENOTDIR, errno.ELOOP} else error.strerror
            raise _unusable(f"the folder {path} cannot be used: {why}") from error
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            self.close()
            whose = f"it belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}"
            raise _unusable(f"the folder {path} is not private: {whose}, but it must be this user's, with mode 700")

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def names(self, prefix: str) -> list[str]:
        """The sockets in it whose names start like this, in their order."""
        found = os.listdir(self._fd)  # noqa: PTH208 - of the open folder
        return sorted(name for name in found if name.startswith(prefix))

    def connect(self, name: str, timeout: float) -> socket.socket | None:
        """Connect to the process that listens there; None if there is none."""
        with suppress(FileNotFoundError, ConnectionRefusedError), ExitStack() as failed:
            connected = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            fork_hooks.closed_in_child.add(connected)
            _connect(connected, self._address(name), time.monotonic() + timeout)
            check_peer(connected)
            failed.pop_all()
            return connected
        return None

    def listen(self, name: str) -> socket.socket:
        """Take the name, and accept connections. The caller holds the lock."""
        self.remove(name)
        with ExitStack() as failed:
            listening = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listening.bind(self._address(name))
            listening.listen(_BACKLOG)
            failed.pop_all()
        return listening

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    @contextmanager
    def locked(self, give_up: Callable[[], bool]) -> Iterator[int | None]:
        """Hold the lock for the block.

        Yields:
            A descriptor that holds the lock, also in a process that inherits it; None after giving up.
        """
        lock = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _held.add(lock)
        try:
            while not _lock(lock):
                if give_up():
                    yield None
                    return
                time.sleep(_LOCK_POLL)
            yield lock
        finally:
            _held.discard(lock)
            os.close(lock)

    def _address(self, name: str) -> str:
        # By the open folder: nobody can exchange it in between, and a long path does not matter.
        return f"/proc/self/fd/{self._fd}/{name}"


def _connect(connecting: socket.socket, address: str, until: float) -> None:
    """Connect, and wait for room among the connections that are to be accepted.

    By looking: Python's own timeout does not wait for that, and a wait in the kernel that a signal interrupts leaves a
    socket without a peer.
    """
    connecting.setblocking(False)  # noqa: FBT003 - its only parameter
    while True:
        try:
            connecting.connect(address)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
            time.sleep(_LOCK_POLL)
        else:
            connecting.setblocking(True)  # noqa: FBT003 - its only parameter
            return


def check_peer(connected: socket.socket) -> int:
    """Check that the other end belongs to this process's user; returns its process id."""
    pid, user = peer(connected)
    if user != os.geteuid():
        raise ForeignPeer(f"process {pid} of user {user}")
    return pid


def _lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _unusable(f"the private folder cannot be locked: {error.strerror}") from error
    return True


def _unusable(reason: str) -> NotSupported:
    return NotSupported('scope="host"', reason=f"{reason}. MODELGUARD_RUNTIME_DIR names another folder")


# Start a broker: a fresh interpreter with a session of its own, which outlives the process that starts it.
#
# It keeps nothing of that process open. Whoever reads the output of a server would wait for the broker's end.


#: Seconds for a broker that has hung up to end.
_EXIT = 1.0

#: What this process has to collect, and until when, on the monotonic clock: brokers that it has started and, if it is
#: a container's first process, what becomes its children by the end of a broker. Of a group the number is negative.
_remains: dict[int, float] = {}

#: Seconds after the end of a broker at which its processes have mostly ended too. Each further look comes after three
#: times as long.
_COLLECT = 1.0

#: Seconds in which they become this process's, and end.
_REMAINING = 40.0


def start_broker(orders: BrokerOrders, lock: int, timeout: float) -> None:
    ours, theirs = pair()
    with closing(Channel(ours)) as channel:
        with theirs:
            words = "broker", ".".join(orders.options.function)
            process = start_interpreter("_broker_program", (theirs.fileno(), lock), *words, outlives_this=True)
        try:
            channel.set_timeout(timeout)
            channel.send(orders)
            outcome, detail = channel.receive()
        except BlockingIOError:
            process.kill()
            raise LoadFailed(orders.options.name, f"its broker does not come up within {timeout:.0f} s") from None
        except (EOFError, OSError):
            raise LoadFailed(orders.options.name, f"its broker ended: {_exit_of(process)}") from None
        finally:
            if process.returncode is None:
                process.returncode = 0  # from now on it is collected by its number
                _remains[process.pid] = math.inf
    if outcome != "listening":
        text, trace = detail
        raise LoadFailed(orders.options.name, f"its broker could not start: {text}") from RemoteTraceback(trace)


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        return _processes.describe_exit(process.wait(_EXIT))
    process.kill()
    return "it hung up"


def collect_later(numbers: Iterable[int]) -> None:
    """Collect these processes and groups when they have ended, which on a busy machine takes a while."""
    _remains.update(dict.fromkeys(numbers, time.monotonic() + _REMAINING))
    supervisor().later(_COLLECT, partial(collect, 3 * _COLLECT))


def collect(pause: float = math.inf) -> None:
    """Collect what has ended now, and look again after so many seconds if there is more to come."""
    now = time.monotonic()
    for number, until in tuple(_remains.items()):
        if child_processes.reap(number, own=until == math.inf) or now > until:
            _remains.pop(number, None)
    if pause < _REMAINING and any(until < math.inf for until in tuple(_remains.values())):
        supervisor().later(pause, partial(collect, 3 * pause))


#: Seconds in which a broker accepts a connection or a client. It does nothing that takes long.
ANSWER_SOON = 5.0


class Joined(NamedTuple):
    """What a client has of its broker: where that listens, two sockets to it, its token and the broker's process id."""

    folder: Folder
    name: str
    channel: Channel
    reports: socket.socket
    token: bytes
    pid: int

    def close(self) -> None:
        for one in (self.reports, self.channel, self.folder):
            one.close()


# How a process finds the broker of an isolated function, or starts one: elected by a lock, found by a name.


#: The same, where an event loop may wait.
_SOON = 0.5

#: Seconds for finding or starting a broker: on a busy host, a fresh interpreter takes some.
_LONGEST = 30.0

#: Seconds between two attempts.
_ELECTION_POLL = 0.02


class Election:
    """Finds a broker; if it is to ``elect`` one, starts it where there is none, paused or not."""

    def __init__(self, options: IsolationOptions, source: GuardOptions[Any], *, elect: bool, paused: bool) -> None:
        self._obstacle = "another process holds the lock"
        self._options = options
        self._source = source
        self._elect = elect
        self._patience = ANSWER_SOON if elect else _SOON
        self._paused = paused
        self._prefix = prefix_of(identity_of(options, source))
        self._serving: set[str] = set()
        self._hung = False

    def join(self, check: Callable[[], object]) -> Joined | None:
        """Become the client of a broker. Blocks, unless ``check`` raises that there is nothing to wait for."""
        longest = time.monotonic() + _LONGEST

        def over() -> bool:
            check()
            return time.monotonic() > longest

        while (found := self._attempt(over)) is None and self._elect:
            if over():
                raise LoadFailed(self._options.name, f"no broker serves in {private_folder()}: {self._obstacle}")
            time.sleep(_ELECTION_POLL)
        return found

    def _attempt(self, give_up: Callable[[], bool]) -> Joined | None:
        folder = found = None
        try:
            folder = Folder(private_folder())
            found = self._find(folder)
            if found is None and self._elect and not self._hung:
                with folder.locked(give_up) as lock:
                    if lock is not None:
                        found = self._find(folder)
                        if found is None and not self._hung:
                            self._start(folder, lock)
        except OSError as error:  # no process or no descriptor is left
            raise LoadFailed(self._options.name, f"its broker cannot be started or found: {error}") from error
        except ForeignPeer as error:
            raise LoadFailed(self._options.name, f"where its broker should listen there is {error}") from error
        finally:
            if found is None and folder is not None:
                folder.close()
        return found

    def _find(self, folder: Folder) -> Joined | None:
        """Ask all brokers of this name, until one takes this process."""
        self._serving.clear()
        self._hung = False
        return next(filter(None, (self._ask(folder, name) for name in folder.names(self._prefix))), None)

    def _ask(self, folder: Folder, name: str) -> Joined | None:
        if (connected := folder.connect(name, self._patience)) is None:
            return None
        with ExitStack() as refused:
            channel = refused.enter_context(closing(Channel(connected)))
            reports, theirs = _channel.report_pair()
            refused.enter_context(reports)
            token = secrets.token_bytes(16)
            channel.set_timeout(self._patience)
            try:
                with theirs:
                    channel.send(("join", token, _supervisor.imported), [theirs.fileno()])
                answer, detail = channel.receive()
            except BlockingIOError:
                self._hung = True
                self._obstacle = f"the one that listens there does not answer within {self._patience:g} s"
                return None
            except (EOFError, OSError):  # it ends
                return None
            if answer == "welcome":
                refused.pop_all()
                return Joined(folder, name, channel, reports, token, detail)
        # After a deploy, while processes of the old code still serve: each code has a broker of its own.
        self._serving.add(name)
        logger.warning(
            "%s: %s has changed since the mold of the other processes was loaded; this one gets another mold",
            self._options.name,
            detail,
        )
        return None

    def _start(self, folder: Folder, lock: int) -> None:
        self._remove_remains(folder)
        number = next(n for n in range(1, len(self._serving) + 2) if f"{self._prefix}{n}" not in self._serving)
        socket_name = f"{self._prefix}{number}"
        orders = BrokerOrders(
            starter=os.getpid(),
            folder=str(folder.path.absolute()),
            socket=socket_name,
            code=_supervisor.imported,
            options=self._options,
            source=for_broker(self._source),
            origin=Origin(_supervisor.preparation(), _channel.levels()),
            paused=self._paused,
        )
        start_broker(orders, lock, _LONGEST)

    def _remove_remains(self, folder: Folder) -> None:
        """Remove sockets whose brokers were killed."""
        for name in folder.names(""):
            if NAME.fullmatch(name) and name not in self._serving:
                connected = folder.connect(name, ANSWER_SOON)
                if connected is None:
                    folder.remove(name)
                else:
                    connected.close()


def _after_fork_in_child() -> None:
    for lock in list(_held):
        with suppress(OSError):
            os.close(lock)
    _held.clear()
    _remains.clear()


fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_after_fork_in_child)
