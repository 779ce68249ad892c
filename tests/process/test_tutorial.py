"""The tutorial's last service, started by the command that stands below it.

The snippets in between run with those of all pages, in ``tests/contract/test_docs.py``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelguard import sharing

for needed in ("fastapi", "gunicorn", "spacy"):
    pytest.importorskip(needed, reason="the tutorial's service needs it")
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.timeout(180)


def last_service() -> tuple[str, list[str]]:
    """Find the last snippet that makes a whole service, and the command that follows it."""
    blocks = FENCE.findall(TUTORIAL.read_text(encoding="utf-8"))
    place = max(at for at, (language, text) in enumerate(blocks) if language == "python" and "app = FastAPI(" in text)
    language, command = blocks[place + 1]
    assert "sh" == language
    here = {"modelguard": [sys.executable, "-m", "modelguard"], "gunicorn": [sys.executable, "-m", "gunicorn"]}
    return blocks[place][1], [
        part for word in shlex.split(command.replace("\\\n", " ")) for part in here.get(word, [word])
    ]


class Running:
    """The service in a session of its own."""

    def __init__(self, folder: Path) -> None:
        code, command = last_service()
        (folder / "app.py").write_text(code, encoding="utf-8")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "-b", f"127.0.0.1:{self.port}"],
                cwd=folder,
                env={**os.environ, "MODELGUARD_RUNTIME_DIR": str(folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask(self, method: str, path: str) -> Any:
        """Give the JSON of an answer that is well."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(client):
            client.request(method, path)
            answer = client.getresponse()
            body = answer.read()
            assert 200 == answer.status, body
            return json.loads(body) if answer.getheader("Content-Type") == "application/json" else body

    def up(self) -> None:
        """Wait until the service answers and all of its workers are there."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                self.ask("GET", "/readyz")
                if self.log.read_text().count("Booting worker") >= 4:
                    return
            time.sleep(0.1)
        pytest.fail(f"it did not come up:\n{self.log.read_text()}")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    """Start the service; its log is part of the failure if it does not come up."""
    running = Running(tmp_path)
    try:
        running.up()
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(10)


@pytest.mark.skipif(sys.platform != "linux", reason="forked workers")
def test_the_service_of_the_tutorial_serves_with_all_four_guards(service: Running) -> None:
    """Whoever follows the tutorial to its end has four workers on the parent's model, and one answer for each text."""
    query = urllib.parse.urlencode({"text": "Four guards, one service."})
    for _ in range(20):
        assert ["Four", "guards", ",", "one", "service", "."] == service.ask("POST", f"/words?{query}")
    status = service.ask("GET", "/status")
    assert (1, "ready") == (status["model"]["generation"], status["model"]["state"])
    assert 32 >= status["queue"]["batch_size"]["max"] >= 1
    assert 4 == len(psutil.Process(service.process.pid).children())
    assert 3 > sharing.report(service.process.pid).copies  # five processes that do not share hold about five
    environment = Path(f"/proc/{service.process.pid}/environ").read_bytes().split(b"\0")
    assert b"TOKENIZERS_PARALLELISM=false" in environment  # the preset was there from the start
