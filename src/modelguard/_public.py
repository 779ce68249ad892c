"""The public name of what is written in a private module."""

from __future__ import annotations

from types import FunctionType
from typing import Any

__all__ = ["set_module"]


def set_module(namespace: dict[str, Any]) -> None:
    """Make everything that a public module re-exports show that module's name.

    Tracebacks, ``repr``, pickles and the documentation then name the module that users import, and not the private
    one that holds the code. Constants and type aliases have no ``__module__`` and stay as they are.

    Args:
        namespace: The ``globals()`` of a public module, with its ``__all__``.
    """
    for name in namespace["__all__"]:
        value = namespace[name]
        if isinstance(value, type | FunctionType):
            value.__module__ = namespace["__name__"]
