"""Real web servers on loopback with a batched function behind them, and clients that ask and hang up."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import pytest
from tests.process.gunicorn_server import free_port, until

NEEDED = ("flask", "gunicorn", "h11", "starlette", "uvicorn")

#: The mark of those who need a real web server.
NEEDS_SERVERS = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in NEEDED), reason=f"needs {', '.join(NEEDED)}"
)

#: What a batch takes in seconds, how many items it has, and how many wait at most.
TAKES, SIZE, QUEUE = 0.1, 4, 40

#: The model writes down what it computes, and waits as long as there is a file `hold`.
MODEL = f"""
    import os, time
    from pathlib import Path
    from modelguard import batched, guard
    from modelguard.errors import ModelGuardError

    HERE = Path(__file__).parent

    @batched(max_size={SIZE}, max_queue={QUEUE}, name="predict")
    def predict(items):
        with (HERE / "computed").open("a") as log:
            log.writelines(f"{{item}}\\n" for item in items)
        while (HERE / "hold").exists():
            time.sleep(0.01)
        time.sleep({TAKES})
        return [f"{{item}} {{os.getpid()}}" for item in items]

    def tell():
        status = predict.status()
        return {{"running": status.running, "waiting": status.waiting, "cancelled": status.cancelled}}
"""

UVICORN = ("-m", "uvicorn", "app:app", "--loop", "asyncio", "--http", "h11", "--port", "PORT")
GUNICORN = ("-m", "gunicorn", "app:app", "-b", "127.0.0.1:PORT", "--no-control-socket")


class Answer:
    """What a client was told."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.text = response.read().decode()

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    def is_problem(self, status: int) -> bool:
        """Whether it is all that a refusal should be, and no more."""
        return (
            (self.status, self.headers["content-type"], self.headers["cache-control"])
            == (status, "application/problem+json", "no-store")
            and {"type", "title", "status", "detail"} == set(self.json)
            and "predict" not in self.text
            and (status == 503) == ("retry-after" in self.headers)
            and int(self.headers.get("retry-after", 1)) >= 1
        )


class Server:
    """A web server in a process of its own, with its log in a file."""

    def __init__(self, folder: Path, *command: str, app: str, **environ: str) -> None:
        self.folder = folder
        self.port = free_port()
        self._hold = folder / "hold"
        (folder / "app.py").write_text(textwrap.dedent(app))
        (folder / "computed").touch()
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [sys.executable, *(part.replace("PORT", str(self.port)) for part in command)],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._clients = ThreadPoolExecutor(64)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def computed(self) -> list[str]:
        """What the model has seen, or sees."""
        return (self.folder / "computed").read_text().split()

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(client):
            client.request(method, path, headers=headers or {})
            return Answer(client.getresponse())

    def begin(self, path: str, **request: Any) -> Future[Answer]:
        """Ask, and do not wait."""
        return self._clients.submit(self.ask, path, **request)

    def connect(self, path: str, method: str = "GET") -> socket.socket:
        """Ask, and keep the connection, to hang it up."""
        line = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        body = b"text" if method == "POST" else b""
        head = f"{method} {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        return line

    def seen(self, **expected: int) -> None:
        """Wait until the queue is as it should be."""

        def so() -> bool:
            status = self.ask("/status").json
            return all(status[name] == number for name, number in expected.items())

        until(so, seconds=20, what=f"{expected}; log: {self.log}")

    @contextlib.contextmanager
    def busy(self, path: str) -> Iterator[Future[Answer]]:
        """Inside, the model is at one item, and will not end; what comes waits."""
        self._hold.touch()
        try:
            first = self.begin(f"{path}?item=first")
            until(lambda: self.computed == ["first"], seconds=20, what="the model is at it")
            yield first
        finally:
            self._hold.unlink()

    def up(self) -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self.ask("/livez").status == 200
            return False

        until(answers, what="it answers")

    def end(self) -> int:
        """Ask it to end, and wait."""
        self.process.terminate()
        return self.process.wait(30)

    def __enter__(self) -> Self:
        try:
            self.up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._hold.unlink(missing_ok=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self._clients.shutdown()
        self._log.close()


def gunicorn(folder: Path, *options: str, app: str, **environ: str) -> Server:
    return Server(folder, *GUNICORN, *options, app=app, **environ)


def burst(server: Server, path: str, clients: int) -> Counter[int]:
    """All at once; what is refused is refused as promised."""
    answers = [server.begin(f"{path}?item=burst-{n}") for n in range(clients)]
    told = Counter[int]()
    for n, asked in enumerate(answers):
        answer = asked.result(30)
        told[answer.status] += 1
        assert answer.text.startswith(f"burst-{n} ") if answer.status == 200 else answer.is_problem(answer.status)
    return told
