"""What a caller passes to a batched function: checked before the item is queued, so that a mistake is that caller's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable
from typing import Any

from modelguard.errors import ItemRefused, ItemTooHeavy
from modelguard.serving._functions import item_type_name, passed_by_guard, route_fix
from modelguard.serving._options import BatchOptions
from modelguard.serving._requests import Group, Request

#: Sets of keyword names that are remembered as accepted. A function with ``**kwargs`` may be given ever new ones.
_MANY_NAMES = 64
#: ASGI applications are called with scope, receive and send.
_ASGI_ARGUMENTS = 3


class Arguments:
    """Checks the arguments of calls, and puts them into requests.

    Args:
        function: The batch function.
        options: Its options.
    """

    def __init__(self, function: Callable[..., Any], options: BatchOptions) -> None:
        self._function = function
        self._name = options.limits.name
        self._weigh = options.weight
        self._max_weight = options.limits.max_weight
        self._fair_by = options.fair_by
        self._item_type = item_type_name(function)
        self._accepted: set[tuple[str, ...]] = set()
        self._incomplete = self._unbound() or self._mismatch({})  # why a call without keyword arguments fails

    @property
    def always_checked(self) -> bool:
        """Whether even a call with nothing but an item has to be checked, whatever the item is."""
        return self._incomplete is not None or self._weigh is not None or self._fair_by is not None

    @property
    def incomplete(self) -> str | None:
        """Why a call without keyword arguments fails; None if it does not."""
        return self._incomplete

    def refuse_all(self, why: str) -> None:
        """Fail every call from now on."""
        self._incomplete = why

    def fill_in(self, request: Request, extras: dict[str, Any]) -> None:
        """Check the arguments of one call, and set the request's group, weight and key.

        Raises:
            TypeError: The function does not accept these keyword arguments, or needs others.
            ItemRefused: The item is a list by mistake, cannot be weighed or has no key, or a keyword argument is not
                hashable.
            ItemTooHeavy: It weighs more than a batch may.
        """
        if type(request.item) is list and self._item_type is not None:
            why = f"one item ({self._item_type}) is needed, not a list; for many items, write f.map(items)"
            raise ItemRefused(self._name, why=why)
        if extras or self._incomplete is not None:
            request.group = self._group(extras)
        if self._weigh is not None:
            request.weight = self._weight(self._weigh, request.item)
        if self._fair_by is not None:
            request.key = self._key(self._fair_by, request.item)

    def wrong_count(self, count: int) -> TypeError:
        """The error for a call that does not have exactly one positional argument."""
        if count > 1 and (why := self._unbound()) is not None:  # since 3.13, @classmethod passes the class
            return TypeError(f"{self._name}(): {why}")
        hints = [f"{self._name}() takes one item by position, and got {count or 'none'}"]
        if count > 1:
            hints += ["Pass everything else by keyword", *self._guard_hint()]
        if count in (0, _ASGI_ARGUMENTS):  # as Flask and Starlette call their routes
            hints.append(f"If a web framework called it: {route_fix(self._function, self._name)}")
        return TypeError(". ".join(hints))

    def _guard_hint(self) -> list[str]:
        names = " and ".join(map(repr, passed_by_guard(self._function)))
        return [f"Leave out {names}, which the guard passes"] if names else []

    def _group(self, extras: dict[str, Any]) -> Group | None:
        names = tuple(sorted(extras))
        if names not in self._accepted:
            why = self._mismatch(extras) if extras else self._incomplete
            if why is not None:
                hint = self._guard_hint() if set(passed_by_guard(self._function)) & set(names) else []
                raise TypeError(". ".join([f"{self._name}(): {why}", *hint]))
            if len(self._accepted) < _MANY_NAMES:
                self._accepted.add(names)
        group = tuple((name, type(extras[name]), extras[name]) for name in names)
        try:
            hash(group)
        except TypeError as error:
            why = f"only items with equal keyword arguments share a batch, so these must be hashable: {error}"
            raise ItemRefused(self._name, why=why) from None
        return group or None

    def check_items(self, items: object) -> None:
        """Check what ``map`` was given.

        Raises:
            ItemRefused: It is one text, whose characters would be the items.
        """
        if isinstance(items, str | bytes):
            kind = type(items).__name__
            why = f"map() needs many items, and a {kind} is one; write f(item), or f.map([item])"
            raise ItemRefused(self._name, why=why)

    def _unbound(self) -> str | None:
        """Why no call can work, if the function is a method and no instance was bound to it."""
        try:
            first = next(iter(inspect.signature(self._function).parameters), None)
        except (ValueError, TypeError):  # many built-in functions have none
            return None
        if first not in {"self", "cls"}:
            return None
        return (
            "it is a method: call it on an instance, and put no other decorator above @batched(...), such as "
            "@classmethod, @property or one that uses functools.wraps"
        )

    def _mismatch(self, extras: dict[str, Any]) -> str | None:
        try:
            inspect.signature(self._function).bind([], **extras)
        except TypeError as error:
            return str(error)
        except ValueError:  # many built-in functions have no signature
            return None
        return None

    def _weight(self, weigh: Callable[[Any], float], item: Any) -> float:
        try:
            weight = float(weigh(item))
        except Exception as error:
            raise ItemRefused(self._name, why=f"the item cannot be weighed: {type(error).__name__}: {error}") from error
        if not 0 <= weight < math.inf:
            raise ItemRefused(self._name, why=f"the item's weight is {weight}, and must be a number of at least 0")
        if weight > self._max_weight:
            raise ItemTooHeavy(self._name, weight=weight, max_weight=self._max_weight)
        return weight

    def _key(self, fair_by: Callable[[Any], Hashable], item: Any) -> Hashable:
        try:
            key = fair_by(item)
        except Exception as error:
            raise ItemRefused(self._name, why=f"fair_by failed: {type(error).__name__}: {error}") from error
        try:
            hash(key)
        except Exception as error:  # noqa: BLE001 - whatever the key's own code raises
            why = f"the key from fair_by must be hashable: {type(error).__name__}: {error}"
            raise ItemRefused(self._name, why=why) from None
        return key
