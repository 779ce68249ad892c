"""The socket of this process, and the thread that serves it."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from modelguard import _units
from modelguard.control import _client
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts._proc import peer
from modelguard.isolation import status
from modelguard.isolation.status import IsolationStatus
from modelguard.lifecycle.guard import ModelGuard, guards
from modelguard.lifecycle.pool import ModelPool, pools
from modelguard.runtime import fork_hooks
from modelguard.runtime.background import start_thread
from modelguard.runtime.waiting import Timeout
from modelguard.telemetry import logger

if TYPE_CHECKING:
    from modelguard.isolation.isolate import Isolated

    Target: TypeAlias = ModelGuard[Any] | ModelPool[Any, Any] | Isolated[..., Any]


# What takes commands in a process: its guards, pools and isolated functions, and their figures as JSON.


def find(name: str | None) -> list[Target]:
    """The guards, pools and isolated functions of this process with this name, or all, in the order of their names."""
    known: list[Target] = sorted((*guards, *pools, *status.functions), key=lambda target: target.name)
    found = [target for target in known if name in (None, target.name)]
    if name is not None and not found:
        listed = ", ".join(repr(target.name) for target in known) or "none"
        why = "is not a guard, a pool or an isolated function of this process"
        raise InvalidOption("name", name, why=why, fix=f"There are: {listed}.")
    return found


#: What is told of a status as it is, where it has it.
_TOLD = """state paused generation age in_flight reloads failures last_error uses model_bytes load_seconds
    used max_memory loads evictions unloads mold queued recycled crashed timed_out broker clients""".split()  # noqa: SIM905 - read as words


#: The longest text in an answer, in characters: the error of a load may contain the input, or a whole page of HTML.
_LONGEST_TEXT = 1000


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


def figures(target: Target) -> dict[str, Any]:
    status: Any = target.status()
    values = {name: getattr(status, name) for name in _TOLD if hasattr(status, name)}
    found = {name: _short(value) if isinstance(value, str) else value for name, value in values.items()}
    if isinstance(target, ModelPool):
        models = dict(zip(_keys(status.models), status.models.values(), strict=True))
        kept = {"models": models, "idle": _keys(status.idle)}
        return found | {"ready": not target.closed} | kept
    found |= {"ready": target.ready, "postponed": None}
    if (waits := status.postponed) is not None:
        reasons = [str(reason) for reason in waits.reasons]
        found["postponed"] = {"reasons": reasons, "cause": waits.cause, "seconds": waits.seconds}
    if isinstance(target, ModelGuard):
        reload_on = None if target.reload_on is None else _short(_units.text_of_own(target.reload_on))
        return found | {"reload_on": reload_on}
    return found | {"workers": [asdict(worker) for worker in status.workers]}


def _keys(keys: Iterable[object]) -> list[str]:
    """Keys are what the application says, and no JSON. Those that look alike get a number."""
    seen: Counter[str] = Counter()
    told = []
    for key in keys:
        text = _short(_units.text_of_own(key))
        seen[text] += 1
        told.append(text if seen[text] == 1 else f"{text} ({seen[text]})")
    return told


# What can be asked of the guards, pools and isolated functions of a process, whichever way the command comes.


Command = Literal["status", "reload", "unload", "pause", "resume"]
COMMANDS: tuple[Command, ...] = get_args(Command)


class Result(NamedTuple):
    """What a command did to one guard, pool or isolated function, with its figures afterwards."""

    name: str
    kind: str
    error: str | None
    status: dict[str, Any]


def run(
    command: Command, name: str | None, *, wait: bool, timeout: float | None, brokers: Collection[int] = ()
) -> list[Result]:
    """Do it to each target, one after another, so that replicas and guards are not replaced at the same time.

    Without a name, those that have never loaded in this process, or are closed, are not reloaded or unloaded. What
    these brokers own has been done for another process already, and is only shown. What has begun when the time is
    up goes on.
    """
    found, limit = find(name), Timeout(timeout)
    if command != "status":
        logger.info("modelguard: %s, asked of %s", command, ", ".join(target.name for target in found) or "no guard")
    results = []
    for target in found:
        left_alone = command == "status" or _is_left_alone(command, target, brokers, by_name=name is not None)
        error = None if left_alone else _do(command, target, limit, wait=wait)
        kind = target._what  # noqa: SLF001 - as its own errors call it
        results.append(Result(target.name, kind, error, figures(target)))
    return results


def _is_left_alone(command: Command, target: Target, brokers: Collection[int], *, by_name: bool) -> bool:
    status = target.status()
    if isinstance(status, IsolationStatus) and status.broker in brokers:
        return True
    return command in {"reload", "unload"} and status.state in {"new", "closed"} and not by_name


def _do(command: Command, target: Target, limit: Timeout, *, wait: bool) -> str | None:
    """Do it to one target; returns why it did not work."""
    if command == "reload" and target.status().state == "new":
        return "was never loaded in this process, so there is nothing to replace"
    try:
        if command == "reload" and not isinstance(target, ModelPool):
            target.reload(wait=wait, timeout=limit.left())
        elif command == "unload":
            target.unload(timeout=limit.left())
        else:  # a pool reloads each model at its next use, so there is nothing to wait for
            getattr(target, command)()
    except ModelGuardError as refusal:
        return _short(str(refusal))
    return None


#: Connections that are served at the same time: those that wait for a reload.
_MOST = 8
#: Seconds in which a client must have sent its request, and taken its answer.
_PATIENCE = 10.0
#: Seconds until a connection is looked at again that could not be accepted.
_PAUSE = 0.1

_listener: _Listener | None = None
_lock = threading.Lock()

#: What wakes the thread.
_RELOAD, _END = b"r", b"e"


def start() -> None:
    """Listen, unless this process does already."""
    global _listener
    with _lock:
        _listener = _listener or _Listener()


def stop() -> None:
    global _listener
    with _lock:
        if _listener is not None:
            _listener.close()
            _listener = None


def wake() -> None:
    """Have the thread reload all guards. Safe in a signal handler, which must not take a lock."""
    if (listener := _listener) is not None:
        with contextlib.suppress(OSError):  # enough reloads are asked for, or it is being closed
            listener.waker.send(_RELOAD, socket.MSG_DONTWAIT)


def _after_in_child() -> None:
    """Give the child a socket of its own. It keeps none of its parent's."""
    global _listener
    if _listener is not None:
        _listener.sockets.close()
        _listener = None
        try:
            _listener = _Listener()
        except (OSError, RuntimeError):  # the system gives no socket or thread; the worker serves all the same
            logger.exception("modelguard: this worker takes no commands")
    _lock.release()


