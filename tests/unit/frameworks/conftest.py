"""Fixtures of the tests of frameworks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
from tests.unit.serving.gated import Gated

from modelguard.isolation import status as _isolated
from modelguard.lifecycle import guard as guard_module
from modelguard.serving import _batcher


@pytest.fixture
def model() -> Iterator[Gated]:
    made = Gated()
    yield made
    made.gate.set()


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No guards, batched or isolated functions of other tests are known."""
    monkeypatch.setattr(guard_module.guards, "_references", set())
    monkeypatch.setattr(_batcher, "batchers", weakref.WeakSet())
    monkeypatch.setattr(_isolated, "functions", weakref.WeakSet())
