"""Fixtures of the tests of serving."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.serving.gated import Gated

from modelguard import telemetry


@pytest.fixture
def model() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


@pytest.fixture
def events() -> Iterator[list[telemetry.Event]]:
    heard: list[telemetry.Event] = []
    telemetry.set_hooks([heard.append])
    yield heard
    telemetry.set_hooks(None)
