"""The example runs as its README says, and its guarded service holds one copy of the model."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from examples.gunicorn_flask import drive

from modelguard import sharing

if TYPE_CHECKING:
    from examples._driver import Server

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
def texts() -> list[str]:
    """What is sent: 30,000 words, so that workers read all over the model."""
    made: list[str] = drive.texts("jieba", 300)
    return made


@dataclass
class Service:
    """A service after all texts and a collection in each worker."""

    server: Server
    answers: list[dict[str, Any]]

    def holds(self) -> sharing.TreeReport:
        """What gunicorn and its workers hold."""
        return sharing.report(self.server.process.pid)


@contextlib.contextmanager
def asked(way: str, texts: list[str]) -> Iterator[Service]:
    """A service that has seen all texts."""
    with drive.serving(way, workers=WORKERS) as server:
        answers = drive.send(server, texts)
        drive.reach_all(server, "", drive.COLLECT, workers=WORKERS)
        yield Service(server, answers)


@pytest.fixture(scope="module")
def naive(texts: list[str]) -> Iterator[Service]:
    """The service as it was first written."""
    with asked("naive", texts) as service:
        yield service


@pytest.fixture(scope="module")
def guarded(texts: list[str]) -> Iterator[Service]:
    """The guarded service."""
    with asked("guarded", texts) as service:
        yield service


def test_both_say_the_same(texts: list[str], naive: Service, guarded: Service) -> None:
    """The guard changes nothing about the answers, and every worker gives them."""
    assert [answer["words"] for answer in naive.answers] == [answer["words"] for answer in guarded.answers]
    assert texts == ["".join(answer["words"]) for answer in guarded.answers]


def test_the_guarded_tree_holds_one_copy(naive: Service, guarded: Service) -> None:
    """Each naive worker has the model for itself; guarded ones have little of their own, the more so from 3.12 on."""
    separate, shared = naive.holds(), guarded.holds()
    assert WORKERS + 1 == len(separate.processes) == len(shared.processes)
    assert 2 < separate.copies, separate
    assert shared.pss < separate.pss * 0.7, (separate, shared)
    if sys.version_info >= (3, 12):
        assert shared.copies < 1.7, shared


def test_top_shows_the_tree(guarded: Service) -> None:
    """``modelguard top`` has a line for each process, and says how many copies all hold."""
    pids = {str(process.pid) for process in guarded.holds().processes}
    lines = drive.top(guarded.server).splitlines()
    assert pids == {line.split()[0] for line in lines if line} & pids
    assert any(f"{1 + WORKERS} processes use" in line for line in lines), lines


def test_status_tells_of_the_guard(guarded: Service) -> None:
    """The guard's status is a page of the service: a worker serves what the parent has loaded."""
    status = guarded.server.ask("/status").json
    assert ("words", "ready", 1, 0) == (status["name"], status["state"], status["generation"], status["reloads"])


def test_all_end_in_order() -> None:
    """SIGTERM stops the service, without an error in the log."""
    for way in drive.COMMANDS:
        with drive.serving(way, workers=1) as server:
            pass
        assert 0 == server.process.returncode, server.log
        assert "Traceback" not in server.log, server.log
