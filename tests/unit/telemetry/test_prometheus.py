"""The Prometheus hook in one process, on registries of the tests' own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.lifecycle.world import until
from tests.unit.telemetry.every_event import EVERY, MB

from modelguard import Loaded, batched, guard, telemetry
from modelguard.errors import InvalidOption, NotSupported
from modelguard.telemetry._metrics import METRICS
from modelguard.telemetry.prometheus import prometheus

client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")


@pytest.fixture
def registry() -> Any:
    """A registry for this test alone."""
    return client.CollectorRegistry()


@pytest.fixture
def told(registry: Any) -> Any:
    """The registry after one event of each kind."""
    hook = prometheus(registry)
    for event in EVERY:
        hook(event)
    return registry


GUARD, FUNCTION = {"guard": "nlp"}, {"function": "predict"}


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("loads_started_total", {**GUARD, "host_lock": "timed_out"}, 1),
        ("load_reasons_total", {**GUARD, "reason": "first_use"}, 1),
        ("load_reasons_total", {**GUARD, "reason": "ttl"}, 1),
        ("load_deferred_seconds_total", GUARD, 1.5),
        ("loads_total", {**GUARD, "swap": "first"}, 1),
        ("loads_total", {**GUARD, "swap": "drain_first"}, 1),
        ("loads_total", {**GUARD, "swap": "load_first"}, 0),
        ("load_failures_total", GUARD, 1),
        ("loads_discarded_total", GUARD, 1),
        ("load_duration_seconds_sum", GUARD, 5),
        ("load_duration_seconds_count", GUARD, 2),
        ("load_duration_seconds_bucket", {**GUARD, "le": "2.5"}, 1),
        ("load_stall_seconds_sum", GUARD, 0.75),
        ("load_outage_seconds_total", GUARD, 4),
        ("load_last_success_timestamp_seconds", GUARD, 2000),
        ("load_failing", GUARD, 0),
        ("generation", GUARD, 2),
        ("model_size_bytes", GUARD, 120 * MB),
        ("allocator_in_use_bytes", GUARD, 150 * MB),
        ("allocator_held_bytes", GUARD, 190 * MB),
        ("reloads_due_total", {**GUARD, "reason": "ttl"}, 1),
        ("reloads_due_total", {**GUARD, "reason": "uses"}, 1),
        ("recycles_asked_total", {**GUARD, "reason": "memory_growth"}, 1),
        ("swaps_chosen_total", {**GUARD, "swap": "drain_first"}, 1),
        ("policies_ignored_total", GUARD, 1),
        ("callback_errors_total", GUARD, 1),
        ("growth_found_total", {"service": "service"}, 1),
        ("releases_total", {**GUARD, "outcome": "alive"}, 1),
        ("releases_total", {**GUARD, "outcome": "gone"}, 0),
        ("release_freed_bytes_total", GUARD, 100 * MB),
        ("workers_freed_bytes_total", GUARD, 180 * MB),
        ("release_duration_seconds_sum", GUARD, 0.1),
        ("drain_duration_seconds_sum", GUARD, 0.2),
        ("unload_errors_total", GUARD, 1),
        ("generations_abandoned_total", GUARD, 1),
        ("trims_total", GUARD, 1),
        ("trim_freed_bytes_total", GUARD, 30 * MB),
        ("trim_duration_seconds_sum", GUARD, 0.01),
        ("batch_size_sum", FUNCTION, 8),
        ("batch_size_count", FUNCTION, 1),
        ("batch_wait_seconds_sum", FUNCTION, 0.02),
        ("batch_run_seconds_sum", FUNCTION, 0.1),
        ("batch_max_size", FUNCTION, 16),
        ("slo_unreachable", FUNCTION, 0),
        ("batches_failed_total", FUNCTION, 1),
        ("batches_bisected_total", FUNCTION, 1),
        ("batch_reruns_total", FUNCTION, 6),
        ("items_failed_total", FUNCTION, 2),
        ("requests_refused_total", {**FUNCTION, "reason": "full"}, 1),
        ("requests_refused_total", {**FUNCTION, "reason": "late"}, 2),
        ("requests_refused_total", {**FUNCTION, "reason": "circuit_open"}, 3),
        ("requests_expired_total", FUNCTION, 4),
        ("requests_cancelled_total", FUNCTION, 5),
        ("queue_depth", FUNCTION, 7),
        ("circuit_open", FUNCTION, 0),
        ("circuit_openings_total", FUNCTION, 1),
    ],
)
def test_events_become_numbers(told: Any, name: str, labels: dict[str, str], expected: float) -> None:
    """Each figure of an event is found under its name, in seconds and bytes."""
    assert expected == told.get_sample_value(f"modelguard_{name}", labels)


def test_there_is_nothing_else(told: Any) -> None:
    """The names that are exposed are those of the table, so docs and dashboards can be checked against it."""
    expected = {metric.prometheus_name.removesuffix("_total") for metric in METRICS.values()}
    assert expected == {family.name for family in told.collect()}


def test_what_grew_meanwhile_is_no_negative_count(registry: Any) -> None:
    """A release after which the process holds more adds nothing, since a counter never falls."""
    hook = prometheus(registry)
    hook(
        telemetry.MemoryTrimmed(
            guard="nlp", bytes_before=1, bytes_after=2, trimmed_by="glibc", trim_error=None, seconds=0.0
        )
    )
    assert 0 == registry.get_sample_value("modelguard_trim_freed_bytes_total", GUARD)


def test_an_idle_guard_shows_until_its_next_load_or_close(registry: Any) -> None:
    """The gauge is one while the model is released until its next use, and zero before and after, if that fails too."""
    hook = prometheus(registry)
    seen = []
    unloaded, closed = telemetry.UnloadStarted(guard="nlp", generation=1, reasons=()), telemetry.IdleEnded(guard="nlp")
    failed = telemetry.LoadErrored(guard="nlp", attempt=1, error="no", retry_after=1.0, current=None)
    for event in (EVERY[1], unloaded, EVERY[1], unloaded, closed, unloaded, failed):
        hook(event)
        seen.append(registry.get_sample_value("modelguard_idle", GUARD))
    assert [0, 1, 0, 1, 0, 1, 0] == seen


def test_workers_that_are_released_stay_idle_when_another_model_fails(registry: Any) -> None:
    """An isolated function whose mold keeps the old model starts its workers from that at the next call."""
    hook = prometheus(registry)
    hook(next(event for event in EVERY if isinstance(event, telemetry.WorkersReleased)))
    hook(telemetry.LoadErrored(guard="nlp", attempt=1, error="no", retry_after=1.0, current=1))
    assert 1 == registry.get_sample_value("modelguard_idle", GUARD)


def test_an_allocator_without_figures_has_no_gauge(registry: Any) -> None:
    """Nothing is written for a figure that the allocator does not report: zero would be a figure too."""
    hook = prometheus(registry)
    hook(
        telemetry.MemoryTrimmed(
            guard="nlp", bytes_before=2, bytes_after=1, trimmed_by=None, trim_error="no", seconds=0.0, held=5
        )
    )
    figures = [registry.get_sample_value(f"modelguard_allocator_{name}_bytes", GUARD) for name in ("in_use", "held")]
    assert [None, 5] == figures


def test_a_failing_guard_shows_until_it_has_loaded(registry: Any) -> None:
    """The gauge counts failures in a row, for an alert that stays as long as the trouble does."""
    hook = prometheus(registry)
    hook(telemetry.LoadErrored(guard="nlp", attempt=2, error="no", retry_after=1.0, current=None))
    assert 2 == registry.get_sample_value("modelguard_load_failing", GUARD)
    assert 0 == registry.get_sample_value("modelguard_generation", GUARD), "none serves"
    hook(telemetry.RolledBack(guard="nlp", generation=1, version=None, replaced=2, replaced_version=None))
    assert 0 == registry.get_sample_value("modelguard_load_failing", GUARD), "nothing is tried again"
    hook(telemetry.LoadErrored(guard="nlp", attempt=1, error="no", retry_after=1.0, current=1))
    hook(EVERY[1])
    assert 0 == registry.get_sample_value("modelguard_load_failing", GUARD)
    assert 1 == registry.get_sample_value("modelguard_generation", GUARD)


def test_a_real_guard_and_a_real_batch_are_counted(registry: Any) -> None:
    """Added once as a hook, it sees what guards and batched functions do."""
    remove = telemetry.add_hook(prometheus(registry=registry))
    try:
        model = guard(lambda: {"a": 1}, reload_on=None, name="counted")
        model.load()
        model.reload()

        @batched(max_size=4)
        def lengths(texts: list[str]) -> list[int]:
            return [len(text) for text in texts]

        assert 3 == lengths("tea")
        lengths.close()
        model.close()
    finally:
        remove()
    assert 1 == registry.get_sample_value("modelguard_loads_total", {"guard": "counted", "swap": "first"})
    assert 2 == registry.get_sample_value("modelguard_generation", {"guard": "counted"})
    requested = {"guard": "counted", "reason": "requested"}
    assert 1 == registry.get_sample_value("modelguard_load_reasons_total", requested)
    told = {
        sample.labels["function"]
        for family in registry.collect()
        if family.name == "modelguard_batch_size"
        for sample in family.samples
    }
    assert 1 == sum(registry.get_sample_value("modelguard_batch_size_sum", {"function": name}) for name in told)


def test_registering_twice_is_refused(registry: Any) -> None:
    """A second hook on one registry would count everything twice: it is rejected, and the first one works on."""
    hook = prometheus(registry)
    with pytest.raises(
        InvalidOption, match=r"registry=.*already has metrics of these names.*Make one hook for a registry"
    ):
        prometheus(registry)
    hook(EVERY[1])
    assert 1 == registry.get_sample_value("modelguard_loads_total", {**GUARD, "swap": "first"})


def test_a_registry_where_a_name_is_taken_is_left_as_it_was(registry: Any) -> None:
    """Half of the metrics would be worse than none: what was registered before the clash is taken out again."""
    taken = client.Gauge("modelguard_queue_depth", "Somebody else's.", registry=registry)
    with pytest.raises(InvalidOption, match="modelguard_queue_depth"):
        prometheus(registry)
    assert ["modelguard_queue_depth"] == [family.name for family in registry.collect()]
    registry.unregister(taken)
    prometheus(registry)


@pytest.mark.parametrize("wrong", [True, "default", object])
def test_an_invalid_registry_is_rejected(wrong: object) -> None:
    """The error comes when the hook is made, not at the first event."""
    with pytest.raises(InvalidOption, match=r"registry=.*must be a CollectorRegistry"):
        prometheus(wrong)  # type: ignore[arg-type]


def test_the_default_registry_is_prometheus_clients_own(monkeypatch: pytest.MonkeyPatch, registry: Any) -> None:
    """Without an argument the metrics are where prometheus_client's own exposition finds them."""
    monkeypatch.setattr(client, "REGISTRY", registry)
    prometheus()(EVERY[1])
    assert 2 == registry.get_sample_value("modelguard_load_duration_seconds_sum", GUARD)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without prometheus-client, the error says what to install."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(NotSupported, match=r"pip install 'modelguard-lifecycle\[prometheus\]'"):
        prometheus()


