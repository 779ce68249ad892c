"""Public names for objects that are defined in private modules."""

from __future__ import annotations

from types import FunctionType
from typing import Any

__all__ = ["set_module"]


def set_module(namespace: dict[str, Any], name: str | None = None) -> None:
    """Set ``__module__`` of all exported classes and functions to the module that users import them from.

    Tracebacks, ``repr``, pickles and the documentation then name that module instead of the private one that holds
    the code. Constants and type aliases have no ``__module__`` and are not changed.

    Args:
        namespace: The ``globals()`` of a module, with its ``__all__``.
        name: The module that users import from. Default: the module of ``namespace``.
    """
    for exported in namespace["__all__"]:
        value = namespace[exported]
        if isinstance(value, type | FunctionType):
            value.__module__ = name or namespace["__name__"]
