"""The example runs as its README says, and its guarded service holds one copy of the model."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "gunicorn_flask"
NEEDED = ("jieba", "flask", "gunicorn")
WORKERS = 3

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="memory that is shared is read from /proc"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the example needs {', '.join(NEEDED)}",
    ),
]


@pytest.fixture(scope="module")
def drive() -> ModuleType:
    """The example's own driver."""
    spec = importlib.util.spec_from_file_location("drive", FOLDER / "drive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def texts(drive: ModuleType) -> list[str]:
    """What is sent: 30,000 words, so that workers read all over the model."""
    made: list[str] = drive.texts("jieba", 300)
    return made


@pytest.fixture(scope="module")
def naive(drive: ModuleType, texts: list[str]) -> Iterator[Any]:
    """The service as it was first written, after all texts and a collection."""
    with drive.serving("naive", workers=WORKERS) as service:
        service.answers = service.send(texts)
        service.reach_all("", "/collect")
        yield service


@pytest.fixture(scope="module")
def guarded(drive: ModuleType, texts: list[str]) -> Iterator[Any]:
    """The guarded service, after all texts and a collection."""
    with drive.serving("guarded", workers=WORKERS) as service:
        service.answers = service.send(texts)
        service.reach_all("", "/collect")
        yield service


def test_both_say_the_same(texts: list[str], naive: Any, guarded: Any) -> None:
    """The guard changes nothing about the answers, and every worker gives them."""
    assert [answer["words"] for answer in naive.answers] == [answer["words"] for answer in guarded.answers]
    assert texts == ["".join(answer["words"]) for answer in guarded.answers]


def test_the_guarded_tree_holds_one_copy(naive: Any, guarded: Any) -> None:
    """Each naive worker has the model for itself; guarded ones have little of their own, the more so from 3.12 on."""
    separate, shared = naive.holds(), guarded.holds()
    assert WORKERS + 1 == len(separate.processes) == len(shared.processes)
    assert 2 < separate.copies, separate
    assert shared.pss < separate.pss * 0.7, (separate, shared)
    if sys.version_info >= (3, 12):
        assert shared.copies < 1.7, shared


def test_top_shows_the_tree(guarded: Any) -> None:
    """``modelguard top`` has a line for each process, and says how many copies all hold."""
    pids = {str(process.pid) for process in guarded.holds().processes}
    lines = guarded.top().splitlines()
    assert pids == {line.split()[0] for line in lines if line} & pids
    assert any(f"{1 + WORKERS} processes hold" in line for line in lines), lines


def test_status_tells_of_the_guard(guarded: Any) -> None:
    """The guard's own account is a page of the service: a worker serves what the parent has loaded."""
    with urllib.request.urlopen(f"http://127.0.0.1:{guarded.port}/status", timeout=60) as response:
        status = json.load(response)
    assert ("words", "ready", 1, 0) == (status["name"], status["state"], status["generation"], status["reloads"])


def test_all_end_in_order(drive: ModuleType) -> None:
    """A request to end stops the service, without a complaint."""
    for way in drive.WAYS:
        with drive.serving(way, workers=1) as service:
            pass
        assert 0 == service.process.returncode, service.log
        assert "Traceback" not in "".join(service.log), service.log
