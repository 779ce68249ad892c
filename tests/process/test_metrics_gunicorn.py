"""Prometheus' multiprocess mode under a real gunicorn: one scrape covers all workers, recycled ones included."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.contract.test_docs import snippets
from tests.process.gunicorn_server import Gunicorn, running
from tests.process.harness import wait_until

pytest.importorskip("gunicorn")
pytest.importorskip("prometheus_client", reason="needs prometheus-client")

from prometheus_client.parser import text_string_to_metric_families

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"

APP = """
    import os, time
    from endpoint import metrics
    from modelguard import Errors, Uses, batched, guard, telemetry
    from modelguard.telemetry.prometheus import prometheus

    telemetry.add_hook(prometheus())
    nlp = guard(dict, reload_on=POLICY, name="nlp")

    @batched(max_size=4, name="predict")
    def predict(items):
        return [item.upper() for item in items]

    @nlp
    def answer(model, path):
        if path == "/fail":
            raise ValueError("asked for")
        predict(path)
        return f"{os.getpid()} 1 True True"

    def app(environ, start_response):
        status = "200 OK"
        if environ["PATH_INFO"] == "/metrics":
            body = metrics()
        else:
            try:
                body = answer(environ["PATH_INFO"]).encode()
            except ValueError as error:
                body, status = str(error).encode(), "500 Asked For"
        start_response(status, [("Content-Length", str(len(body)))])
        return [body]
"""

pytestmark = pytest.mark.timeout(120)


def snippet(word: str) -> str:
    """The one snippet of docs/metrics.md, among those that its page cannot run, in which this word is defined."""
    (found,) = (
        "\n".join(each.code)
        for each in snippets(PAGE.read_text(encoding="utf-8"))
        if each.reason is not None and f"def {word}(" in "\n".join(each.code)
    )
    return found


def read(scrape: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
    }


def samples(server: Gunicorn) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """One scrape, through whichever worker answers it."""
    return read(server.ask("/metrics").text)


def value(server: Gunicorn, name: str, **labels: str) -> float | None:
    return samples(server).get((f"modelguard_{name}", frozenset(labels.items())))


def told(server: Gunicorn, name: str, **labels: str) -> float:
    """What a scrape says; -1 if it failed: a file was renamed since the folder was listed, or is being made."""
    with contextlib.suppress(RemoteDisconnected):  # what gunicorn does after an OSError
        answer = server.ask("/metrics")
        if answer.status == 200:
            return read(answer.text).get((name, frozenset(labels.items())), 0.0)
    return -1.0


def asked(server: Gunicorn, path: str, times: int) -> set[int]:
    """Ask so often, and give the workers that answered."""
    return {int(server.words(path)[0]) for _ in range(times)}


@contextlib.contextmanager
def serving(folder: Path, policy: str, app: str = APP) -> Iterator[Gunicorn]:
    """Two workers; configuration and endpoint are those of the documentation."""
    metrics = folder / "metrics"
    metrics.mkdir()
    (folder / "gunicorn.conf.py").write_text(snippet("child_exit"))
    (folder / "endpoint.py").write_text(snippet("metrics"))
    options: dict[str, Any] = {"app": app, "policy": policy, "PROMETHEUS_MULTIPROC_DIR": str(metrics)}
    with running(folder, "-c", "gunicorn.conf.py", "-w", "2", **options) as server:
        yield server


def live_files(folder: Path) -> set[int]:
    """The processes whose gauges are exported."""
    return {int(file.stem.rpartition("_")[2]) for file in (folder / "metrics").glob("gauge_live*.db")}


def test_one_scrape_tells_of_all_workers(tmp_path: Path) -> None:
    """Whichever worker answers, the figures are the sum over both, and the load is the master's one."""
    with serving(tmp_path, "None") as server:
        # An item is counted after it is answered: the one with which the server showed that it is up as well. A worker
        # that begins makes files meanwhile.
        first = "modelguard_batch_size_sum"
        wait_until(lambda: told(server, first, function="predict") > 0, what="the first item is counted")
        before = value(server, "batch_size_sum", function="predict") or 0.0
        workers: set[int] = set()
        sent = 0

        def both() -> bool:
            nonlocal sent
            workers.update(asked(server, "/", 10))
            sent += 10
            return len(workers) == 2

        wait_until(both, what="both workers have answered")
        wait_until(
            lambda: value(server, "batch_size_sum", function="predict") == before + sent, what="each item is counted"
        )
        scrapes = [samples(server) for _ in range(4)]
        assert [scrapes[0]] * 4 == scrapes, "every scrape is the same, whoever answers it"
        assert 1 == value(server, "loads_total", guard="nlp", swap="first")
        assert 1 == value(server, "generation", guard="nlp"), "a gauge of the master's, not a sum"
        assert 0 == value(server, "queue_depth", function="predict")
        assert not any(label == "pid" for _, labels in scrapes[0] for label, _ in labels)


