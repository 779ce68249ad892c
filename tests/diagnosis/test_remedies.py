"""Remedies that are really tried: in fresh processes, with the same inputs, against doing nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from modelguard.diagnosis import GrowthReport, Trial, diagnose

LEAKS = Path(__file__).parent / "corpus" / "leaks"

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

APP = """
from modelguard import guard
class Model:
    def __init__(self):
        self.seen = []
    def __call__(self, text):
        self.seen.append(text * 1000)
service = guard(Model, reload_on=None)
@service
def predict(model, text):
    model(text)
def plain(model, text):
    model(text)
@service
async def slowly(model, text):
    model(text)
kept = Model()
def lazily(text):
    yield kept(text)
async def streams(text):
    yield kept(text)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "texts.jsonl").write_text('"a text of some words"\n"another one, of more words"')
    return tmp_path


def trials(report: GrowthReport) -> dict[str, Trial]:
    assert report.trials is not None, report
    return {one.name: one for one in report.trials.tried}


def growth(report: GrowthReport) -> float:
    assert report.trials is not None
    assert report.trials.nothing is not None
    return report.trials.nothing.growth.median


@pytest.mark.parametrize(("target", "load"), [("predict", None), ("slowly", None), ("plain", "app:Model")])
def test_what_a_model_keeps_goes_with_the_model(folder: Path, target: str, load: str | None) -> None:
    """A reload and worker processes stop it, for guarded functions, coroutines, and functions whose model is named."""
    inputs = str(folder / "texts.jsonl")
    report = diagnose(f"app:{target}", inputs=inputs, calls=1500, seconds=60, trial_seconds=2, load=load, cwd=folder)
    tried = trials(report)
    for name in ("reload_on", "isolate"):
        assert "" == tried[name].stopped
        assert tried[name].growth.median < 0.5 * growth(report)
    assert report.trials is not None
    assert report.trials.recommended in tried
    assert report.trials.contains


@pytest.mark.parametrize("name", ["lazily", "streams"])
def test_streams_are_tried_in_workers(folder: Path, name: str) -> None:
    """A generator runs in the worker, whose calls succeed: it is not refused as a result that cannot be sent."""
    inputs = str(folder / "texts.jsonl")
    report = diagnose(f"app:{name}", inputs=inputs, calls=1500, seconds=60, trial_seconds=2, cwd=folder)
    assert "failed" not in trials(report)["isolate"].stopped


def test_what_the_allocator_retains_goes_with_its_process() -> None:
    """Fresh processes stop it, and so do other allocators where there are any; one of them is recommended."""
    report = diagnose(
        "fragmented_heap:predict", generate="fragmented_heap:inputs", calls=600, seconds=60, trial_seconds=1, cwd=LEAKS
    )
    tried = trials(report)
    assert {"low-memory", "trim_every", "isolate"} <= tried.keys()
    assert tried["isolate"].growth.median < 0.5 * growth(report)
    assert report.trials is not None
    assert report.trials.recommended in tried
    assert not report.trials.contains


def test_zones_stop_the_strings_of_spacy() -> None:
    """Each call gets a memory zone in each pipeline of the process."""
    if importlib.util.find_spec("spacy") is None:
        pytest.skip("spacy is not installed")
    report = diagnose(
        "spacy_vocabulary:predict",
        generate="spacy_vocabulary:inputs",
        calls=5000,
        seconds=60,
        trial_seconds=1,
        cwd=LEAKS,
    )
    assert trials(report)["zoned"].growth.median < 0.5 * growth(report)


def test_buckets_where_they_are_declared() -> None:
    """The named parameter is padded, so the function gets few lengths."""
    pytest.importorskip("torch")
    report = diagnose(
        "onednn_shapes:predict",
        generate="onednn_shapes:inputs",
        calls=480,
        seconds=60,
        trial_seconds=3,
        bucketed=["x"],
        cwd=LEAKS,
    )
    assert trials(report)["bucketed"].growth.median < 0.5 * growth(report)
