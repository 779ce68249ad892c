"""The example runs as its README says, under uvicorn."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "fastapi_spacy"
NEEDED = ("spacy", "ja_ginza", "fastapi", "uvicorn")
SENTENCE = "山田太郎は銀座でランチを食べた。"
PORT = re.compile(r"Uvicorn running on http://127\.0\.0\.1:(\d+)")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the example needs {', '.join(NEEDED)}",
    ),
]


class Service:
    """One of the example's two services under uvicorn."""

    def __init__(self, app: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "uvicorn", app, "--port", "0"], cwd=FOLDER, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.log: list[str] = []
        for line in self.process.stderr:
            self.log.append(line)
            if found := PORT.search(line):
                self.url = f"http://127.0.0.1:{found[1]}"
                break
        else:
            pytest.fail("".join(self.log))
        # Read on, so that the service never waits for room in the pipe.
        self.reader = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        self.reader.start()

    def ask(self, path: str, text: str | None = None) -> Any:
        """Send a text, or ask for a page, and give the answer."""
        body = None if text is None else json.dumps({"text": text}).encode()
        request = urllib.request.Request(self.url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def stop(self) -> None:
        """Ask the service to end, and wait until it has."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self.reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()


@contextlib.contextmanager
def serving(app: str) -> Iterator[Service]:
    """A running service, ended afterwards."""
    service = Service(app)
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Service]:
    """The guarded service."""
    with serving("app:app") as service:
        yield service


def test_answers_are_plain_strings(guarded: Service) -> None:
    """Entities and tokens come back as lists of strings."""
    assert ["山田太郎", "銀座"] == guarded.ask("/entities", SENTENCE)
    assert SENTENCE == "".join(guarded.ask("/tokens", SENTENCE))


def test_status_tells_of_the_guard(guarded: Service) -> None:
    """The guard's own account is a page of the service, and no request finds the model unloaded."""
    guarded.ask("/tokens", SENTENCE)
    status = guarded.ask("/status")
    assert ("ja_ginza", "ready", 1) == (status["name"], status["state"], status["generation"])
    assert status["uses"] >= 1


def test_many_at_once(guarded: Service) -> None:
    """Requests that come together are all answered, and alike."""
    with ThreadPoolExecutor(16) as many:
        answers = set(map(tuple, many.map(lambda _: guarded.ask("/tokens", SENTENCE * 20), range(64))))
    assert 1 == len(answers)


def test_the_same_without_a_guard(guarded: Service) -> None:
    """The unguarded service is the same service: its answers are."""
    with serving("unguarded:app") as unguarded:
        for path in ("/entities", "/tokens"):
            assert guarded.ask(path, SENTENCE) == unguarded.ask(path, SENTENCE)


def test_ends_in_order() -> None:
    """A request to end closes the guard and stops the service, without a complaint."""
    with serving("app:app") as service:
        pass
    assert [] == [line for line in service.log if "ERROR" in line or "Traceback" in line]
