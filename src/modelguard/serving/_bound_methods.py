"""A queue for each instance: what a batched method keeps among an instance's attributes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from modelguard.errors import InvalidOption, ModelGuardWarning
from modelguard.serving import _registry
from modelguard.serving._short_lived import ShortLived

B = TypeVar("B")


class BoundMethods(Generic[B]):
    """Makes and keeps one object for each instance of a class.

    Args:
        function: The function in the class, for errors.
        qualified_name: Where it is written. Not its plain name, which a subclass may use for a method of its own.
        make: Makes the object of an instance.
    """

    def __init__(self, function: Callable[..., Any], qualified_name: str, make: Callable[[Any], B]) -> None:
        self._function = function
        self._attribute = f"_modelguard_batched_{qualified_name}"
        self._make = make
        self._short_lived = ShortLived()

    def get(self, instance: Any) -> B:
        """The object of an instance, made on first use. Two threads that come first together get the same one.

        Raises:
            InvalidOption: The instance has no ``__dict__``.
        """
        try:
            attributes = vars(instance)
        except TypeError:
            raise self._no_room(instance) from None
        kept = attributes.get(self._attribute)
        if kept is None or kept.instance is not instance:  # none yet, or that of the instance this one is a copy of
            short_lived = 0
            with _lock:
                kept = attributes.get(self._attribute)
                if kept is None or kept.instance is not instance:
                    kept = attributes[self._attribute] = _Kept(instance, self._make(instance))
                    short_lived = self._short_lived.note(kept.bound)
            if short_lived:
                self._warn(short_lived)
        return kept.bound  # type: ignore[no-any-return]

    def _warn(self, instances: int) -> None:
        text = (
            f"{self._function.__qualname__}(): {instances} instances got a queue within a minute, and most of them are "
            "gone. Items of different instances never share a batch. Keep one instance for the process, or batch a "
            "function at module level."
        )
        warnings.warn(text, ModelGuardWarning, stacklevel=4)

    def _no_room(self, instance: Any) -> InvalidOption:
        why = f"{type(instance).__name__} has __slots__, and no room for the queue of an instance"
        fix = "Add '__dict__' to its __slots__, or batch a function at module level."
        return InvalidOption("function", self._function, why=why, fix=fix)


class _Kept:
    """An entry among an instance's attributes. Copies of the instance get an empty one."""

    def __init__(self, instance: Any = None, bound: Any = None) -> None:
        self.instance = instance
        self.bound = bound

    def __reduce__(self) -> Any:
        return _Kept, ()


_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


_registry.renew_in_child(_renew_lock)
