"""The public names of serving: where users import them from, their types, and pickling."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import typing
from typing import Any

import pytest

import modelguard
from modelguard import (
    AutoSize,
    Batched,
    BatchStatus,
    Breaker,
    Buffer,
    Execution,
    Fair,
    Weight,
    batched,
    deadline,
    serving,
)
from modelguard.serving import BatchedStream, Limits, Quantiles, Stream, left

HOMES = {
    **dict.fromkeys(
        (AutoSize, Batched, BatchStatus, Breaker, Buffer, Execution, Fair, Weight, batched, deadline), "modelguard"
    ),
    **dict.fromkeys((BatchedStream, Limits, Quantiles, Stream, left), "modelguard.serving"),
}

VALUES = [
    batched(max_size=4, name="f")(sorted).status(),
    Quantiles(p50=1.0, p90=2.0, p99=3.0, max=4.0),
    Breaker(failures=3, cooldown="5s", ignore=(ValueError,)),
    AutoSize(slo="100ms"),
    Buffer(parts=8, slow_after="5s"),
    Execution(loop="caller", hang_after="5m"),
    Fair(by=len, shares={"gold": 4}, quota=8),
    Weight(of=len, most=100, padded=True),
    Limits(name="f", max_size=4, max_queue=8),
]


@pytest.mark.parametrize(("public", "home"), HOMES.items(), ids=lambda value: getattr(value, "__name__", value))
def test_tracebacks_show_where_to_import_it(public: Any, home: str) -> None:
    """``__module__`` is the module that users import the name from, and the name is there."""
    assert home == public.__module__
    assert getattr(importlib.import_module(home), public.__name__) is public


def test_the_names_of_serving_are_these() -> None:
    """`modelguard.serving.__all__` is this list, no more and no less."""
    values = [
        "AutoSize",
        "BatchStatus",
        "Batched",
        "BatchedStream",
        "Breaker",
        "Buffer",
        "Execution",
        "Fair",
        "Limits",
        "Quantiles",
        "Stream",
        "Weight",
    ]
    assert [*values, "batched", "caller", "deadline", "left"] == serving.__all__


@pytest.mark.parametrize(
    "public", [*HOMES, Batched.aio, Batched.close, Batched.submit, BatchedStream.stream], ids=lambda one: one.__name__
)
def test_type_hints_can_be_resolved(public: Any) -> None:
    """`typing.get_type_hints` works, as frameworks use it."""
    typing.get_type_hints(public)


@pytest.mark.parametrize("kind", [AutoSize, BatchStatus, Breaker, Buffer, Execution, Fair, Limits, Quantiles, Weight])
def test_type_hints_of_values_name_every_field(kind: Any) -> None:
    """Each field of a public dataclass has a type, not text."""
    hints = typing.get_type_hints(kind)
    assert [*kind.__dataclass_fields__] == [*hints]
    assert [] == [hint for hint in hints.values() if isinstance(hint, str | typing.ForwardRef)]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_survive_pickling(value: Any) -> None:
    """A value crosses process borders whole."""
    assert value == pickle.loads(pickle.dumps(value))


def test_values_are_read_by_a_process_that_has_imported_nothing() -> None:
    """Unpickling finds the classes by their public names."""
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], input=pickle.dumps(VALUES), capture_output=True, check=False
    )
    assert (f"{VALUES}\n", "") == (done.stdout.decode(), done.stderr.decode())


@pytest.mark.parametrize("public", [Batched, BatchStatus, Breaker, batched, deadline], ids=lambda one: one.__name__)
def test_the_names_themselves_survive_pickling(public: Any) -> None:
    """Classes and functions are pickled by their public names."""
    dumped = pickle.dumps(public)
    assert b"modelguard.serving" not in dumped
    assert public is pickle.loads(dumped)
    assert public is getattr(modelguard, public.__name__)
