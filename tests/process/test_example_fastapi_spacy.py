"""The example runs as its README says, under uvicorn."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Server

FOLDER = Path(__file__).parents[2] / "examples" / "fastapi_spacy"
NEEDED = ("spacy", "ja_ginza", "fastapi", "uvicorn")
SENTENCE = "山田太郎は銀座でランチを食べた。"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the example needs {', '.join(NEEDED)}",
    ),
]


@contextlib.contextmanager
def serving(app: str) -> Iterator[Server]:
    """One of the example's services under uvicorn."""
    with Server(FOLDER, "-m", "uvicorn", app, "--port", "0") as server:
        server.wait_until_serving("/openapi.json")
        yield server


def ask(server: Server, path: str, text: str) -> Any:
    """Send a text, and give the answer."""
    return server.ask(path, json.dumps({"text": text}), headers={"Content-Type": "application/json"}).json


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """The guarded service."""
    with serving("app:app") as server:
        yield server


def test_answers_are_plain_strings(guarded: Server) -> None:
    """Entities and tokens come back as lists of strings."""
    assert ["山田太郎", "銀座"] == ask(guarded, "/entities", SENTENCE)
    assert SENTENCE == "".join(ask(guarded, "/tokens", SENTENCE))


def test_status_tells_of_the_guard(guarded: Server) -> None:
    """The guard's status is a page of the service, and no request finds the model unloaded."""
    ask(guarded, "/tokens", SENTENCE)
    status = guarded.ask("/status").json
    assert ("ja_ginza", "ready", 1) == (status["name"], status["state"], status["generation"])
    assert status["uses"] >= 1


def test_many_at_once(guarded: Server) -> None:
    """Requests that come together are all answered, and alike."""
    with ThreadPoolExecutor(16) as many:
        answers = set(map(tuple, many.map(lambda _: ask(guarded, "/tokens", SENTENCE * 20), range(64))))
    assert 1 == len(answers)


@pytest.mark.parametrize("app", ["unguarded:app", "isolated:app"])
def test_another_way_is_the_same_service(guarded: Server, app: str) -> None:
    """Unguarded or isolated, it gives the same answers."""
    with serving(app) as other:
        for path in ("/entities", "/tokens"):
            assert ask(guarded, path, SENTENCE) == ask(other, path, SENTENCE)


def test_ends_in_order() -> None:
    """SIGTERM closes the guard and stops the service, without an error in the log."""
    with serving("app:app") as server:
        server.stop()
    assert "Application shutdown complete" in server.log
    assert "ERROR" not in server.log, server.log
    assert "Traceback" not in server.log, server.log
