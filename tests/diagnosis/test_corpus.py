"""Each program of the corpus leaks in one known way or two, or not at all, and the diagnosis says so."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from tests.diagnosis.programs import Outcome, Program, diagnosed, programs

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
]

Record = Callable[[str, object], None]

LEAKS, HEALTHY = programs("leaks"), programs("healthy")


def named(program: Program) -> str:
    return program.name


def outcome_of(program: Program, record: Record) -> Outcome:
    if program.slow:
        pytest.skip("it takes long: benchmarks/diagnosis_corpus.py runs it")
    if program.missing:
        pytest.skip(f"{', '.join(program.missing)} is not installed")
    _, outcome = diagnosed(program)
    record("confusion", (program.name, " and ".join(program.causes) or "none", f"{outcome.verdict}: {outcome.said}"))
    return outcome


@pytest.mark.parametrize("program", LEAKS, ids=named)
def test_a_leak_is_named(program: Program, record_property: Record) -> None:
    """The known causes are named and explain most of the growth; and so is what holds it, or the line."""
    outcome = outcome_of(program, record_property)
    assert outcome.cause, outcome
    if not outcome.place and program.open:
        pytest.xfail(program.open)
    assert outcome.place, outcome


@pytest.mark.parametrize("program", HEALTHY, ids=named)
def test_what_only_looks_like_a_leak_is_not_accused(program: Program, record_property: Record) -> None:
    """It is steady."""
    outcome = outcome_of(program, record_property)
    assert outcome.cause, outcome


def test_the_size_of_the_corpus() -> None:
    """42 leaks and 26 healthy functions, all of different names."""
    assert (42, 26) == (len(LEAKS), len(HEALTHY))
    assert 68 == len({program.name for program in LEAKS + HEALTHY})
