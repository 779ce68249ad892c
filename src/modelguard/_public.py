"""The public name of what is written in a private module."""

from __future__ import annotations

from types import FunctionType
from typing import Any

__all__ = ["set_module"]


def set_module(namespace: dict[str, Any], name: str | None = None) -> None:
    """Make everything that a module exports show the name of the module that users import it from.

    Tracebacks, ``repr``, pickles and the documentation then name the module that users import, and not the private
    one that holds the code. Constants and type aliases have no ``__module__`` and stay as they are.

    Args:
        namespace: The ``globals()`` of a module, with its ``__all__``.
        name: The module that users import from. Default: this one.
    """
    for exported in namespace["__all__"]:
        value = namespace[exported]
        if isinstance(value, type | FunctionType):
            value.__module__ = name or namespace["__name__"]
