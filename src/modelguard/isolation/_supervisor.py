"""One thread per process that starts molds, waits for what they report, and keeps their timers.

It lives as long as the process, which the parent-death signal of the molds needs: the kernel sends that when the thread
that started them ends.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import pickle
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from modelguard import telemetry
from modelguard.isolation._channel import send
from modelguard.telemetry import Event, logger

Work = Callable[[], object]


class Supervisor:
    """Runs work in its thread: at once, later, or when a descriptor can be read."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.RLock()  # reentrant: the garbage collector may call in, for a function that was dropped
        self._running = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)  # noqa: FBT003 - its only parameter
        self._wake.setblocking(False)  # noqa: FBT003 - its only parameter
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._work: deque[Work] = deque()
        self._timers: list[tuple[float, int, Work]] = []
        self._count = itertools.count()

    def call(self, work: Work) -> None:
        """Run ``work`` in the thread, after what was given to it before."""
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
            threading.Thread(target=self._run, name="modelguard-isolation", daemon=True).start()
        except BaseException:  # the system gives no thread now; the next call tries again
            self._running = False
            with suppress(ValueError):
                self._work.remove(work)
            raise

    def later(self, seconds: float, work: Work) -> None:
        """Run ``work`` after so many seconds."""
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
    """The supervisor of this process."""
    global _supervisor
    with _making:
        if _supervisor is None or _supervisor.pid != os.getpid():
            made = Supervisor()
            if _supervisor is not None and _supervisor.pid == os.getpid():  # the collector has asked for one meanwhile
                made.abandon()
                return _supervisor
            if _supervisor is not None:
                _supervisor.abandon()
            _supervisor = made
        return _supervisor


def _after_fork_in_child() -> None:
    global _making
    _making = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# Log records and events of the mold and its workers reach the owner, beside the calls.


#: Bytes of one report; the socket's buffer takes several of them.
_LONGEST = 60_000

#: Seconds that a worker waits for room in the socket before it drops a report.
_PATIENCE = 0.1

#: Before each report: the process id of its sender.
_SENDER = struct.Struct("<I")

_receiver: Callable[[bytes], object] | None = None


def pair() -> tuple[socket.socket, socket.socket]:
    """Make a socket pair that keeps reports apart, and lets several processes write to one end."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def levels() -> dict[str, int]:
    """The level of each logger of this process that has one. The root logger's name is empty."""
    every = logging.root.manager.loggerDict.copy()  # other threads make loggers
    known = {name: one for name, one in every.items() if isinstance(one, logging.Logger)}
    return {"": logging.root.level, **{name: one.level for name, one in known.items() if one.level}}


class Reporter(logging.Handler):
    """In a mold and its workers: sends records and events to the owner.

    Args:
        connected: The sending end. Never blocks for long: what finds no room is dropped.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__()
        self._socket = connected

    def install(self, wanted: dict[str, int]) -> None:
        """Become the only handler of records and events, with the owner's levels."""
        for name, level in wanted.items():
            logging.getLogger(name or None).setLevel(level)
        logging.captureWarnings(capture=True)
        self.take_over()

    def take_over(self) -> None:
        """Replace the handlers and hooks of this process, which the owner has too."""
        logging.root.handlers[:] = [self]
        telemetry.set_hooks([self.report_event])

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record: its text, because its arguments may be of any type."""
        try:
            fields = {**vars(record), "msg": record.getMessage(), "args": None, "exc_info": None}
            if record.exc_info:
                fields["exc_text"] = record.exc_text or logging.Formatter().formatException(record.exc_info)
        except Exception:  # noqa: BLE001 - a record that cannot be formatted must not break the call
            self.handleError(record)
            return
        if not self._send(fields):
            plain = {name: value for name, value in fields.items() if isinstance(value, str | int | float | None)}
            self._send({**plain, "msg": str(fields["msg"])[: _LONGEST // 8], "exc_text": None})

    def report_event(self, event: Event) -> None:
        """Send an event. It is a hook."""
        self._send(event)

    def _send(self, report: object) -> bool:
        try:
            body = pickle.dumps(report)
            if len(body) > _LONGEST:
                return False
            send(self._socket, _SENDER.pack(os.getpid()) + body, time.monotonic() + _PATIENCE)
        except Exception:  # noqa: BLE001 - no room, no owner, or a field that cannot be pickled
            return False
        return True


def sender(report: bytes) -> int:
    """The process id of who sent a report."""
    return int(_SENDER.unpack_from(report)[0])


def hand_on(receiver: Callable[[bytes], object]) -> None:
    """Give the reports to ``receiver`` instead, in a process that stands between the workers and their callers."""
    global _receiver
    _receiver = receiver


def replay_all(connected: socket.socket) -> None:
    """In the owner: :func:`replay` what has been received so far."""
    while report := _receive(connected):
        replay(report)


def replay_next(connected: socket.socket) -> bool:
    """In the owner: :func:`replay` the next report, if there is one now. Returns false once there will be none."""
    report = _receive(connected)
    if report:
        replay(report)
    return report != b""


def _receive(connected: socket.socket) -> bytes | None:
    """A report; None if there is none now, and empty once there will be none.

    It never blocks: of two sockets that can be read, the work for the first may have read the second as well.
    """
    try:
        return connected.recv(1 << 17, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def replay(report: bytes) -> None:
    """In the owner: hand a record or an event to this process's loggers or hooks."""
    if _receiver is not None:
        _receiver(report)
        return
    received: Any = pickle.loads(memoryview(report)[_SENDER.size :])  # noqa: S301 - from this program's own processes
    if isinstance(received, Event):
        telemetry.emit(received)
        return
    record = logging.makeLogRecord(received)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
