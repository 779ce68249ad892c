"""Servers and programs in their own processes: started, waited for, queried, and always ended."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from examples import _driver
from examples._driver import Answer, ServerFailed, read

__all__ = [
    "Answer",
    "Clients",
    "Server",
    "ServerFailed",
    "alive",
    "cgroup",
    "read",
    "run_python",
    "wait_until",
    "write_app",
]

#: Seconds that a test waits for what should come at once, and on a busy machine may take long.
PATIENCE = 60.0


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Wait until a condition is true, whether or not a server is alive; after ``seconds`` the test fails."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited for {seconds:.0f} s: {what}"
        time.sleep(0.05)


@contextmanager
def cgroup(limit: int) -> Iterator[str]:
    """A cgroup of this size, of whichever version manages memory here."""
    tops = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
    for top, name in tops.items() if limit else ():
        folder = top / f"modelguard-{os.getpid()}"
        with suppress(OSError):
            folder.mkdir()
            try:
                (folder / name).write_text(str(limit))
                yield str(folder)
            finally:
                members = folder / "cgroup.procs"
                wait_until(lambda members=members: not members.read_text(), "its processes to end")
                folder.rmdir()
            return
    if limit:
        pytest.skip("no cgroup can be made here")
    yield ""


def alive(pid: int) -> bool:
    """Whether there is such a process. What nobody has collected yet has ended; it may go at any moment."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_python(program: str, seconds: float, **environment: str) -> Any:
    """Run a program in an interpreter of its own; returns what it printed last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def write_app(folder: Path, code: str, name: str = "app.py") -> None:
    """Write the module that a server is to serve."""
    (folder / name).write_text(textwrap.dedent(code), encoding="utf-8")


class Server(_driver.Server):
    """A server that is killed with all its children at the end of a ``with`` block, however it ended.

    Args:
        folder: Where it runs.
        command: As for the drivers of the examples: what comes after ``python`` starts with an option such as ``-m``.
        environment: Variables beside those of the test.
    """

    def __init__(self, folder: Path, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
        python = [sys.executable] if str(command[0]).startswith("-") else []
        super().__init__([*python, *command], folder=folder, environment=environment)
        self.folder = folder
        self._threads = ThreadPoolExecutor(64)

    def begin(self, path: str, **request: Any) -> Future[Answer]:
        """Ask, and do not wait."""
        return self._threads.submit(self.ask, path, **request)

    def connect(self, path: str, method: str = "GET") -> socket.socket:
        """Ask, and keep the connection, to hang it up."""
        line = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        body = b"text" if method == "POST" else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        return line

    def replace_file(self, name: str, text: str) -> None:
        """Write a file of the server's folder atomically."""
        (self.folder / "new").write_text(text)
        (self.folder / "new").rename(self.folder / name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        self._threads.shutdown()


class Clients:
    """Clients that send requests without a break, in threads, until the block ends, and count the answers.

    Args:
        server: It answers with words, of which the first names a process and the second a version.
        count: How many clients.
        keep_alive: Whether a connection serves more than one request.
    """

    def __init__(self, server: Server, *, count: int = 4, keep_alive: bool = False) -> None:
        self.sent = self.answered = self.closed_before_use = 0
        self.failures: list[str] = []
        self.versions: Counter[str] = Counter()
        self.pids: set[str] = set()
        self._port = server.port
        self._keep_alive = keep_alive
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def __str__(self) -> str:
        counts = f"sent {self.sent}, answered {self.answered}, closed before use {self.closed_before_use}"
        return f"{counts}, failed {self.failures[:3]}"

    def _run(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._over.is_set():
            with self._lock:
                self.sent += 1
            try:
                words = self._ask(client)
            except (OSError, http.client.HTTPException) as error:
                with self._lock:
                    self.failures.append(f"{type(error).__name__}: {error}")
                client.close()
                continue
            with self._lock:
                self.answered += 1
                self.versions[words[1]] += 1
                self.pids.add(words[0])
        client.close()

    def _ask(self, client: http.client.HTTPConnection) -> Sequence[str]:
        reused = client.sock is not None
        try:
            return self._ask_once(client)
        except (ConnectionError, http.client.RemoteDisconnected):
            # A server may close an idle connection while the next request is on its way, and every client library
            # sends it again on a fresh one (RFC 9112, 9.3.1). On a fresh one there is no excuse.
            client.close()
            if not reused:
                raise
            with self._lock:
                self.closed_before_use += 1
            return self._ask_once(client)

    def _ask_once(self, client: http.client.HTTPConnection) -> Sequence[str]:
        client.request("GET", "/", headers={} if self._keep_alive else {"Connection": "close"})
        answer = read(client.getresponse())
        assert 200 == answer.status, answer.text
        if not self._keep_alive:
            client.close()
        return answer.text.split(" ")


def molds() -> list[psutil.Process]:
    """The child processes of this process that are molds or workers."""
    return [child for child in psutil.Process().children(recursive=True) if is_mold(child)]


def is_mold(process: psutil.Process) -> bool:
    """Whether a process is a mold or a worker; one that has just ended is none."""
    try:
        return "mold" in process.cmdline()
    except psutil.NoSuchProcess:  # or a zombie
        return False


def in_child(work: Callable[[], None], seconds: float = 20) -> None:
    """Fork, run ``work`` in the child, and fail with what it raised. A child that hangs is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writing, repr(error).encode()[:4000])
            os._exit(1)
    os.close(writing)
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail(f"the child hung for {seconds} s")
        time.sleep(0.01)
    said = os.read(reading, 4000).decode()
    os.close(reading)
    assert 0 == os.waitstatus_to_exitcode(status), said
