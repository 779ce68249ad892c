"""Each program of the corpus leaks in one known way or two, or not at all, and the diagnosis says so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from modelguard.diagnosis import diagnose

CORPUS = Path(__file__).with_name("corpus")

pytestmark = [
    pytest.mark.timeout(300),
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
]

CLEAN = [
    ("clean:sawtooth", "texts"),
    ("clean:warm_up", "texts"),
    ("clean:page_cache", "texts"),
    ("clean:growing_batch", "batches"),
    ("clean:full_cache", "texts"),
    ("clean:forked", "texts"),
]

#: Functions whose single calls take long, and those whose growth is slow.
_SLOW = {"clean:forked": 14, "torch_leaks:shapes": 12, "library_leaks:strings": 14}


def seconds(target: str) -> float:
    return _SLOW.get(target, 7)


@pytest.mark.parametrize(("target", "inputs", "causes", "library"), LEAKS, ids=str)
def test_a_leak_is_named(target: str, inputs: str, causes: list[str], library: str | None) -> None:
    """The main causes are the known ones, they explain most of the growth, and little is left unexplained."""
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    generate = f"{target.partition(':')[0]}:{inputs}"
    report = diagnose(target, generate=generate, seconds=seconds(target), cwd=CORPUS)
    assert "grows" == report.verdict, report
    shares = {cause.name: cause.share for cause in report.causes}
    assert set(causes) <= shares.keys(), report
    assert sum(shares[name] for name in causes) >= 0.4, report  # type: ignore[index]
    assert report.unexplained < 0.3


@pytest.mark.parametrize(("target", "inputs"), CLEAN)
def test_what_only_looks_like_a_leak_is_not_accused(target: str, inputs: str) -> None:
    """It is steady."""
    generate = f"{target.partition(':')[0]}:{inputs}"
    report = diagnose(target, generate=generate, seconds=seconds(target), cwd=CORPUS)
    assert ("steady", ()) == (report.verdict, report.causes), report
