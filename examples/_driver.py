"""What the drivers of the examples have in common: servers, what they hold, a load, a table, a picture."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from modelguard import memory

T = TypeVar("T")
R = TypeVar("R")

#: Seconds for a server to import its libraries and load its model; a cold disk takes a minute.
START = 180.0
#: Seconds for a server to end after it was asked to.
STOP = 30.0
#: Seconds until a child that ends has given its memory back, or one that starts has come up.
_UNSETTLED = 0.05
#: Readings at most until no child ends or starts during one.
_READINGS = 20
#: Last lines of a server's log that messages show.
LAST_LINES = 30
#: How a server's log names the port that it listens on.
_LISTENS = re.compile(r"(?:127\.0\.0\.1|localhost):([1-9]\d*)")
_SERVER_ERRORS = 500
_ROLLUP = re.compile(r"^(Pss_Anon|SwapPss): +(\d+) kB$", re.MULTILINE)

#: Points of a curve that are marked one by one.
_MARKED = 40

#: The first service that is compared, as it was first written, then the guarded one, and the isolated one.
COLOURS = ("#d55e00", "#0072b2", "#009e73")


@dataclass(frozen=True)
class Answer:
    """What a server has answered, with the names of its headers in lower case, and the seconds that it took."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float = math.nan

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    port: int,
    path: str = "/",
    data: bytes | str | None = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> Answer:
    """Send one request over a connection of its own; with ``data`` it is a POST.

    Raises:
        OSError: There is no connection, or no answer within ``timeout`` seconds.
        HTTPException: The answer is not HTTP, or ends early.
    """
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    body = data.encode() if isinstance(data, str) else data
    with contextlib.closing(client):
        began = time.perf_counter()
        client.request(method or ("GET" if body is None else "POST"), path, body, dict(headers or {}))
        return read(client.getresponse(), began)


def read(response: http.client.HTTPResponse, began: float = math.nan) -> Answer:
    """Read an answer to its end; ``began`` is the reading of ``time.perf_counter`` when the request was sent."""
    headers, body = {name.lower(): value for name, value in response.getheaders()}, response.read()
    return Answer(response.status, headers, body, time.perf_counter() - began)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class ServerFailed(RuntimeError):
    """A server has ended, or has not done in time what it should; the message has the end of its log."""


