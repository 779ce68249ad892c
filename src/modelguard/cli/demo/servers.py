"""The two servers as processes: started, waited for, watched, and ended in any case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from http.client import HTTPConnection
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from modelguard.cli.demo import serve
from modelguard.cli.demo.failure import DemoFailed

#: Seconds for a server to import spaCy and load its first model. A cold disk takes a minute.
START_TIMEOUT = 180.0
#: Seconds from a polite request to end to an impolite one.
STOP_TIMEOUT = serve.GRACE + 5.0
#: Last lines of a dead server's standard error that are shown.
TAIL = 15

_LOOK = 0.1


class Server:
    """One service under uvicorn, in a process of its own. Use it in a ``with`` block, which ends the process.

    Args:
        name: What the report calls it.
        app: The application, as ``module:name``.
        folder: Where the module is.
        environment: Variables to set beside those of this process.
        on_event: Called in a thread of the server's own with each event that modelguard tells in that process.
    """

    def __init__(
        self,
        name: str,
        app: str,
        folder: Path,
        *,
        environment: Mapping[str, str],
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self.name = name
        self.port: int | None = None
        self._on_event = on_event
        self.last_lines: deque[str] = deque(maxlen=TAIL)
        self._process = subprocess.Popen(  # noqa: S603 - our own module under our own interpreter
            [sys.executable, "-m", serve.__name__, app, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # a Ctrl-C in the terminal is for the demo, which ends its servers itself
        )
        self._readers = [
            threading.Thread(target=self._read, args=(stream, take), daemon=True)
            for stream, take in ((self._process.stdout, self._take_report), (self._process.stderr, self._take_line))
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def connect(self, timeout: float) -> HTTPConnection:
        """A connection to the server, each of its operations bounded by ``timeout`` seconds."""
        return HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def wait_ready(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until the server answers: it does so once its model is loaded.

        Raises:
            DemoFailed: It died, or took longer than ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while not self._answers():
            self.check_alive()
            if time.monotonic() >= end:
                raise DemoFailed(f"The {self.name} server was not ready after {timeout:.0f} s.{self._tail()}")
            time.sleep(_LOOK)

    def check_alive(self) -> None:
        """Raise DemoFailed, with the last lines of its standard error, if the server has died."""
        status = self._process.poll()
        if status is not None:
            self._join_readers()
            raise DemoFailed(f"The {self.name} server died with status {status}.{self._tail()}")

    def stop(self) -> None:
        """End the server, by force if it does not end by itself in time."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._join_readers()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _answers(self) -> bool:
        if self.port is None:
            return False
        connection = self.connect(timeout=1.0)
        try:
            connection.request("GET", "/openapi.json")
            return connection.getresponse().status == 200  # noqa: PLR2004 - HTTP's OK
        except OSError:  # not listening yet
            return False
        finally:
            connection.close()

    def _read(self, stream: IO[str], take: Callable[[str], None]) -> None:
        for line in stream:
            take(line)

    def _take_report(self, line: str) -> None:
        try:
            report = json.loads(line)
            event = report.pop("event")
        except (ValueError, KeyError, AttributeError):  # something that the service itself has printed
            self._take_line(line)
            return
        if event == "Bound":
            self.port = report["port"]
        else:
            self._on_event({"event": event, **report})

    def _take_line(self, line: str) -> None:
        self.last_lines.append(line.rstrip())

    def _tail(self) -> str:
        return "".join(f"\n  {line}" for line in self.last_lines)

    def _join_readers(self) -> None:
        for reader in self._readers:
            reader.join(1.0)