fork_hooks.at_fork(fork_hooks.Rank.CONTROL, before=_lock.acquire, in_parent=_lock.release, in_child=_after_in_child)


class _Listener:
    """Listens from the start until :meth:`close`.

    Attributes:
        waker: Wakes the thread with what is sent.
        sockets: All of them. The thread closes them at its end; in a child of this process it does not run.
    """

    def __init__(self) -> None:
        self._slots = threading.BoundedSemaphore(_MOST)
        with contextlib.ExitStack() as made:
            self._socket = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._wakes, self.waker = map(made.enter_context, socket.socketpair())
            _bind(self._socket)
            self._socket.listen()  # more than are served: the others learn that, and need not try again
            self._socket.settimeout(0)
            self._thread = start_thread(self._run, "modelguard-control")
            self.sockets = made.pop_all()

    def close(self) -> None:
        """Have the thread close the sockets, and end."""
        self.waker.send(_END)
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        poll = select.poll()
        for each in (self._socket, self._wakes):
            poll.register(each, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakes.fileno() in ready:
                if _END in self._wakes.recv(_client.LONGEST_REQUEST):
                    break
                _reload_all()
            if self._socket.fileno() in ready:
                try:
                    self._accept(self._socket.accept()[0])
                except OSError:  # the client has gone; or there is no descriptor for it, and it waits on
                    time.sleep(_PAUSE)
        self.sockets.close()

    def _accept(self, connected: socket.socket) -> None:
        pid, user = peer(connected)
        if user not in {os.geteuid(), 0}:
            logger.warning("modelguard: refused a command of process %s of user %s", pid, user)
            _refuse(connected, f"takes commands of its own user and of root, and not of user {user}")
        elif not self._slots.acquire(blocking=False):
            _refuse(connected, f"{_MOST} other commands are under way; try again later")
        else:
            try:
                start_thread(partial(self._serve, connected), "modelguard-command")
            except RuntimeError as error:  # the system gives no thread
                self._slots.release()
                _refuse(connected, f"takes no command now: {error}")

    def _serve(self, connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError):  # the client has gone
            try:
                request = _client.receive(connected, _client.LONGEST_REQUEST, _PATIENCE)
                if request == {"command": _client.INSPECT}:
                    _inspected(connected)
                    return
                answer = _answer(request)
            except _client.Malformed:
                answer = {"error": "the request is not one line of JSON"}
            finally:
                self._slots.release()
            connected.settimeout(_PATIENCE)
            _client.send(connected, {"pid": os.getpid(), **answer})


def _bind(own: socket.socket) -> None:
    """Take the name of this process. A child that was just forked may still have a socket that had it before."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            own.bind(_client.address(os.getpid()))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
            time.sleep(_PAUSE)
        else:
            return


def _refuse(connected: socket.socket, why: str) -> None:
    with connected, contextlib.suppress(OSError):
        _client.send(connected, {"error": why})


def _inspected(connected: socket.socket) -> None:
    """Answer questions about this process until the other end has gone.

    By the script that is put into a process without modelguard: importing the package would take 10 MB here.
    """
    package = Path(__file__).parents[1]
    file = package / "diagnosis/_inside.py"
    script: dict[str, Any] = {"__name__": "modelguard.diagnosis._inside"}
    exec(compile(file.read_bytes(), file, "exec"), script)  # noqa: S102 - our own
    sources = {name: (package / path).read_text(encoding="utf-8") for name, path in script["SCRIPTS"].items()}
    connected.settimeout(_PATIENCE)
    _client.send(connected, {"pid": os.getpid(), "version": _client.version()})
    connected.settimeout(None)
    script["answer"](connected, sources)


def _answer(request: Any) -> dict[str, Any]:
    content = request if isinstance(request, dict) else {}
    command, name = content.get("command"), content.get("name")
    wait, timeout, brokers = content.get("wait", True), content.get("timeout"), content.get("brokers", [])
    typed = isinstance(name, str | None) and isinstance(wait, bool) and isinstance(timeout, int | float | None)
    typed = typed and isinstance(brokers, list) and all(isinstance(pid, int) for pid in brokers)
    if command not in COMMANDS or not typed:
        return {"error": "the request is not a known command"}
    try:
        results = run(command, name, wait=wait, timeout=timeout, brokers=brokers)
    except InvalidOption as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - the client must learn it, and the next command must be heard
        logger.exception("modelguard: %s, asked by a client, failed", command)
        return {"error": f"{command} failed with {type(error).__name__}; its log says where"}
    return {"guards": [result._asdict() for result in results]}


def _reload_all() -> None:
    """What SIGHUP asks for. It waits for nothing: each load has its own thread, and one process loads at a time."""
    try:
        logger.info("modelguard: SIGHUP")
        for result in run("reload", None, wait=False, timeout=None):
            if result.error is not None:
                logger.warning("modelguard: SIGHUP could not reload %s: %s", result.name, result.error)
    except Exception:  # noqa: BLE001 - the next command must be heard
        logger.exception("modelguard could not reload after SIGHUP")


# SIGHUP reloads all guards, where the server does not use the signal itself.


#: Whether it does so now.
_reloads = False


class _Handler:
    """Wakes the listener, then does what was done before."""

    def __init__(self, earlier: Any) -> None:
        self.earlier = earlier

    def __call__(self, number: int, frame: FrameType | None) -> None:
        earlier = self.earlier
        if _reloads:
            wake()
        elif signal.getsignal(number) is self:  # stop() was called in a thread that could not give the signal back
            signal.signal(number, earlier)
            signal.raise_signal(number)
            return
        if callable(earlier):
            earlier(number, frame)


def check() -> None:
    """Raise an error if the signal cannot be used; it names the server that uses it."""
    current = signal.getsignal(signal.SIGHUP)
    if isinstance(current, _Handler):
        return
    if (server := _server()) is not None:
        why = f"{server} uses SIGHUP itself; leave sighup out, and write: modelguard ctl PID reload --all"
    elif threading.current_thread() is not threading.main_thread():
        why = "only the main thread can install a handler; call it there"
    elif current is None:
        why = "something outside Python handles the signal"
    else:
        return
    raise NotSupported("modelguard.control.listen(sighup=True)", reason=why)


def install() -> None:
    """Handle the signal, once. An earlier handler is called too."""
    global _reloads
    _reloads = True
    current = signal.getsignal(signal.SIGHUP)
    if not isinstance(current, _Handler):
        signal.signal(signal.SIGHUP, _Handler(current))


def remove() -> None:
    """Give the signal back, unless another handler has been put above this one. In other threads the next one does."""
    global _reloads
    _reloads = False
    current = signal.getsignal(signal.SIGHUP)
    if isinstance(current, _Handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, current.earlier)


def _server() -> str | None:
    """The server that this process belongs to, if it uses the signal: gunicorn and uWSGI reload their workers at it."""
    if "uwsgi" in sys.modules:
        return "uWSGI"
    # gunicorn is also imported by those who only use its classes; its arbiter sets the variable.
    if "gunicorn.arbiter" in sys.modules and os.environ.get("SERVER_SOFTWARE", "").startswith("gunicorn"):
        return "gunicorn"
    return None
