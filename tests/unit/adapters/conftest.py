"""A guarded spaCy pipeline for every test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelguard import ModelGuard, guard, telemetry
from modelguard.lifecycle.system import System, use
from modelguard.runtime.host_lock import HostLock


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """Guards reload only on request, wait for no other process, and log nothing."""
    telemetry.set_hooks([])
    made = System(ticks=False, host_lock=HostLock(lambda: tmp_path))
    with use(lambda: made):
        yield made
    telemetry.set_hooks(None)


@pytest.fixture(scope="session")
def english() -> Any:
    """Load one pipeline for all tests that do not look at what becomes of it."""
    return pytest.importorskip("spacy").blank("en")


@pytest.fixture
def nlp(system: System, english: Any) -> Iterator[ModelGuard[Any]]:
    """Guard that pipeline. Not closed: the proof that it is gone would be long, and wrong."""
    yield guard(lambda: english, reload_on=None, name="en")
    assert not english.vocab.in_memory_zone, "a test has left its zone open"
