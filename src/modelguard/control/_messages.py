"""How a process and ``modelguard ctl`` find each other, and talk: one line of JSON each way."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from typing import Any

__all__ = ["Malformed", "address", "receive", "send", "version"]

#: The longest request, in bytes.
LONGEST_REQUEST = 4096
#: The longest answer, in bytes: the status of a few thousand guards.
LONGEST_ANSWER = 4 * 2**20

#: The command after which the connection is one for questions about the process.
INSPECT = "inspect"

_CHUNK = 65_536


class Malformed(Exception):
    """The other end has sent something else than one line of JSON of the allowed length."""


def address(pid: int) -> str:
    """Where a process listens: a name without a file, which the kernel removes with the socket.

    With the number of the namespace of process ids: containers that share a network count from 1 each.
    """
    namespace = 0
    with suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a link of the kernel's
    return f"\0modelguard-control/{namespace}/{pid}"


def version() -> str:
    """The version of modelguard, without an import of the package that is above this one."""
    return str(sys.modules["modelguard"].__version__)


def send(connected: socket.socket, content: object) -> None:
    """Send one line. An end that is gone is an error, and never SIGPIPE, whose default a program may have set."""
    connected.sendall(json.dumps(content).encode() + b"\n", getattr(socket, "MSG_NOSIGNAL", 0))


def receive(connected: socket.socket, longest: int, seconds: float) -> Any:
    """Receive one line of at most ``longest`` bytes within ``seconds``.

    Raises:
        Malformed: It is not one, or the connection ended before.
        TimeoutError: It did not come in time.
    """
    until = time.monotonic() + seconds
    line = bytearray()
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connected.settimeout(left)
        chunk = connected.recv(min(_CHUNK, longest + 1 - len(line)))
        line += chunk
        if not chunk or len(line) > longest:
            raise Malformed
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise Malformed from None
