"""Which numbers the events give, before any library writes them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.telemetry.every_event import EVERY

from modelguard import (
    TTL,
    Errors,
    GpuMemoryGrowth,
    GpuMemoryLimit,
    MemoryGrowth,
    MemoryLimit,
    Modified,
    Policy,
    Snapshot,
    Uses,
)
from modelguard.adapters.spacy import IndexGrowth
from modelguard.telemetry import Event, _metrics
from modelguard.telemetry._metrics import METRICS, REASONS, Metric, Recorder, amounts_of


class _Own(Policy):
    def due(self, now: Snapshot) -> bool:
        return True

    def __repr__(self) -> str:
        return "_Own()"


def test_every_event_counts() -> None:
    """No kind of event is left out, so a new one has to be given a metric."""
    assert set(Event.__subclasses__()) == {type(event) for event in EVERY if [*amounts_of(event)]}


def test_every_metric_is_measured_by_some_event() -> None:
    """A metric that nothing ever writes would look like a service without troubles."""
    told = set[str]()
    recorder = Recorder(lambda metric, _labels, _amount: told.add(metric.name))
    for event in EVERY:
        recorder(event)
    assert set(METRICS) == told


def test_labels_have_the_values_that_they_were_given() -> None:
    """The second label's value is one of a fixed few, and is there where the metric has such a label."""
    for event in EVERY:
        for measure in amounts_of(event):
            assert measure.value in (measure.metric.values or (None,)), (event, measure)


@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_names_keep_prometheus_rules(metric: Metric) -> None:
    """Small letters, base units at the end, ``_total`` on counters alone, and a sentence of help."""
    name = metric.prometheus_name
    assert re.fullmatch(r"modelguard(_[a-z]+)+", name)
    assert ("counter" == metric.kind) == name.endswith("_total")
    assert not re.search(r"milliseconds|_ms\b|megabytes|_mb\b|_count$|_sum$|_bucket$", name)
    assert metric.only_current == name.endswith("_info")
    assert ("s" == metric.unit) == ("_seconds" in name)
    assert ("By" == metric.unit) == ("_bytes" in name)
    assert metric.help.endswith(".")
    assert ("histogram" == metric.kind) == bool(metric.buckets)
    assert sorted(metric.buckets) == list(metric.buckets)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (TTL("1h"), "ttl"),
        (Uses(50_000), "uses"),
        (Errors(consecutive=5), "errors"),
        (MemoryGrowth("500 MB"), "memory_growth"),
        (MemoryLimit("1 GB"), "memory_limit"),
        (GpuMemoryGrowth("1 GB"), "gpu_memory_growth"),
        (GpuMemoryLimit("80%"), "gpu_memory_limit"),
        (Modified("/tmp/a & b"), "modified"),
        (IndexGrowth("50 MB"), "index_growth"),
        (TTL("1h") & Uses(5), "combination"),
        ((TTL("1h") | Errors(3)) & Uses(5), "combination"),
        (_Own(), "custom"),
    ],
    ids=repr,
)
def test_policies_have_one_name_each(policy: Policy, expected: str) -> None:
    """Whatever a policy's figures and files, its reason is one word out of a fixed list."""
    assert expected == policy.kind
    assert expected in REASONS


def test_modules_of_metrics_stay_small() -> None:
    """What a metric costs is one line in the table; the hooks know none by name."""
    folder = Path(_metrics.__file__).parent
    for hook in ("prometheus.py", "opentelemetry.py"):
        text = (folder / hook).read_text(encoding="utf-8")
        assert [] == [name for name in METRICS if f'"{name}"' in text]
