"""Metric files of workers that have ended: a new worker goes on with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from modelguard.frameworks._workers import MetricFiles

pytest.importorskip("prometheus_client", reason="needs prometheus-client")


@pytest.fixture
def files(tmp_path: Path) -> MetricFiles:
    return MetricFiles({"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)})


def write(folder: Path, pid: int, *kinds: str) -> None:
    """The files of a worker, each with its name in it."""
    for kind in kinds or ("counter", "histogram", "gauge_livemax", "gauge_max"):
        (folder / f"{kind}_{pid}.db").write_text(f"{kind} of {pid}")


def take_over(files: MetricFiles, pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new worker does."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: pid)
        files.take_over()


def found(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_a_new_worker_goes_on_with_the_counts(
    files: MetricFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters and histograms change their owner; live gauges go, other gauges stay what they were."""
    write(tmp_path, 11)
    files.worker_ended(11)
    take_over(files, 12, monkeypatch)
    assert {
        "counter_12.db": "counter of 11",
        "histogram_12.db": "histogram of 11",
        "gauge_max_11.db": "gauge_max of 11",
    } == found(tmp_path)


def test_each_is_taken_once(files: MetricFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers that were forked with the same list do not overwrite each other's files."""
    for pid in (11, 12):
        write(tmp_path, pid, "counter")
        files.worker_ended(pid)
    for pid in (13, 14, 15):
        take_over(files, pid, monkeypatch)
    assert {"counter_13.db": "counter of 11", "counter_14.db": "counter of 12"} == found(tmp_path)


def test_there_are_never_more_sets_than_workers_at_a_time(
    files: MetricFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand replacements, each new worker beside the old one: two sets of files, and all counts are there."""
    write(tmp_path, 1, "counter", "histogram")
    for pid in range(2, 1000):
        files.worker_started(pid)
        take_over(files, pid, monkeypatch)
        if not (tmp_path / f"counter_{pid}.db").exists():
            write(tmp_path, pid, "counter", "histogram")
        files.worker_ended(pid - 1)
        assert len(list(tmp_path.iterdir())) <= 4
    assert {"counter of 1", "counter of 2"} == {text for name, text in found(tmp_path).items() if "counter" in name}


def test_a_worker_that_counts_already_takes_nothing(
    files: MetricFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its open files would be replaced under it."""
    write(tmp_path, 11, "counter")
    files.worker_ended(11)
    write(tmp_path, 12, "histogram")
    take_over(files, 12, monkeypatch)
    assert {"counter_11.db": "counter of 11", "histogram_12.db": "histogram of 12"} == found(tmp_path)


def test_a_process_id_that_is_used_again_keeps_its_files(
    files: MetricFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker with that id goes on with them, and no other takes them from it."""
    write(tmp_path, 11, "counter")
    files.worker_ended(11)
    files.worker_started(11)
    take_over(files, 12, monkeypatch)
    assert {"counter_11.db": "counter of 11"} == found(tmp_path)


@pytest.mark.parametrize("environment", [{}, {"PROMETHEUS_MULTIPROC_DIR": "/nowhere/at/all"}], ids=["unset", "gone"])
def test_without_a_folder_nothing_happens(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Services without metrics, and with a folder that was removed, serve all the same."""
    files: Any = MetricFiles(environment)
    files.worker_ended(11)
    take_over(files, 12, monkeypatch)
