"""gunicorn's dirty workers, the peer of isolated functions inside a web server, without the web server.

``python benchmarks/_isolation_peers.py SOCKET APP WORKERS`` runs an arbiter on a socket, as gunicorn's own does beside
its workers, until it gets SIGTERM.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ECHO, SPACY = "_isolation_dirty:Echo", "_isolation_dirty:Entities"
#: Seconds for the arbiter and its workers to start; one loads ja_ginza.
_START = 60.0


def has_dirty_workers() -> bool:
    """Whether there is a gunicorn that has them."""
    found = importlib.util.find_spec("gunicorn")
    return found is not None and importlib.util.find_spec("gunicorn.dirty") is not None


@contextmanager
def arbiter(app: str, workers: int) -> Iterator[str]:
    """Run an arbiter; its socket."""
    with tempfile.TemporaryDirectory() as folder:
        socket = str(Path(folder, "arbiter.sock"))
        command = [sys.executable, __file__, socket, app, str(workers)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                _wait_for(socket, process)
                yield socket
            finally:
                process.terminate()


def _wait_for(socket: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START
    while not Path(socket).exists():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError("the dirty arbiter did not start")
        time.sleep(0.05)


def caller(socket: str, app: str) -> Callable[[Any], Any]:
    """A function that runs in a dirty worker, over one connection for each thread that calls it."""
    from gunicorn.dirty.client import DirtyClient

    of_thread = threading.local()

    def call(value: Any) -> Any:
        if not hasattr(of_thread, "client"):
            of_thread.client = DirtyClient(socket, timeout=_START)
        return of_thread.client.execute(app, "call", value)

    return call


@contextmanager
def echo() -> Iterator[Callable[[Any], Any]]:
    """Send a value to a dirty worker and back. Its protocol knows no arrays, so they cross as bytes."""
    import numpy as np

    with arbiter(ECHO, 1) as socket:
        call = caller(socket, ECHO)

        def there_and_back(value: Any) -> Any:
            if not isinstance(value, np.ndarray):
                return call(value)
            return np.frombuffer(call(value.tobytes()), value.dtype).reshape(value.shape)

        there_and_back("")
        yield there_and_back


def main(socket: str, app: str, workers: str) -> None:
    from gunicorn.config import Config
    from gunicorn.dirty import DirtyArbiter
    from gunicorn.glogging import Logger

    config = Config()
    for name, value in {"dirty_apps": [app], "dirty_workers": int(workers), "dirty_timeout": 60}.items():
        config.set(name, value)
    made = DirtyArbiter(config, Logger(config), socket)
    made.ppid = os.getppid()  # gunicorn makes it in the parent, and forks
    made.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
