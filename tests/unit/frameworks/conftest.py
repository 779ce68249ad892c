"""What the tests of frameworks share."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
from tests.unit.serving.gated import Gated

from modelguard.lifecycle import guard
from modelguard.serving import registry


@pytest.fixture
def model() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No guard and no batched function is known from before."""
    monkeypatch.setattr(guard, "_guards", weakref.WeakSet())
    monkeypatch.setattr(registry, "_batchers", weakref.WeakSet())
