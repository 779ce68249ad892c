"""Log records and events of the mold and its workers reach the owner, beside the calls."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from modelguard import telemetry
from modelguard.isolation._channel import send
from modelguard.telemetry import Event

__all__ = ["Reporter", "hand_on", "levels", "pair", "replay", "replay_all", "replay_next", "sender"]

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
