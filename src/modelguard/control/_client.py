"""The other end: sends a command to a process, and finds those that take commands."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from modelguard.facts import _proc
from modelguard.facts._proc import peer

# How a process and ``modelguard ctl`` find each other, and talk: one line of JSON each way.


#: The longest request, in bytes. It has the name of a guard, which may be long: a character takes up to twelve.
LONGEST_REQUEST = 2**18
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
    """Receive one line of at most ``longest`` bytes within ``seconds``."""
    until = time.monotonic() + seconds
    line = bytearray()
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connected.settimeout(left)
        chunk = connected.recv(min(_CHUNK, longest + 1 - len(line)))
        line += chunk
        if len(line) > longest:
            raise Malformed(f"it sent more than {longest} bytes")
        if not chunk:
            raise Malformed
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise Malformed from None


#: Seconds in which a process must have answered, beside those that the command itself may take.
_PATIENCE = 10.0
#: Seconds between two attempts to connect where too many others do.
_PAUSE = 0.05


class Unreachable(Exception):
    """The process takes no commands, or not this user's."""


class Busy(Unreachable):
    """It takes commands, and others wait before this one."""


@dataclass(frozen=True)
class Request:
    """A command to all guards, or to that of a name. What these brokers own has got it already."""

    command: str
    name: str | None = None
    wait: bool = True
    timeout: float = 0.0
    brokers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Answered:
    """What a process answered: why nothing was done, or what came of it for each guard and isolated function."""

    error: str | None
    guards: tuple[dict[str, Any], ...]

    @property
    def failed(self) -> bool:
        return self.error is not None or any(guard["error"] is not None for guard in self.guards)

    @property
    def brokers(self) -> frozenset[int]:
        """Process ids of brokers that have done it."""
        done = (guard["status"].get("broker") for guard in self.guards if guard["error"] is None)
        return frozenset(pid for pid in done if pid is not None)


def ask(pid: int, request: Request) -> Answered:
    """Send a command, and wait for the answer."""
    content = asdict(request) | {"brokers": sorted(request.brokers)}
    connected, answer = _exchanged(pid, content, request.timeout + _PATIENCE)
    connected.close()
    return Answered(answer.get("error"), tuple(answer.get("guards", ())))


def inspect(pid: int) -> socket.socket:
    """Have a process answer questions about itself, as ``modelguard.diagnosis._inside`` does.

    Returns the connection for questions and answers, one line each.
    """
    connected, said = _exchanged(pid, {"command": INSPECT}, _PATIENCE)
    theirs = said.get("version")
    if theirs != version():  # what is asked and answered may differ
        connected.close()
        refusal = said.get("error") or f"its modelguard is {theirs}, and this is {version()}"
        raise Unreachable(f"process {pid}: {refusal}")
    return connected


def _exchanged(pid: int, content: object, seconds: float) -> tuple[socket.socket, Any]:
    """Send something, and return the answer with the connection, which is still open."""
    connected = _connect(pid)
    try:
        with suppress(ConnectionError):  # one that refuses to read has said why, and hung up
            send(connected, content)
        return connected, receive(connected, LONGEST_ANSWER, seconds)
    except (OSError, Malformed) as error:
        connected.close()
        late = f" in {seconds:g} s" if isinstance(error, TimeoutError) else f": {str(error) or 'it hung up'}"
        raise Unreachable(f"process {pid} did not answer{late}") from None


def _connect(pid: int, patience: float = _PATIENCE) -> socket.socket:
    with ExitStack() as failing:
        connected = failing.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connected.settimeout(_PATIENCE)
        until = time.monotonic() + patience
        while (failed := connected.connect_ex(address(pid))) == errno.EAGAIN:  # as many wait as may
            if time.monotonic() >= until:
                raise Busy(f"process {pid} does not take commands now: others wait, and it does not come to them")
            time.sleep(_PAUSE)
        if failed == errno.ECONNREFUSED:
            why = f"process {pid} takes no commands; call modelguard.control.listen() where its application is made"
            raise Unreachable(why)
        if failed:
            raise OSError(failed, os.strerror(failed))
        # The kernel says who listens: no other process can take the name of this one.
        found, user = peer(connected)
        if found != pid or (user not in {own := os.geteuid(), 0} and own != 0):  # root may ask anybody's
            raise Unreachable(f"the socket of process {pid} belongs to process {found} of user {user}")
        failing.pop_all()
        return connected


def listening_below(pid: int) -> list[int]:
    """The processes below this one, itself included, that take commands, parents before children."""
    known = _proc.processes()
    if pid not in known:
        raise ProcessLookupError(3, f"process {pid} {_proc.absence(pid)}")
    found = []
    for process in _proc.descendants(pid, known):
        try:
            _connect(process.pid, patience=0.0).close()
        except Busy:
            pass
        except (Unreachable, OSError):
            continue
        found.append(process.pid)
    return found
