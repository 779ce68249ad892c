"""A real gunicorn on loopback, and clients that count what they sent and what was answered."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil

CONFIG = "python:modelguard.frameworks.gunicorn"

#: The model is a dictionary that knows its version, read from a file. `/` answers with worker, version and the
#: process that made the model; paths ask for more.
APP = """
    import os, time
    from pathlib import Path
    from modelguard import TTL, Errors, MemoryGrowth, Modified, Uses, guard

    HERE = Path(__file__).parent
    WEIGHTS = HERE / "weights"

    class Model(dict):
        pass

    def load():
        version = WEIGHTS.read_text()
        if (HERE / "slow").exists():
            (HERE / "loading").touch()
            time.sleep(2)
        if version == "broken":
            raise OSError("no weights in there")
        return Model({f"feature-{n}": [n] for n in range(1000)}, version=version, pid=os.getpid())

    def warm(model):
        if (HERE / "cold").exists() and os.getpid() != PARENT:
            raise OSError("no warmth")
        WARMED.append(os.getpid())

    PARENT, WARMED, HELD = os.getpid(), [], []
    nlp = guard(load, reload_on=POLICY, warmup=warm, prefork=True, name="nlp")

    @nlp
    def answer(model, path):
        if path == "/slow":
            time.sleep(0.5)
        if path == "/fail":
            raise ValueError("asked for")
        if path == "/leak":
            HELD.append(b"x" * 5_000_000)
        return f"{os.getpid()} {model['version']} {model['pid'] == PARENT} {os.getpid() in WARMED}"

    def app(environ, start_response):
        try:
            text, status = answer(environ["PATH_INFO"]), "200 OK"
        except ValueError as error:
            text, status = str(error), "500 Asked For"
        body = text.encode()
        start_response(status, [("Content-Length", str(len(body)))])
        return [body]

    async def aapp(scope, receive, send):
        assert scope["type"] == "http", "no lifespan"
        body = answer(scope["path"]).encode()
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(told: Callable[[], object], seconds: float = 40, what: str = "") -> None:
    """Wait until something is so; a test that waits in vain has failed."""
    deadline = time.monotonic() + seconds
    while not told():
        assert time.monotonic() < deadline, f"it did not come true: {what or told}"
        time.sleep(0.05)


class Server:
    """gunicorn in a process of its own, with its log in a file."""

    def __init__(self, folder: Path, *args: str, app: str = APP, policy: str = "None", **environ: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.size = int(args[args.index("-w") + 1])
        (folder / "weights").write_text("1")
        (folder / "app.py").write_text(textwrap.dedent(app).replace("POLICY", policy))
        command = [sys.executable, "-m", "gunicorn", "-b", f"127.0.0.1:{self.port}"]
        options = args if "-c" in args else ("-c", CONFIG, *args)
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [*command, *options, "app:aapp" if "asgi" in args else "app:app"],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def ask(self, path: str = "/", timeout: float = 20) -> list[str]:
        """What the application says: worker, version, whether the model is the master's, whether it was warm."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(client):
            client.request("GET", path)
            return client.getresponse().read().decode().split(" ")

    def up(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(OSError, http.client.HTTPException):
                return len(self.ask()) == 4
            return False

        until(answers, what="it answers")
        # A worker has warmed up before it says this.
        until(lambda: self.log.count("Booting worker") >= self.size, what="all workers are there")

    def workers(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def replaced(self) -> int:
        return self.log.count("is replaced: ")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self._log.close()


class Load:
    """Clients that ask without a break, in threads, until the block ends. A second block begins where it ended."""

    def __init__(self, server: Server, *, clients: int = 4, keep_alive: bool = False) -> None:
        self.sent = self.answered = self.stale = 0
        self.failures: list[str] = []
        self.versions: Counter[str] = Counter()
        self.pids: set[str] = set()
        self._server = server
        self._keep_alive = keep_alive
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def __str__(self) -> str:
        return f"sent {self.sent}, answered {self.answered}, closed before use {self.stale}, failed {self.failures[:3]}"

    def _run(self) -> None:
        client = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=30)
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

    def _ask(self, client: http.client.HTTPConnection) -> list[str]:
        reused = client.sock is not None
        try:
            return self._once(client)
        except (ConnectionError, http.client.RemoteDisconnected):
            # A server may close an idle connection while the next request is on its way, and every client library
            # sends it again on a fresh one (RFC 9112, 9.3.1). On a fresh one there is no excuse.
            client.close()
            if not reused:
                raise
            with self._lock:
                self.stale += 1
            return self._once(client)

    def _once(self, client: http.client.HTTPConnection) -> list[str]:
        client.request("GET", "/", headers={} if self._keep_alive else {"Connection": "close"})
        response = client.getresponse()
        text = response.read().decode()
        assert 200 == response.status, text
        if not self._keep_alive:
            client.close()
        return text.split(" ")


@contextlib.contextmanager
def running(folder: Path, *args: str, **options: Any) -> Iterator[Server]:
    """A server that answers."""
    with Server(folder, *args, **options) as server:
        server.up()
        yield server