class Server:
    """A server in a session of its own, whose output goes to a temporary file.

    Args:
        name: What messages call it.
        command: Has the server listen on a free port of the loopback interface (``--bind 127.0.0.1:0``); the port is
            read from what it prints.
        folder: Where it runs.
        environment: Variables beside those of this process.
        port: The port that it listens on, if the command says so and the server need not.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        name: str = "new",
        port: int | None = None,
    ) -> None:
        self.name = name
        self._output = tempfile.NamedTemporaryFile(prefix="server-", suffix=".log")  # noqa: SIM115 - kill() closes it
        self._last_output: str | None = None
        self._port = port
        self._family: list[psutil.Process] = []
        self.process = subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.PIPE,  # which ends with this process, however that ends
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal is for the driver, which stops its servers itself
        )

    @property
    def log(self) -> str:
        """Everything that the server and its children have printed so far."""
        if self._last_output is not None:
            return self._last_output
        return Path(self._output.name).read_text(encoding="utf-8", errors="replace")

    @property
    def port(self) -> int | None:
        """The port that the server listens on, None before it says so."""
        if self._port is None and (found := _LISTENS.search(self.log)):
            self._port = int(found[1])
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> set[int]:
        """The server's own children: its workers, if it has any."""
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def private_bytes(self) -> int:
        """Bytes that the server and its children have written to, swapped out or not; shared pages count once.

        Unwritten pages of mapped files do not count: they become private to one server when another one unmaps them.

        Raises:
            ServerFailed: The server has ended.
        """
        try:
            for _ in range(_READINGS):
                total, settled = self._family_bytes()
                if settled:
                    break
                time.sleep(_UNSETTLED)
        except (ProcessLookupError, psutil.NoSuchProcess):
            # A process that ends has no memory any more, some moments before its exit status can be read.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            self.check()
            raise
        return total

    def _family_bytes(self) -> tuple[int, bool]:
        """Bytes, and whether they are all: the share of a child that has ended or started meanwhile is missing."""
        family, read = self._living(), set()
        total = _written(self.process.pid)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                total += _written(pid)
                read.add(pid)
        return total, family == read == self._living()

    def _living(self) -> set[int]:
        family = psutil.Process(self.process.pid).children(recursive=True)
        return {child.pid for child in family if not _has_ended(child)}

    def ask(
        self,
        path: str = "/",
        data: bytes | str | None = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Answer:
        """Send one request over a connection of its own; with ``data`` it is a POST."""
        assert self.port is not None, self.log
        return ask(self.port, path, data, method=method, headers=headers, timeout=timeout)

    def check(self) -> None:
        """Raise ServerFailed if the server has ended."""
        status = self.process.poll()
        if status is not None:
            raise ServerFailed(f"The {self.name} server died with status {status}.{self._tail()}")

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = START) -> None:
        """Wait until something is so.

        Raises:
            ServerFailed: The server has ended, or ``seconds`` are over.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                raise ServerFailed(f"The {self.name} server was waited for {seconds:.0f} s: {what}.{self._tail()}")
            time.sleep(0.05)

    def wait_until_serving(self, path: str = "/", seconds: float = START) -> None:
        """Wait until the server answers a request, and not with an error of its own (500 or above)."""

        def serves() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.port is not None and self.ask(path, timeout=seconds).status < _SERVER_ERRORS
            return False

        self.wait_until(serves, f"an answer to a request for {path}", seconds)

    def stop(self, seconds: float = STOP) -> int:
        """Ask the server to end, kill what is still there after ``seconds``, and return the exit status."""
        self._note_family()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()
        return self.process.returncode

    def kill(self) -> None:
        """Kill the server and all its children, and wait until they are gone."""
        if self._last_output is not None:  # done already
            return
        self._note_family()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for one in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self.process.wait()
        deadline = time.monotonic() + STOP
        while not all(map(_has_ended, self._family)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._last_output = self.log
        self._output.close()

    def _tail(self) -> str:
        return "".join(f"\n  {line}" for line in self.log.splitlines()[-LAST_LINES:])

    def _note_family(self) -> None:
        # Those that have left the server's session can be found only as long as their parent lives.
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family += psutil.Process(self.process.pid).children(recursive=True)


def _written(pid: int) -> int:
    # Each process's share of a page that several have, so that the shares of a family add up to the page.
    if not Path("/proc/self/smaps_rollup").exists():
        usage = memory.usage(pid)
        return (usage.private_dirty or 0) + (usage.swap or 0)
    try:
        found = dict(_ROLLUP.findall(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")))
    except FileNotFoundError:
        found = {}
    if not found:
        raise ProcessLookupError(pid)
    return 1024 * (int(found["Pss_Anon"]) + int(found["SwapPss"]))


def _has_ended(process: psutil.Process) -> bool:
    # An orphan stays a zombie until the system's first process takes note of it.
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def running(
    command: Sequence[str | Path],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    name: str = "new",
    path: str = "/",
    stop: float = STOP,
    port: int | None = None,
    start: float = START,
) -> Iterator[Server]:
    """A server that answers requests for ``path`` after ``start`` seconds at most, and is stopped within ``stop``."""
    server = Server(command, folder=folder, environment=environment, name=name, port=port)
    try:
        server.wait_until_serving(path, start)
        yield server
    finally:
        server.stop(stop)


def send_all(send: Callable[[T], R], items: Sequence[T], connections: int) -> list[R]:
    """Send every item, so many at a time, and return what came back in the order of the items."""
    with ThreadPoolExecutor(connections) as pool:
        return list(pool.map(send, items))


def wrk(url: str, texts: Sequence[str], connections: int, seconds: float, more: str = "") -> str:
    """Post the texts by wrk, each connection the next one when its last is answered; returns what wrk printed.

    Args:
        url: Where to.
        texts: What is sent, again and again.
        connections: Open at the same time.
        seconds: Of load. A request that is not answered within ten seconds is counted by wrk as a timeout.
        more: Functions in Lua that wrk calls.
    """
    listed = ", ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    script = (
        f"local texts, place = {{{listed}}}, 0\n"
        "function request()\n  place = place % #texts + 1\n"
        '  return wrk.format("POST", nil, {["Content-Type"] = "text/plain"}, texts[place])\nend\n' + more
    )
    with tempfile.NamedTemporaryFile("w", suffix=".lua", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        options = ["-t", "1", "-c", str(connections), "-d", f"{seconds:.0f}s", "--timeout", "10s", "-s", file.name]
        return subprocess.run(["wrk", *options, url], check=True, capture_output=True, text=True).stdout


def row(*cells: str, width: int = 12) -> str:
    """One line of a table that is printed line by line."""
    return "".join(f"{cell:>{width}}" for cell in cells)


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f} MB"


@dataclass(frozen=True)
class Panel:
    """One part of a picture: a curve for each service, as its places on both axes."""

    title: str
    x: str
    y: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]


def draw(path: Path, *panels: Panel) -> None:
    """Write the panels, side by side, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 5.5 * len(panels), 4.5), dpi=130, layout="constrained")
    every = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(every, panels, strict=True):
        for (name, (x, y)), colour in zip(panel.curves.items(), itertools.cycle(COLOURS)):
            axes.plot(x, y, color=colour, marker="o" if len(x) <= _MARKED else None, label=name)
        axes.set(xlabel=panel.x, ylabel=panel.y, ylim=(0, None))
        axes.set_title(panel.title, loc="left")
        axes.grid(color="#e6e6e6")
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = every[0].get_legend_handles_labels()
    if len(names) > 1:
        figure.legend(handles, names, loc="outside lower center", ncols=len(COLOURS), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
