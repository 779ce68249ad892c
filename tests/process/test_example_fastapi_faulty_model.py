"""The example of a model that leaks, hangs and crashes: each fault costs one request, and nothing else fails."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from examples._driver import send_all
from examples.fastapi_faulty_model import drive

if TYPE_CHECKING:
    from examples._driver import Answer, Server

NEEDED = ("fastapi", "uvicorn")

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the example needs {', '.join(NEEDED)}",
    ),
]


@pytest.fixture(scope="module")
def service() -> Iterator[Server]:
    """The service."""
    with drive.serving() as server:
        yield server


def ended(service: Server, cause: str) -> int:
    """How many workers have ended so."""
    return int(service.ask("/status").json.get(f"workers {cause}", 0))


def test_each_fault_costs_its_own_request(service: Server) -> None:
    """Of hundreds of requests at the same time only the two whose text hangs or crashes the model fail, by name."""
    sent = drive.texts(600)

    def send(text: str) -> tuple[str, Answer]:
        return text, service.ask("/", text)

    answers = send_all(send, sent, 6)
    failed = {text.split()[0]: (one.status, one.json) for text, one in answers if one.status != 200}
    assert {"crash": (500, {"error": "WorkerCrashed"}), "hang": (504, {"error": "DeadlineExceeded"})} == failed
    assert 598 == sum(one.status == 200 for _, one in answers)


def test_what_leaked_comes_back(service: Server) -> None:
    """Workers that have grown are replaced, and no request notices it."""
    before = ended(service, "recycled")

    def replaced() -> bool:
        assert {200} == {one.status for one in send_all(lambda text: service.ask("/", text), ["a text"] * 200, 6)}
        return ended(service, "recycled") > before

    service.wait_until(replaced, "a worker was replaced")


@pytest.mark.skipif(shutil.which("wrk") is None, reason="the driver needs wrk")
def test_the_driver_counts_every_request(service: Server) -> None:
    """Its tally has a name for everything, so that nothing can fail unseen."""
    with drive.Watch(service) as watch:
        tally = drive.load(service, 3)
    assert tally["answered"]
    named = {"answered", "WorkerCrashed", "DeadlineExceeded", "lost", "sent crash", "sent hang"}
    assert set(tally) <= named, tally
    assert 0 == tally["lost"], tally
    lines = list(drive.report(Counter(tally), watch, service.ask("/status").json))
    assert any("answered" in line for line in lines)
