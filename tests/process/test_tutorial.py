"""The tutorial, followed literally: its files are written and its commands are run, in the order of the page."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from modelguard import sharing

for needed in ("fastapi", "gunicorn", "spacy", "uvicorn"):
    pytest.importorskip(needed, reason="the tutorial's service needs it")
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"^(?:<!-- file: (?P<file>\S+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SERVER = re.compile(r"(^|-- |\n  )(uvicorn|gunicorn) ")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="forked workers"),
]


class Step(NamedTuple):
    """What the page asks its reader to do.

    Attributes:
        file: The name of the file to write, None for a command.
        text: The file's contents, or the command.
    """

    file: str | None
    text: str


def steps() -> list[Step]:
    """Read the page; what it installs is installed here already."""
    found = [Step(match["file"], match["text"]) for match in BLOCK.finditer(TUTORIAL.read_text(encoding="utf-8"))]
    return [step for step in found if "pip install" not in step.text]


class Reader:
    """Follows the tutorial in a folder of its own, on a free port."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.log = folder / "log"
        self.server: subprocess.Popen[bytes] | None = None
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "MODELGUARD_RUNTIME_DIR": str(folder),
            "UVICORN_PORT": str(self.port),
            "GUNICORN_CMD_ARGS": f"--bind 127.0.0.1:{self.port}",
        }

    def do(self, step: Step) -> str:
        """Write a file, start a server in place of the one before, or run a command and give its output."""
        text = step.text.replace("localhost:8000", f"127.0.0.1:{self.port}")
        if step.file is not None:
            (self.folder / step.file).write_text(text, encoding="utf-8")
            return ""
        if SERVER.search(text):
            self.stop()
            self.start(text)
            return ""
        if self.server is not None:  # other servers of this machine may have the same name
            text = re.sub(r'"\$\(pgrep [^"]*\)"', str(self.server.pid), text)
        done = subprocess.run(
            ["sh", "-c", text], cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or "doctor" in text, f"{text}{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, command: str) -> None:
        """Start a server and wait until it answers."""
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        workers = 4 if "-w 4" in command else 0
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.server.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                self.get("/openapi.json")
                if len(psutil.Process(self.server.pid).children()) == workers:
                    return
            time.sleep(0.1)
        pytest.fail(f"it did not come up:\n{self.log.read_text()}")

    def stop(self) -> None:
        """End the server, if there is one."""
        if self.server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)
            self.server.wait(10)
            self.server = None

    def get(self, path: str) -> Any:
        """Give the JSON of an answer with status 200."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(client):
            client.request("GET", path)
            answer = client.getresponse()
            body = answer.read()
            assert 200 == answer.status, body
            return json.loads(body)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    """Follow the tutorial; whatever server is left in the end is stopped."""
    found = Reader(tmp_path)
    try:
        yield found
    finally:
        found.stop()


def test_a_reader_who_follows_the_tutorial_gets_what_it_promises(reader: Reader) -> None:
    """Every file and command works as shown; four workers share one model in the end, and no request is lost."""
    said: dict[str, list[str]] = {}
    for step in steps():
        output = reader.do(step)
        if step.file is None:
            said.setdefault(step.text.split("\n")[0].split(" --")[0], []).append(output)
    unguarded, guarded = (int(output.removesuffix(" MB\n")) for output in said["python grow.py"])
    assert guarded < unguarded / 2
    (reload,) = said["python reload.py"]
    assert "generation 2 is ready" in reload
    assert "generation 1 released" in reload
    (asked,) = said["curl -X POST 'localhost:8000/words?text=Four%20parts,%20one%20service.'"]
    assert ["Four", "parts", ",", "one", "service", "."] == json.loads(asked)
    assert "Examined: process" in said["modelguard doctor"][0]
    assert "gunicorn app:app" in said["modelguard top"][0]
    assert '{"status": "ready"}' in said["curl -i localhost:8000/readyz"][0]
    answers, hurried, _ = said["python crowd.py"][0].splitlines()
    assert "Counter({200: 400})" == answers
    assert hurried in {"503", "504"}

    assert reader.server is not None
    status = reader.get("/status")
    assert (1, "ready") == (status["model"]["generation"], status["model"]["state"])
    assert 4 == len(psutil.Process(reader.server.pid).children())
    assert 3 > sharing.report(reader.server.pid).copies  # five processes that do not share hold about five
    environment = Path(f"/proc/{reader.server.pid}/environ").read_bytes().split(b"\0")
    assert b"TOKENIZERS_PARALLELISM=false" in environment  # the preset was there from the start


def test_the_files_of_the_tutorial_pass_a_strict_type_checker(tmp_path: Path) -> None:
    """A reader whose project uses `mypy --strict` can paste every file."""
    pytest.importorskip("mypy", reason="the checkers are installed beside the main interpreter only")
    files = [step for step in steps() if step.file is not None]
    for number, step in enumerate(files):
        last = step.file not in {later.file for later in files[number + 1 :]}
        (tmp_path / (str(step.file) if last else f"before_{number}_{step.file}")).write_text(step.text)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", *sorted(os.listdir(tmp_path))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
