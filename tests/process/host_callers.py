"""Programs that share isolated functions with ``scope="host"``, driven line by line, and what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from tests.process.harness import wait_until

#: Its worker tells its own process id and its mold's. It does what it is told.
APP = """
    import json, logging, os, time
    from pathlib import Path
    from modelguard import Backoff, Bounds, Host, Loading, Idle, guard, isolate

    HERE = Path(__file__).parent

    def load():
        if (HERE / "fail").exists():
            raise OSError("no weights")
        with (HERE / "loads").open("a") as log:
            log.write(f"{os.getpid()}\\n")
        return [f"word {n}" for n in range(200_000)]

    model = guard(load, reload_on=None, loading=Loading(backoff=Backoff(0.05, 0.2)), wait_timeout="40s", name="words")

    @isolate(workers=2, timeout="20s", scope="host")
    @model
    def predict(words, do="", value=None):
        if do == "sleep":
            time.sleep(value)
        elif do == "exit":
            os._exit(3)
        elif do == "raise":
            raise KeyError(value)
        elif do == "log":
            logging.getLogger("app").warning("seen %s", value)
        elif do == "echo":
            return value
        return [os.getpid(), os.getppid()]

    @isolate(workers=1, timeout="20s", scope="host", bounds=Bounds(queue=2))
    @model
    def narrow(words, seconds=0.0):
        time.sleep(seconds)
        return [os.getpid(), os.getppid()]

    @isolate(workers=1, timeout="20s", scope="host")
    @model
    def numbers(words, count):
        for number in range(count):
            yield number
"""

_PROGRAM = """
import asyncio, json, logging, os, sys, threading, time
from collections import Counter
sys.path.insert(0, sys.argv[1])
import app
from modelguard import deadline

class Load:
    def __init__(self, threads, call):
        self.tally, self.longest, self.stop, self.answers = Counter(), 0.0, threading.Event(), []
        self.threads = [threading.Thread(target=self.run, args=(call,)) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def run(self, call):
        while not self.stop.is_set():
            started = time.monotonic()
            try:
                answer = call()
            except Exception as error:
                self.tally[type(error).__name__] += 1
                self.last = repr(error)
            else:
                self.tally["answered"] += 1
            self.longest = max(self.longest, time.monotonic() - started)

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()
        return dict(self.tally), self.longest

names = {"app": app, "asyncio": asyncio, "deadline": deadline, "Load": Load}
names |= {"os": os, "time": time, "threading": threading}
logging.basicConfig(stream=sys.stderr)
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        answer = ["ok", names.pop("result", None)]
    except BaseException as error:
        answer = [type(error).__name__, str(error)]
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
"""


class CallFailed(Exception):
    """A statement has raised in the program; ``args`` are the error's type and text."""


class Caller:
    """A program that has imported ``app`` from a folder, and runs statements.

    Args:
        folder: Where ``app.py`` is, and the brokers meet.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.errors = (folder / f"errors-{os.urandom(4).hex()}").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=folder,
            env={**os.environ, "MODELGUARD_RUNTIME_DIR": str(folder / "run"), **environment},
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def begin(self, statements: str) -> None:
        """Run statements, and do not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(statements)) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        """What the statements have assigned to ``result``."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.text()
        kind, value = json.loads(line)
        if kind != "ok":
            raise CallFailed(kind, value)
        return value

    def run(self, statements: str) -> Any:
        """Run statements, and wait for the result."""
        self.begin(statements)
        return self.result()

    def call(self, arguments: str = "", function: str = "predict") -> Any:
        """Call a function of the app."""
        return self.run(f"result = app.{function}({arguments})")

    def status(self, name: str, function: str = "predict") -> Any:
        """A field of the function's status."""
        return self.run(f"result = app.{function}.status().{name}")

    def text(self) -> str:
        """What it has written to stderr."""
        return Path(self.errors.name).read_text()  # not from this file, whose position the program writes at

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]


def write(folder: Path, code: str = APP) -> Path:
    """Write the app."""
    (folder / "app.py").write_text(textwrap.dedent(code))
    return folder


def family(folder: Path, role: str = "") -> list[psutil.Process]:
    """The brokers, molds and workers that meet in a folder; ``role``: only the ``"broker"`` or the ``"mold"``."""
    mark = f"MODELGUARD_RUNTIME_DIR={folder / 'run'}"
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            command = process.cmdline()
            if "modelguard.isolation" not in " ".join(command) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if mark in Path(f"/proc/{process.pid}/environ").read_text().split("\0") and (not role or role in command):
                found.append(process)
    return found


def molds(folder: Path) -> list[psutil.Process]:
    """The molds: workers have their command line, and a mold for a parent."""
    return molds_and_workers(folder)[0]


def molds_and_workers(folder: Path) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Both, as they are in one moment: a mold that has just begun is no worker."""
    found = family(folder, "mold")
    pids = {one.pid for one in found}
    living: tuple[list[psutil.Process], list[psutil.Process]] = [], []
    for one in found:
        with suppress(psutil.NoSuchProcess):  # it has ended since it was found
            living[one.ppid() in pids].append(one)
    return living


def sockets(folder: Path) -> list[str]:
    """What lies in the folder where the brokers meet."""
    return sorted(one.name for one in (folder / "run").iterdir() if one.name != "reload.lock")


def end_all(folder: Path) -> None:
    """Wait until nothing is left that meets in a folder: brokers without clients are asked not to linger."""

    def ended() -> bool:
        for broker in family(folder, "broker"):
            with suppress(psutil.NoSuchProcess):
                broker.terminate()
        return not family(folder)

    wait_until(ended, "the end of all brokers, molds and workers", 40.0)


def nothing_left(folder: Path) -> bool:
    """Whether no process and no socket is left."""
    return not family(folder) and not sockets(folder)
