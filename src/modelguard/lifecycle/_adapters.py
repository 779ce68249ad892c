"""What modelguard knows about the models of a library: adapters, found by the model's type.

An adapter's module is imported when the first model of its library appears, so the core never imports a model library.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol


class Adapter(Protocol):
    """What modelguard can find out about the models of one library. Every method is fast and never raises."""

    def size(self, model: Any) -> int | None:
        """Bytes of the model's own arrays, None if unknown."""
        ...

    def gauges(self, model: Any) -> Mapping[str, int]:
        """Figures of the model that policies may read."""
        ...


class Compiler(Protocol):
    """What modelguard can find out about the compiler of a library, and its threads."""

    #: The name by which users know it.
    OWNER: str
    #: What is done about its threads at a fork, and how to do without them.
    FIX: str

    def threads(self) -> list[threading.Thread]:
        """Its threads that run in this process."""
        ...

    def renew_in_child(self) -> None:
        """Let it start its threads anew in a forked child."""
        ...


class PlainAdapter:
    """The adapter of every model without one, and what others do not know."""

    def size(self, model: Any) -> int | None:  # noqa: ARG002 - nothing is known about it
        return None

    def gauges(self, model: Any) -> Mapping[str, int]:  # noqa: ARG002 - nothing is known about it
        return MappingProxyType({})


PLAIN: Adapter = PlainAdapter()

# Base class of a library's models -> module with its `ADAPTER`. By name, so that nothing is imported here.
_MODULES = {
    "llama_cpp.llama.Llama": "modelguard.adapters._llama_cpp",
    "spacy.language.Language": "modelguard.adapters.spacy",
    "torch.nn.modules.module.Module": "modelguard.adapters.torch",
}

# A module that a library's compiler has loaded -> module that is its `Compiler`.
_COMPILERS = {"torch._inductor.async_compile": "modelguard.adapters._torch_compile"}


def find(model: object) -> Adapter:
    """The adapter for ``model``, by its type or a base of it."""
    module = _module(model)
    if module is None:
        return PLAIN
    adapter: Adapter = importlib.import_module(module).ADAPTER
    return adapter


def is_model(value: object) -> bool:
    """Whether ``value`` is a model of a library that has an adapter."""
    return _module(value) is not None


def compilers() -> list[Compiler]:
    """The compilers that this process has loaded."""
    modules: list[Any] = [importlib.import_module(adapter) for name, adapter in _COMPILERS.items() if _is_loaded(name)]
    return modules


def _is_loaded(name: str) -> bool:
    # A forked child would wait for ever for an import that another thread of its parent had begun.
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _module(model: object) -> str | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in type(model).__mro__)
    return next((_MODULES[name] for name in names if name in _MODULES), None)
