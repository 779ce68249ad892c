"""Every test of the lifecycle gets its own world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.lifecycle.sources import Source
from tests.unit.lifecycle.world import World

from modelguard import telemetry


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A world whose events are recorded, and whose threads have ended when the test has."""
    folder = tmp_path / "slot"
    made = World(folder)
    telemetry.set_hooks([made.record])
    yield made
    try:
        made.end()
    finally:
        telemetry.set_hooks(None)


@pytest.fixture
def source() -> Iterator[Source]:
    """A source whose hung calls end with the test."""
    made = Source()
    yield made
    made.open.set()
