"""How the core handles a model library without importing it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from tests.unit.lifecycle.world import MB, World
from tests.unit.of_no_module import SwigPyObject

from modelguard.lifecycle import _models
from modelguard.telemetry import LoadFinished


class Net:
    """A model of a library that has an adapter."""

    weight = 40 * MB


class FineTuned(Net):
    pass


class Adapter:
    def size(self, model: Any) -> int | None:
        return int(model.weight)

    def gauges(self, model: Any) -> dict[str, int]:
        return {}


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """The adapter of the library that ``Net`` is from."""
    module = types.ModuleType("library_adapter")
    module.ADAPTER = Adapter()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(_models._MODULES, f"{__name__}.Net", module.__name__)
    return module.ADAPTER  # type: ignore[no-any-return, attr-defined]


@pytest.mark.parametrize("model", [Net(), FineTuned()], ids=["type", "subclass"])
def test_an_adapter_is_found_by_the_model_s_type(adapter: Adapter, model: object) -> None:
    """A library's models are known by their class, or by a class that they inherit from."""
    assert _models.find(model) is adapter


@pytest.mark.parametrize("model", [object(), {}, "text", None, SwigPyObject()])
def test_every_other_model_has_the_plain_one(model: object) -> None:
    """A model of an unknown library has no size and no figures."""
    plain = _models.find(model)
    assert (None, {}) == (plain.size(model), dict(plain.gauges(model)))


def test_an_adapter_is_imported_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for an adapter imports the one that fits and no other library."""
    monkeypatch.setitem(_models._MODULES, f"{__name__}.Net", "modelguard.adapters.of_no_library")
    assert _models.find(object()) is _models.PLAIN
    with pytest.raises(ModuleNotFoundError, match="of_no_library"):
        _models.find(Net())


def test_a_model_is_as_large_as_its_adapter_says(world: World, adapter: Adapter) -> None:
    """Growth of private memory misses what was there already, so the adapter's figure counts where it is larger."""
    guard = world.guard(Net)
    guard.load()
    assert (40 * MB, 40 * MB) == (world.last(LoadFinished).model_bytes, guard.status().model_bytes)
