"""What objects write to themselves when they are first used, written before the fork.

Such a write would copy the object's page in each forked child: a hash that is kept once it was computed, the UTF-8 form
of a text that native code has read, the parts of a path, the ``__dict__`` of an instance. What any use writes, such as
the count of exports of a ``bytearray``, cannot be written in advance.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["AttributeDicts", "FirstUse", "use_text"]

Use = Callable[[Any], Any]

#: Types that keep their hash, by name, since not every program has imported their modules. What the hash of a frozenset
#: needs is kept in the set itself, so no method of its elements is called.
_HASHED = ("builtins.bytes", "builtins.frozenset", "datetime.timedelta", "decimal.Decimal")

#: The same; but the hash of one with a time zone calls the zone's methods. A ``datetime.datetime`` is a ``date``.
_DATED = ("datetime.date", "datetime.time")
_ZONES = ("datetime.timezone", "zoneinfo.ZoneInfo")

#: Cached properties of the standard library. Classes that are derived from these may have code of their own.
_CACHED: Mapping[str, Use] = {
    **dict.fromkeys(("ipaddress.IPv4Interface", "ipaddress.IPv6Interface"), operator.attrgetter("hostmask")),
    **dict.fromkeys(
        ("ipaddress.IPv4Network", "ipaddress.IPv6Network"), operator.attrgetter("broadcast_address", "hostmask")
    ),
}

_TUPLES_KEEP_HASHES = sys.version_info >= (3, 14)

#: Types whose hash runs no code of a model's own.
_PLAIN = frozenset({bool, bytes, complex, float, frozenset, int, str, types.NoneType})

#: How deep tuples are nested whose hash is computed. Each level is looked at once more, and a hash has no limit to its
#: recursion.
_DEPTH = 4

_HAS_OWN_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT, since 3.12: the interpreter makes the dict at its first use


class FirstUse(dict[type, Use | None]):
    """What to call with an object of each type so that later uses write nothing to it; None if nothing is needed."""

    def __missing__(self, cls: type) -> Use | None:
        self[cls] = use = _use_of(cls)
        return use


class AttributeDicts(dict[type, Use | None]):
    """The getter of ``__dict__`` for each type whose instances have none until it is asked for; else None.

    These are plain instances, whose attributes are kept without a dict; it takes 64 bytes. Never a getter that a class
    has defined for itself. Instances of a subclass of ``str`` or ``dict`` mostly have no attributes, and an empty dict
    would take 350 bytes (CPython 3.13), so they are left out.
    """

    def __missing__(self, cls: type) -> Use | None:
        self[cls] = getter = _getter_of_dict(cls)
        return getter


def use_text(text: str) -> None:
    """Have a string keep its hash and, if it is not ASCII, the UTF-8 form that native code asks for."""
    str.__hash__(text)
    if not str.isascii(text):
        with suppress(UnicodeEncodeError):  # a lone surrogate, which native code cannot read either
            _utf8()(text)


@functools.cache
def _utf8() -> Callable[[str], Any]:
    import ctypes

    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    function = prototype(("PyUnicode_AsUTF8AndSize", ctypes.pythonapi))
    return lambda text: function(text, None)


def _use_of(cls: type) -> Use | None:
    for base in cls.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if base is str:
            return use_text
        if base is tuple:
            return _use_tuple if _TUPLES_KEEP_HASHES else None
        if name in _HASHED:
            return functools.partial(_hash, base)
        if name in _DATED:
            return functools.partial(_hash_dated, base)
    if cls.__module__.partition(".")[0] == "pathlib":  # a path needs its text for its hash, and its parts for that
        return functools.partial(_hash, cls)
    return _CACHED.get(f"{cls.__module__}.{cls.__qualname__}")


def _getter_of_dict(cls: type) -> Use | None:
    is_plain = (cls.__basicsize__, cls.__itemsize__) == (object.__basicsize__, 0)
    if not is_plain or not cls.__flags__ & _HAS_OWN_DICT:
        return None
    found = (base.__dict__.get("__dict__") for base in cls.__mro__)
    getter = next((one for one in found if isinstance(one, types.GetSetDescriptorType)), None)
    return None if getter is None else getter.__get__


def _hash(base: Any, item: Any) -> None:
    with suppress(TypeError, ValueError):  # a signalling NaN has no hash
        base.__hash__(item)


def _hash_dated(base: Any, item: Any) -> None:
    zone = base.tzinfo.__get__(item) if hasattr(base, "tzinfo") else None
    if zone is None or f"{type(zone).__module__}.{type(zone).__qualname__}" in _ZONES:
        base.__hash__(item)


def _use_tuple(item: Any) -> None:
    if _is_plain(item, _DEPTH):
        tuple.__hash__(item)


def _is_plain(item: tuple[Any, ...], depth: int) -> bool:
    kinds = set(map(type, tuple.__iter__(item))) - _PLAIN
    if not kinds:
        return True
    if kinds != {tuple} or depth == 1:
        return False
    return all(_is_plain(one, depth - 1) for one in tuple.__iter__(item) if type(one) is tuple)
