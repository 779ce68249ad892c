"""Where the core meets a model library without importing it: adapters, found by the model's type.

An adapter's module is imported when the first model of its library turns up, so the library is there already.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol


class Adapter(Protocol):
    """What modelguard can know about the models of one library. Every method is quick and never raises."""

    def size(self, model: Any) -> int | None:
        """Bytes that the model's own arrays take, None if unknown."""
        ...

    def gauges(self, model: Any) -> Mapping[str, int]:
        """Figures of the model that policies may read."""
        ...

    def released(self) -> None:
        """Give back what the library keeps after a model is gone."""
        ...


class _Plain:
    """The adapter of every model that has none."""

    def size(self, model: Any) -> int | None:  # noqa: ARG002 - nothing is known of it
        return None

    def gauges(self, model: Any) -> Mapping[str, int]:  # noqa: ARG002 - nothing is known of it
        return MappingProxyType({})

    def released(self) -> None:
        """Nothing is kept."""


PLAIN: Adapter = _Plain()

# Base class of a library's models -> module that holds its `ADAPTER`. Names, so that nothing is imported here.
_MODULES = {
    "spacy.language.Language": "modelguard.adapters.spacy",
    "torch.nn.modules.module.Module": "modelguard.adapters.torch",
}


def find(model: object) -> Adapter:
    """The adapter for ``model``, by its type or a base of it."""
    for base in type(model).__mro__:
        module = _MODULES.get(f"{base.__module__}.{base.__qualname__}")
        if module is not None:
            adapter: Adapter = importlib.import_module(module).ADAPTER
            return adapter
    return PLAIN
