"""Make the Python objects of a model immortal, so that forked workers can read them without copying them.

Reading a Python object writes to it: its reference count goes up and down. After a fork each such write copies a page
of memory, so workers that only read the model still end up with a copy each. ``gc.freeze`` does not help: it only stops
the garbage collector's writes. Reading an object with an immortal reference count (PEP 683, CPython 3.12) does not
write to it.

This cannot be undone: an immortal object is never freed, even when nothing refers to it any more.
"""

import functools
import gc
import itertools
import operator
import reprlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from modelguard import _units
from modelguard.errors import InvalidOption, NotSupported
from modelguard.sharing import _graph
from modelguard.sharing._graph import BRANCH, CODE, DICT, HANDLES, LEAF, UNDECIDED, ByType, Mortal, ObjectKinds

# What objects write to themselves when they are first used, written before the fork.
#
# Such a write would copy the object's page in each forked child: a hash that is kept once it was computed, the UTF-8
# form of a text that native code has read, the parts of a path, the ``__dict__`` of an instance. What any use writes,
# such as the count of exports of a ``bytearray``, cannot be written in advance.


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
    """What to call with an object of this type so that later uses write nothing to it; None if nothing is needed."""
    for base in cls.__mro__:
        name = _units.type_name(base)
        if base is str:
            return use_text
        if base is tuple:
            return _use_tuple if _TUPLES_KEEP_HASHES else None
        if name in _HASHED:
            return functools.partial(_hash, base)
        if name in _DATED:
            return functools.partial(_hash_dated, base)
    own = _units.type_name(cls)
    if own.startswith("pathlib."):  # a path needs its text for its hash, and its parts for that
        return functools.partial(_hash, cls)
    return _CACHED.get(own)


def _getter_of_dict(cls: type) -> Use | None:
    """The getter of ``__dict__`` if instances have none until it is asked for; else None.

    These are plain instances, whose attributes are kept without a dict; it takes 64 bytes. Never a getter that a class
    has defined for itself. Instances of a subclass of ``str`` or ``dict`` mostly have no attributes, and an empty dict
    would take 350 bytes (CPython 3.13), so they are left out.
    """
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
    if zone is None or _units.type_name(type(zone)) in _ZONES:
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


#: More objects than any known model has; at 0.4 us per object, 20 seconds.
LIMIT = 50_000_000

#: How many objects' referents are read at a time: enough to make the cost of the call negligible, and few enough to
#: need little memory.
_STEP = 1000


@dataclass(frozen=True, slots=True)
class Skipped:
    """Handles of one kind in a model's object graph, left unchanged together with all that only they refer to.

    Attributes:
        kind: ``"lock"``, ``"thread"``, ``"process"``, ``"socket"``, ``"pipe"``, ``"file"``, ``"event loop"``,
            ``"native handle"``; or ``"code"`` for a root that is a function, a class or a module.
        example: The first of them, and its place: ``"_thread.lock, attribute 'guard' of a shop.Model"``.
        count: Their number.
    """

    kind: str
    example: str
    count: int


@dataclass(frozen=True, slots=True)
class ImmortalReport:
    """What ``immortalize`` did.

    Attributes:
        objects: The number of objects that it made immortal.
        complete: Whether all of the model's data became immortal; False if ``limit`` ended the walk, or if ``mortal``
            is not empty.
        skipped: Handles that were left unchanged, one entry for each kind.
        mortal: Data of 1 MB or more that only the model's functions and classes lead to: in closures, in attributes of
            classes, in caches. Largest first. The namespaces of modules are not searched.
    """

    objects: int
    complete: bool
    skipped: tuple[Skipped, ...]
    mortal: tuple[Mortal, ...] = ()


def immortalize_unsupported() -> str | None:
    """Why :func:`immortalize` does not work in this interpreter; None if it does.

    It works in 64-bit builds of CPython 3.12 to 3.15 that are neither free-threaded nor debug builds. The first call
    tries it on a small object of each kind.
    """
    return _graph.unsupported_here()


