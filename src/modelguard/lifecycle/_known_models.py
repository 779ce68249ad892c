"""Models that several guards have loaded: those of a pool, or copies of one model. No two may be the same object."""

from __future__ import annotations

import weakref
from types import BuiltinFunctionType, FunctionType, ModuleType

_VALUES = (str, bytes, int, float, complex, tuple, frozenset, type, FunctionType, BuiltinFunctionType, ModuleType)


def is_plain_value(model: object) -> bool:
    """Whether two loads may well return this same object: it holds nothing that a release could free."""
    return isinstance(model, _VALUES)


class KnownModels:
    """All models that a family of guards has loaded, as long as they live."""

    def __init__(self) -> None:
        self._models: dict[int, weakref.KeyedRef[int, object]] = {}

    def add(self, model: object) -> bool:
        """Note a model; false if it is known already. Plain values, and what has no weak references, do not count.

        Two guards may load at once, so there is one step that decides, and no lock that a fork could break.
        """
        if is_plain_value(model):
            return True
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
