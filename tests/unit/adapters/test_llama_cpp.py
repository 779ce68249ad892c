"""What modelguard knows about models of llama-cpp-python, whose library stands in here: it has to be compiled."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from modelguard.adapters._llama_cpp import ADAPTER
from modelguard.lifecycle import _models


class Llama:
    """Has the one attribute that counts: the handle of the model, None once it is closed."""

    def __init__(self, model: int | None) -> None:
        self.model = model


Llama.__module__ = "llama_cpp.llama"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that knows the sizes of models by their handles."""
    module = types.ModuleType("llama_cpp")
    module.llama_model_size = {7: 138_446_848}.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)


@pytest.mark.parametrize(("handle", "size"), [(7, 138_446_848), (None, None)], ids=["open", "closed"])
def test_a_llama_is_as_large_as_its_weights(library: None, handle: int | None, size: int | None) -> None:
    """Its weights are mapped, so no growth of memory shows them; a closed one has none."""
    assert size == ADAPTER.size(Llama(handle))


def test_a_llama_finds_its_adapter() -> None:
    """It is known by its class, also by a subclass of one's own, and has no figures."""

    class Tuned(Llama):
        pass

    model: Any = Tuned(7)
    assert ADAPTER is _models.find(model)
    assert {} == dict(ADAPTER.gauges(model))