def immortalize(*roots: object, limit: int = LIMIT) -> ImmortalReport:
    """Make a model's own objects immortal, so that reading them in a forked process copies nothing.

    A model's own objects are the roots, everything that can be reached from them as the garbage collector sees it, and
    the objects in numpy's arrays. Never included are types, modules, functions (bound methods are a part of
    their object), code, frames, generators, weak references, loggers, context variables, handles such as locks and
    files, and anything that can only be reached through these; the report's ``mortal`` names it. Objects that C
    extensions hide from the garbage collector are not visited.

    Objects that are already immortal are not changed, and their referents are visited only if they are roots: after a
    change to the model, give its new parts. What the first use of an object would write to it is written now: hashes
    that are kept, the UTF-8 form of text that is not ASCII (as many bytes as it has in UTF-8), the ``__dict__`` of
    plain instances (64 bytes each). The call ends with a garbage collection, which removes the immortal objects from
    the collector's generations. Call ``gc.freeze`` before: then this collection is short, and collections in the
    children do not touch the mortal objects on the model's pages.

    Args:
        roots: Models, or parts of them.
        limit: The largest number of objects to make immortal. Default: 50 million.

    Returns:
        How many objects, and which handles were left unchanged.

    Raises:
        InvalidOption: There are no roots, or ``limit`` is not a whole number of at least 1.
        NotSupported: This interpreter cannot do it; :func:`immortalize_unsupported` returns the reason in advance.
    """
    if not roots:
        raise InvalidOption("roots", roots, why="must not be empty", fix="Give a model.")
    _units.whole_number(limit, "limit")
    reason = immortalize_unsupported()
    if reason is not None:
        raise NotSupported("making objects immortal", reason=reason)
    walk = _Walk(limit)
    walk.run(roots)
    gc.collect()
    mortal = _graph.behind_code(walk.code.values())
    return ImmortalReport(
        objects=limit - walk.left,
        complete=walk.complete and not mortal,
        skipped=tuple(Skipped(kind, example, len(seen)) for kind, (example, seen) in walk.skipped.items()),
        mortal=mortal,
    )


#: What the constants of a program are made of, and what holds them: nothing in it can be replaced, but in a cell. No
#: modules: at exit Python empties those that do not die by themselves, while other modules still use them.
_CONSTANTS = frozenset({bytes, complex, float, frozenset, int, str, tuple, types.MappingProxyType})
_HOLDERS = frozenset({types.BuiltinFunctionType, types.CellType, types.MethodType})


def _is_part_of_program(cls: type) -> bool:
    return cls in _CONSTANTS or cls in _HOLDERS or _graph.is_definition(cls)


def immortalize_program() -> int:
    """Make the program immortal: each call counts references to its parts, which is most of what a child writes.

    That is classes, functions, their code and its constants, and the namespaces of modules. No data becomes immortal:
    instances, lists and dicts do not, with what only they lead to. A module that is immortal is not looked at again, so
    a second call adds what was imported in between.

    For processes that fork, whose program lives as long as they do. Call it after :func:`immortalize`, which tells what
    code keeps mortal.

    Returns:
        The number of objects; 0 where the interpreter cannot do it.
    """
    if immortalize_unsupported() is not None:
        return 0
    words, value = _graph.memory(), _graph.mark(sys.version_info[:2])
    count, kept, immortal = sys.getrefcount, _graph.KEPT, _graph.IMMORTAL
    belongs, made, waiting = ByType(_is_part_of_program), 0, list[Any]()

    def mark(found: Iterable[Any]) -> None:
        nonlocal made
        for item in found:
            if count(item) < immortal and belongs[type(item)]:
                words[id(item) >> 3] = words[id(item) >> 3] & kept | value
                made += 1
                waiting.append(item)

    # What these hold is listed once: to look at it counts a reference, too.
    new_classes = [cls for cls in _graph.classes() if count(cls) < immortal or not _graph.is_made_at_run_time(cls)]
    new_namespaces = [namespace for namespace in _graph.namespaces() if count(namespace) < immortal]
    for cls in new_classes:
        mark((cls, cls.__mro__, *type.__dict__["__dict__"].__get__(cls).values()))
    for namespace in new_namespaces:
        words[id(namespace) >> 3] = words[id(namespace) >> 3] & kept | value
        mark(list(itertools.chain(*dict.items(namespace))))
    while waiting:
        step = _last(waiting)
        mark(gc.get_referents(*step))
        for code in step:
            if type(code) is types.CodeType:  # does not show what it refers to
                mark((code.co_consts, code.co_names, code.co_name, code.co_qualname, code.co_filename))
    return made


