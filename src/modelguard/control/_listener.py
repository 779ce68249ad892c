"""The socket of this process, and the thread that serves it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from pathlib import Path
from typing import Any

from modelguard.control import _commands, _messages
from modelguard.environment._peer import peer
from modelguard.errors import InvalidOption
from modelguard.telemetry import logger

__all__ = ["start", "stop", "wake"]

#: Connections that are served at the same time: those that wait for a reload.
_MOST = 8
#: Seconds in which a client must have sent its request, and taken its answer.
_PATIENCE = 10.0

_listener: _Listener | None = None
_lock = threading.Lock()
_hooked = False

#: What is written to the pipe.
_RELOAD, _END = b"r", b"e"
#: The end of the pipe that a signal handler writes to; -1 if there is none. A handler must not take a lock.
_wake_fd = -1


def start() -> None:
    """Listen, unless this process does already.

    Raises:
        OSError: Another process holds the name.
    """
    global _listener, _hooked
    with _lock:
        if _listener is None:
            _listener = _Listener()
        if not _hooked:
            os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
            _hooked = True


def stop() -> None:
    """Stop listening."""
    global _listener
    with _lock:
        if _listener is not None:
            _listener.close()
            _listener = None


def wake() -> None:
    """Have the thread reload all guards. Safe in a signal handler."""
    if _wake_fd >= 0:
        with contextlib.suppress(OSError):  # the pipe is full: enough reloads are asked for
            os.write(_wake_fd, _RELOAD)


def _before() -> None:
    _lock.acquire()  # the global one: a child makes another


def _after_in_parent() -> None:
    _lock.release()


def _after_in_child() -> None:
    """Give the child a socket of its own. It keeps none of its parent's."""
    global _lock, _listener
    _lock = threading.Lock()
    if _listener is not None:
        _listener.forget()
        _listener = None
        try:
            _listener = _Listener()
        except (OSError, RuntimeError):  # the system gives no socket or thread; the worker serves all the same
            logger.exception("modelguard: this worker takes no commands")


class _Listener:
    """Listens from the start until :meth:`close`."""

    def __init__(self) -> None:
        global _wake_fd
        self._slots = threading.BoundedSemaphore(_MOST)
        self._ended = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._reader = self._writer = -1
        try:
            self._socket.bind(_messages.address(os.getpid()))
            self._socket.listen(_MOST)
            self._socket.settimeout(0)
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            threading.Thread(target=self._run, name="modelguard-control", daemon=True).start()
        except BaseException:
            self.forget()
            raise
        _wake_fd = self._writer

    def close(self) -> None:
        """Have the thread close the socket, and end."""
        global _wake_fd
        _wake_fd = -1
        os.write(self._writer, _END)
        self._ended.wait(_PATIENCE)
        os.close(self._writer)
        self._writer = -1

    def forget(self) -> None:
        """Close what this process has of the socket. The thread does not run here."""
        global _wake_fd
        _wake_fd = -1
        self._socket.close()
        for end in (self._reader, self._writer):
            if end >= 0:
                os.close(end)
        self._reader = self._writer = -1

    def _run(self) -> None:
        poll = select.poll()
        for fd in (self._socket.fileno(), self._reader):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._reader in ready:
                if _END in os.read(self._reader, _messages.LONGEST_REQUEST):
                    break
                _reload_all()
            if self._socket.fileno() in ready:
                with contextlib.suppress(OSError):  # the client has gone
                    self._accept(self._socket.accept()[0])
        self._socket.close()
        os.close(self._reader)
        self._ended.set()

    def _accept(self, connected: socket.socket) -> None:
        pid, user = peer(connected)
        if user not in {os.geteuid(), 0}:
            logger.warning("modelguard: refused a command of process %s of user %s", pid, user)
            connected.close()
        elif not self._slots.acquire(blocking=False):
            with connected, contextlib.suppress(OSError):
                _messages.send(connected, {"error": f"{_MOST} other commands are under way; try again later"})
        else:
            try:
                threading.Thread(target=self._serve, args=(connected,), name="modelguard-command", daemon=True).start()
            except RuntimeError:  # the system gives no thread
                self._slots.release()
                connected.close()

    def _serve(self, connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError):  # the client has gone
            try:
                request = _messages.receive(connected, _messages.LONGEST_REQUEST, _PATIENCE)
                if request == {"command": _messages.INSPECT}:
                    _inspected(connected)
                    return
                answer = _answer(request)
            except _messages.Malformed:
                answer = {"error": "the request is not one line of JSON"}
            finally:
                self._slots.release()
            connected.settimeout(_PATIENCE)
            _messages.send(connected, {"pid": os.getpid(), **answer})


def _inspected(connected: socket.socket) -> None:
    """Answer questions about this process until the other end has gone.

    By the script that is put into a process without modelguard: importing the package would take 10 MB here.
    """
    folder = Path(__file__).parents[1] / "diagnosis"
    script: dict[str, Any] = {"__name__": "modelguard.diagnosis._inside"}
    exec(compile((folder / "_inside.py").read_bytes(), folder / "_inside.py", "exec"), script)  # noqa: S102 - our own
    sources = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in script["SCRIPTS"]}
    connected.settimeout(_PATIENCE)
    _messages.send(connected, {"pid": os.getpid(), "version": _messages.version()})
    connected.settimeout(None)
    script["answer"](connected, sources)


def _answer(request: Any) -> dict[str, Any]:
    """Do what a request asks for."""
    content = request if isinstance(request, dict) else {}
    command, name = content.get("command"), content.get("name")
    wait, timeout, brokers = content.get("wait", True), content.get("timeout"), content.get("brokers", [])
    typed = isinstance(name, str | None) and isinstance(wait, bool) and isinstance(timeout, int | float | None)
    typed = typed and isinstance(brokers, list) and all(isinstance(pid, int) for pid in brokers)
    if command not in _commands.COMMANDS or not typed:
        return {"error": "the request is not a known command"}
    try:
        results = _commands.run(command, name, wait=wait, timeout=timeout, brokers=brokers)
    except InvalidOption as error:
        return {"error": str(error)}
    return {"guards": [result.as_dict() for result in results]}


def _reload_all() -> None:
    """What SIGHUP asks for. It waits for nothing: each load has its own thread, and one process loads at a time."""
    try:
        logger.info("modelguard: SIGHUP")
        for result in _commands.run("reload", None, wait=False, timeout=None):
            if result.error is not None:
                logger.warning("modelguard: SIGHUP could not reload %s: %s", result.name, result.error)
    except Exception:  # noqa: BLE001 - the repr of a policy may raise, and the next command must be heard
        logger.exception("modelguard could not reload after SIGHUP")