def test_a_recycled_workers_counts_stay_and_its_gauges_go(tmp_path: Path) -> None:
    """What it computed is still in the sums; what its gauges last said is not, as mark_process_dead was called."""
    with serving(tmp_path, "Errors(3)") as server:
        asked(server, "/", 20)
        counted = value(server, "batch_size_sum", function="predict") or 0.0
        old = server.children()

        def recycled() -> bool:
            server.ask("/fail")
            return bool(value(server, "recycles_asked_total", guard="nlp", reason="errors"))

        wait_until(recycled, what="a worker asks for its end")
        wait_until(lambda: server.replaced() >= 1 and len(server.children() - old) >= 1, what="it is replaced")
        wait_until(lambda: len(server.children()) == 2, what="the old one is gone")
        wait_until(
            lambda: live_files(tmp_path) <= {server.process.pid, *server.children()},
            what="the files of the dead one's gauges are gone",
        )
        gone = next(iter(old - server.children()))
        assert not psutil.pid_exists(gone)
        wait_until(
            lambda: (value(server, "batch_size_sum", function="predict") or 0.0) >= max(counted, 20.0),
            what="its counts are still there",
        )
        assert 1 == value(server, "loads_total", guard="nlp", swap="first"), "nobody loaded again"


def test_files_do_not_grow_with_every_worker(tmp_path: Path) -> None:
    """After six replacements there are those of the master, two workers and one more; no count is lost."""
    with serving(tmp_path, "Errors(2)") as server:
        counted = 0.0
        for replaced in range(1, 7):
            asked(server, "/", 10)
            counted += 10

            def recycled(expected: int = replaced) -> bool:
                server.ask("/fail")
                return server.replaced() >= expected

            wait_until(recycled, what="a worker is replaced")
            wait_until(lambda: len(server.children()) == 2, what="the old one is gone")
        wait_until(
            lambda: told(server, "modelguard_batch_size_sum", function="predict") >= counted,
            what="all counts are there",
        )
        wait_until(lambda: len(list((tmp_path / "metrics").glob("counter_*.db"))) <= 4, what="files are taken over")
        histograms = list((tmp_path / "metrics").glob("histogram_*.db"))
        assert len(histograms) <= 4


COUNTING = """
    from prometheus_client import Counter, Gauge
    from modelguard import TTL

    LOADED = Counter("loaded", "Loads.")
    SERVING = Gauge("serving", "Models.", multiprocess_mode="livesum")

    def load():
        LOADED.inc()
        SERVING.set(1)
        return {}
""" + APP.replace("guard(dict,", "guard(load,").replace(
    "predict(path)", "predict(path) if path != '/reload' else nlp.reload(wait=False)"
)


def test_what_a_loader_counts_stays_and_its_gauges_go(tmp_path: Path) -> None:
    """A mold has ended with its model: one serves, and six were loaded; files do not grow with every mold."""
    with serving(tmp_path, 'TTL("1d")', COUNTING) as server:
        for loads in range(2, 7):
            server.ask("/reload")
            wait_until(
                lambda loads=loads: told(server, "modelguard_generation", guard="nlp") == loads, what="it is replaced"
            )
            wait_until(lambda: told(server, "serving") == 1, what="the gauge of the mold before has gone with it")
        wait_until(lambda: told(server, "loaded_total") == 6, what="all loads are counted")
        wait_until(
            lambda: len(list((tmp_path / "metrics").glob("counter_*.db"))) <= 6,
            what="there are the files of the master, two molds, two workers and one more",
        )