class _Walk:
    """One walk through an object graph. Visited objects are immortal from then on, so no list of them is needed."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.complete = True
        self.skipped: dict[str, tuple[str, set[int]]] = {}  # an example of each kind, and which there are
        self._kinds = ObjectKinds()
        self._first_use = ByType(_use_of)
        self._attribute_dicts = ByType(_getter_of_dict)
        self._branches: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._words = _graph.memory()
        self._value = _graph.mark(sys.version_info[:2])
        self._namespaces = set(map(id, _graph.namespaces()))
        self.code: dict[int, Any] = {}

    def run(self, roots: Sequence[object]) -> None:
        known = [root for root in roots if sys.getrefcount(root) >= _graph.IMMORTAL]
        self._mark(roots, ())
        for root in known:
            self._follow(root, self._kinds[type(root)])
        while self.complete and (self._branches or self._dicts):
            branches, dicts = _last(self._branches), _last(self._dicts)
            dicts += self._attributes(branches)
            found = gc.get_referents(*branches, *dicts)
            # A dict whose keys are all strings does not show them to the garbage collector. This runs no Python code,
            # so no other thread can change a dict meanwhile.
            found.extend(itertools.chain.from_iterable(map(dict.__iter__, dicts)))
            self._mark(found, branches + dicts)

    def _attributes(self, branches: Sequence[Any]) -> list[dict[Any, Any]]:
        """The dicts of instances, each made if it is not there yet, and made immortal with its instance."""
        getters, made = self._attribute_dicts, list[dict[Any, Any]]()
        for item in branches:
            getter = getters[type(item)]
            if getter is not None and id(attributes := getter(item)) not in self._namespaces:
                made.append(attributes)
        mortal = [one for one in made if sys.getrefcount(one) < _graph.IMMORTAL]
        self.complete = len(mortal) <= self.left
        for one in mortal[: self.left]:
            self._words[id(one) >> 3] = self._words[id(one) >> 3] & _graph.KEPT | self._value
            self.left -= 1
        return made

    def _mark(self, found: Sequence[Any], holders: Sequence[Any]) -> None:
        """Make those objects immortal that are the model's own. This loop takes most of the time."""
        count, kinds, first_use, branches = sys.getrefcount, self._kinds, self._first_use, self._branches
        words, value, kept, immortal = self._words, self._value, _graph.KEPT, _graph.IMMORTAL
        left = self.left
        for item in found:
            if count(item) >= immortal:  # made immortal by CPython or by this walk, which ends cycles
                if type(item) is str and not item.isascii():  # CPython's own: a name in a program, for one
                    use_text(item)
                continue
            kind = kinds[type(item)]
            if kind == BRANCH:
                branches.append(item)
            elif kind != LEAF and not self._follow(item, kind):
                self._skip(item, kind, holders)
                continue
            if not left:
                self.complete = False
                break
            left -= 1
            use = first_use[type(item)]
            if use is not None:
                use(item)
            at = id(item) >> 3
            words[at] = words[at] & kept | value
        self.left = left

    def _follow(self, item: Any, kind: str) -> bool:
        """Visit an object's referents later; False if it is not the model's own."""
        if kind == BRANCH:
            self._branches.append(item)
        elif kind == DICT and id(item) not in self._namespaces:
            self._dicts.append(item)
        elif kind == UNDECIDED and self._kinds.belongs_to_model(item):
            self._branches += (item, _graph.elements(item))
        else:
            return False
        return True

    def _skip(self, item: Any, kind: str, holders: Sequence[Any]) -> None:
        if kind not in HANDLES:
            if _graph.is_code_with_data(item):
                self.code[id(item)] = item
            if holders:
                return  # every model refers to classes and functions
            kind = CODE
        if kind not in self.skipped:
            self.skipped[kind] = f"{_units.type_name(type(item))}, {_where(item, holders)}", set()
        self.skipped[kind][1].add(id(item))


def _last(stack: list[Any]) -> list[Any]:
    popped = stack[-_STEP:]
    del stack[-_STEP:]
    return popped


def _where(item: Any, holders: Sequence[Any]) -> str:
    """The place of an object in the graph: which of the holders refers to it, and how."""
    for holder in holders:
        kind, held = ("key", holder) if type(holder) is dict else ("attribute", _attributes(holder))
        name = next((name for name, value in list(held.items()) if value is item), None)
        if name is not None or any(referent is item for referent in gc.get_referents(holder)):
            place = f"{kind} {reprlib.repr(name)} of" if isinstance(name, str) else "in"
            return f"{place} a {_units.type_name(type(holder))}"
    return "given as a root"


def _attributes(holder: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(holder, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:  # it has slots, or is a list or something similar
        return {}
