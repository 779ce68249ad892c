"""Each program of the corpus leaks in one known way or two, or not at all, and the diagnosis says so."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from modelguard.diagnosis import GrowthReport, diagnose

CORPUS = Path(__file__).with_name("corpus")

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

#: The function, the generator of its inputs, its causes with the largest first, and the library that it needs.
LEAKS = [
    ("python_leaks:cached", "texts", ["unbounded cache"], None),
    ("python_leaks:cached_method", "texts", ["unbounded cache"], None),
    ("python_leaks:dictionary", "texts", ["python objects"], None),
    ("python_leaks:appended", "texts", ["python objects"], None),
    ("python_leaks:arrays", "texts", ["python objects"], None),
    ("python_leaks:handlers", "texts", ["python objects"], None),
    ("python_leaks:callbacks", "texts", ["python objects"], None),
    ("python_leaks:generators", "texts", ["python objects"], None),
    ("python_leaks:finalizers", "texts", ["python objects"], None),
    ("python_leaks:context_values", "texts", ["python objects"], None),
    ("python_leaks:cycles", "texts", ["cycles"], None),
    ("python_leaks:classes", "texts", ["cycles"], None),
    ("python_leaks:failing", "texts", ["tracebacks"], None),
    ("python_leaks:finished_tasks", "texts", ["tasks"], None),
    ("python_leaks:queued", "texts", ["queues"], None),
    ("python_leaks:threads", "texts", ["threads"], None),
    ("python_leaks:contexts", "texts", ["ssl contexts"], None),
    ("python_leaks:mapped", "texts", ["mappings"], None),
    ("python_leaks:cache_and_contexts", "texts", ["ssl contexts", "unbounded cache"], None),
    ("native_leaks:unfreed", "numbers", ["native memory"], None),
    ("native_leaks:retained", "numbers", ["retention"], None),
    ("torch_leaks:shapes", "lengths", ["onednn plans"], "torch"),
    ("torch_leaks:graphs", "lengths", ["autograd"], "torch"),
    ("library_leaks:strings", "words", ["spacy strings"], "spacy"),
    ("library_leaks:labels", "words", ["metric labels"], "prometheus_client"),
    ("library_leaks:clients", "words", ["ssl contexts"], "httpx"),
    ("library_leaks:tokens", "words", ["tokenizer caches"], "tokenizers"),
    ("library_leaks:arena", "rows", ["onnx runtime"], "onnxruntime"),
    ("held_leaks:embeddings", "texts", ["python objects"], "transformers"),
    ("held_leaks:past_keys", "texts", ["python objects"], "transformers"),
    ("held_leaks:hooked", "texts", ["python objects"], "transformers"),
    ("held_leaks:failing", "texts", ["tracebacks"], "transformers"),
    ("held_leaks:native_by_text", "texts", ["native memory"], "transformers"),
]

CLEAN = [
    ("clean:sawtooth", "texts"),
    ("clean:warm_up", "texts"),
    ("clean:page_cache", "texts"),
    ("clean:growing_batch", "batches"),
    ("clean:full_cache", "texts"),
    ("clean:forked", "texts"),
]

#: Calls for each. Enough for growth that is clear of noise, whatever the time that they take.
_CALLS = {
    "python_leaks:threads": 1000,
    "python_leaks:contexts": 300,
    "python_leaks:mapped": 2000,
    "python_leaks:cache_and_contexts": 20_000,
    "native_leaks:retained": 600,
    "torch_leaks:shapes": 480,
    "torch_leaks:graphs": 3000,
    "library_leaks:strings": 5000,
    "library_leaks:labels": 60_000,
    "library_leaks:clients": 300,
    "library_leaks:tokens": 2000,
    "library_leaks:arena": 1200,
    "held_leaks:embeddings": 3000,
    "held_leaks:past_keys": 3000,
    "held_leaks:hooked": 3000,
    "held_leaks:failing": 3000,
    "held_leaks:native_by_text": 3000,
    "clean:sawtooth": 25_000,
    "clean:growing_batch": 2000,
    "clean:forked": 600,
}
_MOST = 6000

#: Seconds. A third of the longest time that a program may take; it is never reached on a machine that does its work.
_PATIENCE = 80.0

Record = Callable[[str, object], None]


def examined(target: str, inputs: str, record: Record, expected: str) -> GrowthReport:
    """The report on a program. By calls and not by time, so that a busy machine changes nothing."""
    generate = f"{target.partition(':')[0]}:{inputs}"
    report = diagnose(
        target, generate=generate, calls=_CALLS.get(target, _MOST), seconds=_PATIENCE, cwd=CORPUS, silence=250
    )
    named = " ".join(f"{cause.name} {cause.share:.0%}," for cause in report.causes)
    record("confusion", (target, expected, f"{report.verdict}: {named} {report.unexplained:.0%} unexplained"))
    return report


@pytest.mark.parametrize(("target", "inputs", "causes", "library"), LEAKS, ids=str)
def test_a_leak_is_named(
    target: str, inputs: str, causes: list[str], library: str | None, record_property: Record
) -> None:
    """The known causes explain the growth, and nothing but the allocator is accused beside them."""
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    report = examined(target, inputs, record_property, " and ".join(causes))
    assert "grows" == report.verdict, report
    shares = {cause.name: cause.share for cause in report.causes}
    assert set(causes) <= shares.keys() <= {*causes, "retention", "cycles"}, report
    assert sum(shares[name] for name in causes) >= 0.4, report  # type: ignore[index]
    assert report.unexplained < 0.3


@pytest.mark.parametrize(("target", "inputs"), CLEAN)
def test_what_only_looks_like_a_leak_is_not_accused(target: str, inputs: str, record_property: Record) -> None:
    """It is steady."""
    report = examined(target, inputs, record_property, "none")
    assert ("steady", ()) == (report.verdict, report.causes), report
