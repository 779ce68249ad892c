"""What is known of models as objects: their library's adapter, which one was loaded before, and their version.

An adapter's module is imported when the first model of its library appears, so the core never imports a model library.
"""

# Without `from __future__ import annotations`: `Loaded` is public under another module's name, where
# `typing.get_type_hints` would not find what its annotations refer to.

import importlib
import sys
import weakref
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Generic, TypeVar

from modelguard import _public, _units
from modelguard.errors import InvalidOption

__all__ = ["Loaded"]

M = TypeVar("M")


class Adapter:
    """What modelguard can find out about the models of one library: nothing, where none says more.

    Every method is fast and never raises.
    """

    def size(self, model: Any) -> int | None:  # noqa: ARG002 - nothing is known about it
        """Bytes of the model's own arrays, None if unknown."""
        return None

    def gauges(self, model: Any) -> Mapping[str, int]:  # noqa: ARG002 - nothing is known about it
        """Figures of the model that policies may read."""
        return MappingProxyType({})


PLAIN = Adapter()

# Base class of a library's models -> module with its `ADAPTER`. By name, so that nothing is imported here.
_MODULES = {
    "llama_cpp.llama.Llama": "modelguard.adapters._llama_cpp",
    "spacy.language.Language": "modelguard.adapters.spacy",
    "torch.nn.modules.module.Module": "modelguard.adapters.torch",
}

# A module that a library's compiler has loaded -> module for it, with OWNER, the name by which users know it; FIX,
# what is done about its threads at a fork, and how to do without them; `threads()`, those that run; `renew_in_child()`.
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


def compilers() -> list[Any]:
    """The modules for the compilers that this process has loaded."""
    return [importlib.import_module(adapter) for name, adapter in _COMPILERS.items() if _is_loaded(name)]


def _is_loaded(name: str) -> bool:
    # A forked child would wait for ever for an import that another thread of its parent had begun.
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _module(model: object) -> str | None:
    names = map(_units.type_name, type(model).__mro__)
    return next((_MODULES[name] for name in names if name in _MODULES), None)


# Models that several guards have loaded: those of a pool, or copies of one model. No two may be the same object.


_VALUES = (str, bytes, int, float, complex, tuple, frozenset, type, FunctionType, BuiltinFunctionType, ModuleType)


def is_plain_value(model: object) -> bool:
    """Whether two loads may well return this same object: it holds nothing that a release could free."""
    return isinstance(model, _VALUES)


class KnownModels:
    def __init__(self) -> None:
        self._models: dict[int, weakref.KeyedRef[int, object]] = {}

    def add(self, model: object) -> bool:
        """Note a model; false if it is known already. What has no weak references does not count.

        Two guards may load at once, so there is one step that decides, and no lock that a fork could break.
        """
        try:
            mine = weakref.KeyedRef(model, self._forget, id(model))
        except TypeError:  # dict, list, ...
            return True
        while (found := self._models.setdefault(id(model), mine)) is not mine:
            if found() is model:
                return False
            self._forget(found)  # of a model that is gone, whose identity this one has got
        return True

    def _forget(self, reference: weakref.KeyedRef[int, object]) -> None:
        if self._models.get(reference.key) is reference:
            self._models.pop(reference.key, None)


# ``Loaded``: a model together with its version, as a loader may return it.


#: Characters. A version becomes a label of a metric and a part of log lines; a SHA-512 digest in hexadecimal has 128.
LONGEST = 128


class Loaded(Generic[M]):
    """What a loader may return instead of the model alone: the model and its version.

    Calls, ``validate``, ``warmup`` and ``unload`` get the model. The version shows in ``status()``, events, metrics,
    log lines, ``/readyz`` and ``modelguard top``::

        def load() -> Loaded[Model]:
            return Loaded(read_model("model/"), version="2026-11-20")

    Args:
        model: The model.
        version: Text of 1 to 128 printable characters, such as a date, a revision or the version of a registry.

    Raises:
        InvalidOption: ``version`` is not such a text, or ``model`` is a ``Loaded`` itself.
    """

    __slots__ = ("model", "version")

    def __init__(self, model: M, *, version: str) -> None:
        if isinstance(model, Loaded):
            why = "is a Loaded itself, with a version of its own"
            raise InvalidOption("model", model, why=why, fix="Return it as it is, or pass its attribute model.")
        self.model = model
        self.version = _checked(version)

    def __repr__(self) -> str:
        return f"Loaded({type(self.model).__name__}, version={self.version!r})"


def _checked(version: object) -> str:
    if not isinstance(version, str):
        why = f"must be text, not {_units.kind_of(version)}"
        fix = "Leave Loaded out if there is no version." if version is None else f"Write version={str(version)!r}."
    elif not version.strip():
        why, fix = "must be text that is not empty", "Return the model alone if it has no version."
    elif len(version) > LONGEST or not version.isprintable():
        why = f"must have at most {LONGEST} characters, all of them printable"
        fix = "Give a short name, such as a date or a revision."
    else:
        return _units.plain(version)
    raise InvalidOption("version", version, why=why, fix=fix)


def unpacked(returned: Any) -> tuple[Any, str | None]:
    """What a loader returned: the model, and its version if it has one."""
    return (returned.model, returned.version) if isinstance(returned, Loaded) else (returned, None)


_public.set_module(globals(), "modelguard")