def test_the_folder_has_to_be_set_before_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A variable that comes too late would give a scrape without any metric: it is rejected."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    with pytest.raises(InvalidOption, match="set after prometheus_client had been imported"):
        prometheus(client.CollectorRegistry())


SEVERAL = """
import sys
from prometheus_client import CollectorRegistry
from modelguard.errors import InvalidOption
from modelguard.telemetry.prometheus import prometheus

def told(registry):
    try:
        return prometheus(registry)
    except InvalidOption as error:
        print(error)

first = told(CollectorRegistry())
second = told(CollectorRegistry())
del first
third = told(CollectorRegistry())
print(third)
"""


def _run(folder: Path) -> list[str]:
    environ = {"PYTHONPATH": ":".join(sys.path), "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", SEVERAL], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_one_hook_writes_a_processs_files(tmp_path: Path) -> None:
    """In multiprocess mode a second hook would overwrite the first one's values: refused while the first lives."""
    second, third = _run(tmp_path)
    assert "would overwrite the first one's files" in second
    assert f"<Prometheus hook: {len(METRICS)} metrics>" == third


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Without the folder no event could be written, so making the hook fails, with the fix."""
    said = _run(tmp_path / "missing")
    assert "is not a folder that this process can write to. Make an empty folder" in said[0]


def test_only_the_current_version_is_exposed(registry: Any) -> None:
    """Each reload with a new version replaces the series, and a release removes it."""
    version = 0

    def load() -> Loaded[dict[str, int]]:
        nonlocal version
        version += 1
        return Loaded({}, version=f"v{version}")

    remove = telemetry.add_hook(prometheus(registry))
    try:
        model = guard(load, reload_on=None, name="nlp")
        model.load()
        for _ in range(5):
            model.reload()
        until(lambda: versions(registry) == ["v6"])  # events may come after what they report
        model.unload()
        until(lambda: versions(registry) == [])
        model.close()
    finally:
        remove()


def versions(registry: Any) -> list[str]:
    """The versions that are exposed as current."""
    return [
        sample.labels["version"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "modelguard_model_info" and sample.value == 1
    ]
