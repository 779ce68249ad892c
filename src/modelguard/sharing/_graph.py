"""The object graph of a model: what belongs to it, how many bytes it takes, and what only its code leads to."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from modelguard.sharing import _refcounts
from modelguard.sharing._object_kinds import CODE, DICT, HANDLES, LEAF, UNDECIDED, ObjectKinds, type_name

__all__ = ["Mortal", "behind_code", "elements", "is_code_with_data", "measure", "namespaces"]

#: Bytes behind one piece of code that are worth a report. Any forked interpreter copies about this much.
_REPORTED = 1_000_000

#: How many objects behind code are looked at: 1 s.
_LIMIT = 2_000_000

_Cache = type(functools.cache(len))
_WRAPPERS = (property, classmethod, staticmethod, _Cache)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that a program has made


@dataclass(frozen=True, slots=True)
class Mortal:
    """Data that a model uses and that stays mortal, since only code leads to it: reading it copies its pages.

    Attributes:
        place: Where it is: ``"attribute 'TABLE' of class shop.Model"``, ``"closure or defaults of shop.find"`` or
            ``"cache of shop.lookup"``.
        objects: The number of its objects.
        bytes_held: Their size by ``sys.getsizeof``, in bytes.
    """

    place: str
    objects: int
    bytes_held: int

    def __str__(self) -> str:
        return f"{self.place}: {self.objects:,} objects"


def measure(*roots: object, enough: float = float("inf"), most: float = float("inf")) -> int:
    """Add up the sizes of all objects that belong to a model by ``sys.getsizeof``, in bytes.

    Args:
        roots: Models.
        enough: Stop at so many bytes.
        most: So many bytes of one object count: with the size of a page, what writing reference counts copies.
    """
    return _Measure(mortal=False, most=most).add(roots, enough)[1]


def behind_code(code: Iterable[Any]) -> tuple[Mortal, ...]:
    """What these functions, classes and caches lead to, except through the namespaces of modules.

    Args:
        code: Those for which :func:`is_code_with_data` is true.

    Returns:
        What has at least 1 MB, largest first. At most two million objects are looked at.
    """
    walk = _Measure(mortal=True)
    found: dict[str, tuple[int, int]] = {}
    for one in code:
        for place, start in _places(one):
            objects, size = walk.add([start])
            before = found.get(place, (0, 0))
            found[place] = before[0] + objects, before[1] + size
    mortal = [Mortal(place, objects, size) for place, (objects, size) in found.items() if size >= _REPORTED]
    return tuple(sorted(mortal, key=lambda one: one.bytes_held, reverse=True))


def is_code_with_data(item: object) -> bool:
    """Whether it is code that may refer to data: a function, a class, a cache."""
    return isinstance(item, types.FunctionType | type | _Cache)


def elements(item: Any) -> list[Any]:
    """The Python objects in a numpy array or record, which numpy does not show to the garbage collector."""
    if not getattr(getattr(item, "dtype", None), "hasobject", False):
        return []
    numpy: Any = sys.modules["numpy"]
    found: list[Any] = []
    arrays = [numpy.asarray(item)]
    while arrays:
        array = arrays.pop()
        if array.dtype.names is not None:
            arrays += (array[name] for name in array.dtype.names if array.dtype[name].hasobject)
        elif array.dtype.kind == "O":
            found += array.ravel().tolist()
    return found


def namespaces() -> Iterator[int]:
    """The ids of the modules' namespaces, and of ``sys.modules``."""
    yield id(sys.modules)
    for module in list(sys.modules.values()):
        # By its type, and without its own `__getattribute__`, which may load a module on first use.
        if issubclass(type(module), types.ModuleType):
            yield id(object.__getattribute__(module, "__dict__"))


class _Measure:
    """Walks through objects without changing them; each object counts once.

    Args:
        mortal: Whether immortal objects are left out, and what functions and caches lead to belongs to it.
        most: How many bytes of one object count.
    """

    def __init__(self, *, mortal: bool, most: float = float("inf")) -> None:
        self._mortal = mortal
        self._most = most
        self._kinds = ObjectKinds()
        self._seen = set(namespaces())
        self._left = _LIMIT

    def add(self, start: Iterable[Any], enough: float = float("inf")) -> tuple[int, int]:
        """The number of new objects behind ``start``, and their bytes."""
        waiting, objects, size = list(start), 0, 0
        while waiting and size < enough and self._left:
            item = waiting.pop()
            if id(item) in self._seen or (self._mortal and sys.getrefcount(item) >= _refcounts.IMMORTAL):
                continue
            self._seen.add(id(item))
            kind = self._kinds[type(item)]
            if kind == CODE:
                waiting += _data_of(item) if self._mortal else ()
                continue
            if kind in HANDLES or (kind == UNDECIDED and not self._kinds.belongs_to_model(item)):
                continue
            objects, self._left = objects + 1, self._left - 1
            size += int(min(self._kinds.size_of(item), self._most))
            if kind != LEAF:
                waiting += gc.get_referents(item)
            if kind == DICT:
                waiting += dict.__iter__(item)  # keys that are all strings are not shown to the garbage collector
            elif kind == UNDECIDED:
                waiting += elements(item)
        return objects, size


def _places(code: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a piece of code that may refer to data, each with its place."""
    if not isinstance(code, type):
        name = f"{code.__module__}.{code.__qualname__}"
        yield f"{'closure or defaults' if isinstance(code, types.FunctionType) else 'cache'} of {name}", code
        return
    metaclass: type = type(code)  # it may have a table of its classes
    for base in (*code.__mro__, *metaclass.__mro__):
        if base.__flags__ & _HEAP_TYPE:
            for name, value in list(type.__dict__["__dict__"].__get__(base).items()):
                yield f"attribute {name!r} of class {type_name(base)}", value


def _data_of(code: Any) -> list[Any]:
    """What a function or a cache refers to; not the namespace of its module."""
    if isinstance(code, types.FunctionType):
        cells = [cell for cell in code.__closure__ or () if gc.get_referents(cell)]  # the others are still empty
        return [*(cell.cell_contents for cell in cells), code.__defaults__, code.__kwdefaults__, vars(code)]
    return gc.get_referents(code) if isinstance(code, _WRAPPERS) else []
