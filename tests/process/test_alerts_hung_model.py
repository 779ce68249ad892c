"""The shipped alerts, evaluated by Prometheus's own promtool over scrapes of a model that serves, and hangs."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from tests.unit.serving.gated import Gated, until

from modelguard import Breaker, Execution, batched, telemetry
from modelguard.errors import Overloaded
from modelguard.serving import _batcher

client: Any = pytest.importorskip("prometheus_client", reason="needs prometheus-client")

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs" / "grafana" / "alerts.yaml"
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=ROOT / "build")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(PROMTOOL is None, reason="needs promtool of Prometheus, on the path or in build/"),
]

#: Requests in a simulated minute.
REQUESTS = 20
#: What is counted once for each request.
COUNTED = {
    "modelguard_batch_size_sum",
    "modelguard_requests_refused_total",
    "modelguard_requests_expired_total",
}
FIRING = 'count by (alertname) (ALERTS{alertstate="firing", function="predict"})'


class Service:
    """A batched function whose metrics are scraped once a simulated minute."""

    def __init__(self, model: Gated, registry: Any, **options: Any) -> None:
        self.f = batched(max_size=1, max_queue=4, name="predict", **options)(model)
        self._registry = registry
        self._minutes = 0
        self._series: dict[str, list[str]] = {}

    def serve(self, minutes: int, *, together: bool = False) -> None:
        """In each minute send requests, wait until the metrics know how they ended, and scrape."""
        for _ in range(minutes):
            sent: list[Any] = []
            for number in range(REQUESTS):
                with contextlib.suppress(Overloaded):
                    sent.append(self.f.submit(number))
                    if not together:
                        sent[-1].exception()
            if together and self.f.limits.deadline < math.inf:
                futures.wait(sent)
            until(lambda: self._ended() == sum(one.value for one in self._samples() if one.name in COUNTED))
            for sample in self._samples():
                self._keep(sample)
            self._minutes += 1

    def hang(self) -> None:
        """Fill the queue behind a batch that does not end."""
        self.f.submit(0)
        until(lambda: self.f.status().running == 1)
        for number in range(4):
            self.f.submit(number)

    def _ended(self) -> int:
        status = self.f.status()
        refused = status.refused_full + status.refused_late + status.refused_open
        return status.answered + status.failed + refused + status.expired

    def _samples(self) -> Iterator[Any]:
        for family in self._registry.collect():
            yield from (one for one in family.samples if not one.name.endswith("_created"))

    def _keep(self, sample: Any) -> None:
        labels = ",".join(f"{name}={json.dumps(value)}" for name, value in {**sample.labels, "instance": "i"}.items())
        values = self._series.setdefault(f"{sample.name}{{{labels}}}", ["_"] * self._minutes)
        values.append(str(sample.value).replace("inf", "Inf"))

    def firing(self, folder: Path) -> set[str]:
        """The alerts that fire at the last scrape."""
        names = [name for name in _rules() if not self._differs(folder, name)]
        assert not self._differs(folder, *names), "no other alert fires"
        return set(names)

    def _differs(self, folder: Path, *firing: str) -> bool:
        """Whether promtool finds other alerts of the function than these; of one alone: whether that does not fire."""
        only = f', alertname="{firing[0]}"' if len(firing) == 1 else ""
        test = {
            "expr": FIRING.replace('"predict"', f'"predict"{only}'),
            "eval_time": f"{self._minutes - 1}m",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing],
        }
        series = [{"series": name, "values": " ".join(values)} for name, values in self._series.items()]
        tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [test]}]
        file = folder / "test.yaml"
        file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
        done = subprocess.run(
            [str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
        )
        told = done.stdout + done.stderr
        assert ("SUCCESS" in told) != ("got:" in told), told
        return "got:" in told


def _rules() -> list[str]:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML to read the alert rules")
    (group,) = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule["alert"] for rule in group["rules"]]


@pytest.fixture
def model() -> Gated:
    return Gated()


@pytest.fixture
def start(model: Gated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Service]]:
    """Makes a service, which ends with the test. A simulated minute is too short for one report a second."""
    from modelguard.telemetry.prometheus import prometheus

    monkeypatch.setattr(_batcher, "_REPORT_INTERVAL", 0.0)
    registry = client.CollectorRegistry()
    remove = telemetry.add_hook(prometheus(registry))
    started: list[Service] = []

    def make(**options: Any) -> Service:
        started.append(Service(model, registry, **options))
        return started[-1]

    yield make
    model.gate.set()
    for one in started:
        one.f.close()
    remove()


def test_a_model_that_serves_alerts_nobody(model: Gated, start: Callable[..., Service], tmp_path: Path) -> None:
    """For an hour of normal traffic."""
    model.gate.set()
    service = start()
    service.serve(60)
    assert set() == service.firing(tmp_path)


@pytest.mark.parametrize("served", [0, 30])
def test_a_model_that_hangs_alerts(model: Gated, start: Callable[..., Service], tmp_path: Path, served: int) -> None:
    """At its first batch or after half an hour: that it hangs at once, and that requests get no answer soon."""
    service = start(deadline="200ms", execution=Execution(hang_after="100ms"))
    if served:
        model.gate.set()
        service.serve(served)
        model.gate.clear()
    service.serve(2, together=True)
    assert {"ModelguardModelHangs"} == service.firing(tmp_path)
    service.serve(18, together=True)
    firing = service.firing(tmp_path)
    assert "ModelguardModelHangs" in firing
    assert firing & {"ModelguardRequestsExpire", "ModelguardRequestsRefused"}, "the latter where times were measured"


@pytest.mark.parametrize("served", [0, 30])
def test_a_model_that_hangs_without_a_deadline_alerts(
    model: Gated, start: Callable[..., Service], tmp_path: Path, served: int
) -> None:
    """Its queue is full, and every request is refused."""
    service = start()
    if served:
        model.gate.set()
        service.serve(served)
        model.gate.clear()
    service.hang()
    service.serve(20, together=True)
    assert {"ModelguardRequestsRefused"} == service.firing(tmp_path)


def test_a_model_that_hangs_opens_the_circuit_and_alerts(
    model: Gated, start: Callable[..., Service], tmp_path: Path
) -> None:
    """Nothing waits for the model any more, and the alert says so."""
    breaker = Breaker(failures=3, cooldown="1h", max_cooldown="1h")
    service = start(deadline="200ms", execution=Execution(hang_after="100ms"), breaker=breaker)
    service.serve(20, together=True)
    assert {"ModelguardModelHangs", "ModelguardCircuitOpen", "ModelguardRequestsRefused"} <= service.firing(tmp_path)
