"""Immortal objects: a model made of Python objects that forked workers can read without copying it.

Reading a Python object writes to it: its reference count goes up and down. After a fork each such write copies a page
of memory, so workers that only read end up with a copy each, and ``gc.freeze`` does not help: it stops the garbage
collector's writes alone. An object whose count is immortal (PEP 683, CPython 3.12) is never written by reading it.

This cannot be undone: an immortal object is never freed, even when nothing refers to it any more.
"""

import gc
import itertools
import reprlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from modelguard import _units
from modelguard.errors import InvalidOption, NotSupported
from modelguard.sharing import _refcounts
from modelguard.sharing._object_kinds import ASK, BRANCH, CODE, DICT, HANDLES, LEAF, TEXT, ObjectKinds, type_name

__all__ = ["ImmortalReport", "Skipped", "immortalize", "immortalize_unsupported"]

#: More objects than any known model has; at 0.4 us an object, 20 seconds.
LIMIT = 50_000_000

#: Objects whose referents are looked up at a time: enough that the call costs nothing, few enough to need no memory.
_STEP = 1000


@dataclass(frozen=True, slots=True)
class Skipped:
    """Handles of one kind in a model's graph, left unchanged, with everything that only they lead to.

    Attributes:
        kind: ``"lock"``, ``"thread"``, ``"process"``, ``"socket"``, ``"pipe"``, ``"file"``, ``"event loop"``,
            ``"native handle"``; or ``"code"`` for a root that is a function, a class or a module.
        example: The first one, and its place: ``"_thread.lock, attribute 'guard' of a shop.Model"``.
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
        bytes_held: Their size by ``sys.getsizeof``, in bytes: memory that is never given back. What native libraries
            hold for them comes on top.
        seconds: How long it took.
        complete: Whether the whole graph was visited; False if ``limit`` ended the walk.
        skipped: Handles that were left alone, one entry for each kind.
    """

    objects: int
    bytes_held: int
    seconds: float
    complete: bool
    skipped: tuple[Skipped, ...]


def immortalize_unsupported() -> str | None:
    """Why :func:`immortalize` does not work in this interpreter; None if it does.

    It works in CPython 3.12 to 3.15, 64-bit, neither free-threaded nor a debug build. The first call tries it on one
    small object.
    """
    return _refcounts.verdict()


def immortalize(*roots: object, limit: int = LIMIT) -> ImmortalReport:
    """Make a model's own objects immortal, so that reading them in a forked process copies nothing.

    A model's own objects are the roots, what they refer to step by step according to the garbage collector, and the
    objects in numpy's object arrays. Never included are types, modules, functions (bound methods are a part of their
    object), code, frames, generators, weak references, loggers, context variables, handles such as locks and files,
    and anything that only these lead to. What C extensions hide from the garbage collector is not visited.

    Objects that are immortal already stay as they are, and only the roots among them are looked into: after a change
    to the model, give what is new in it. The hash of each text is computed, since its first use would write it. The
    call ends with a collection, which removes the immortal objects from the collector's generations. Call ``gc.freeze``
    before: then that collection is short, and collections in the children do not touch the mortal objects on the
    model's pages.

    Args:
        roots: Models, or parts of them.
        limit: The largest number of objects to make immortal. Default: 50 million.

    Returns:
        How many objects, how many seconds, and which handles were left alone.

    Raises:
        InvalidOption: There are no roots, or ``limit`` is not a whole number of at least 1.
        NotSupported: This interpreter cannot do it; :func:`immortalize_unsupported` gives the reason beforehand.
    """
    if not roots:
        raise InvalidOption("roots", roots, why="there is nothing to make immortal", fix="Give a model.")
    _units.whole_number(limit, "limit")
    reason = immortalize_unsupported()
    if reason is not None:
        raise NotSupported("making objects immortal", reason=reason)
    started = time.perf_counter()
    walk = _Walk(limit)
    walk.run(roots)
    gc.collect()
    return ImmortalReport(
        objects=walk.objects,
        bytes_held=walk.held,
        seconds=time.perf_counter() - started,
        complete=walk.complete,
        skipped=tuple(Skipped(kind, example, len(walk.seen[kind])) for kind, example in walk.examples.items()),
    )


class _Walk:
    """One walk through a graph. A visited object is immortal from then on, so no list of them is needed."""

    def __init__(self, limit: int) -> None:
        self.left = limit
        self.objects = 0
        self.held = 0
        self.complete = True
        self.examples: dict[str, str] = {}
        self.seen: dict[str, set[int]] = {}
        self._kinds = ObjectKinds()
        self._branches: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._words = _refcounts.memory()
        self._value = _refcounts.value(sys.version_info[:2])
        self._namespaces = {id(sys.modules), *_namespaces()}

    def run(self, roots: Sequence[object]) -> None:
        known = [root for root in roots if sys.getrefcount(root) >= _refcounts.IMMORTAL]
        self._take(roots, ())
        for root in known:
            self._follow(root, self._kinds[type(root)])
        while self.complete and (self._branches or self._dicts):
            branches, dicts = _last(self._branches), _last(self._dicts)
            found = gc.get_referents(*branches, *dicts)
            # A dict whose keys are all text does not show them to the garbage collector. This runs no Python code, so
            # no other thread can change a dict meanwhile.
            found.extend(itertools.chain.from_iterable(map(dict.__iter__, dicts)))
            self._take(found, branches + dicts)

    def _take(self, found: Sequence[Any], holders: Sequence[Any]) -> None:
        """Make the model's own among the found objects immortal. This loop takes most of the time."""
        count, kinds, branches = sys.getrefcount, self._kinds, self._branches
        words, value, immortal = self._words, self._value, _refcounts.IMMORTAL
        taken: list[Any] = []
        for one in found:
            if count(one) >= immortal:  # made so by CPython or by us: this ends circles
                continue
            kind = kinds[type(one)]
            if kind == TEXT:
                hash(one)
            elif kind == BRANCH:
                branches.append(one)
            elif kind != LEAF and not self._follow(one, kind):
                self._note(one, kind, holders)
                continue
            words[id(one) >> 2] = value
            taken.append(one)
            if len(taken) == self.left:
                self.complete = False
                break
        self.left -= len(taken)
        self.objects += len(taken)
        self.held += self._sizes(taken)

    def _follow(self, one: Any, kind: str) -> bool:
        """Look into an object later; False if it is not the model's own."""
        if kind == BRANCH:
            self._branches.append(one)
        elif kind == DICT and id(one) not in self._namespaces:
            self._dicts.append(one)
        elif kind == ASK and self._kinds.belongs_to_model(one):
            self._branches += (one, _elements(one))
        else:
            return False
        return True

    def _note(self, one: Any, kind: str, holders: Sequence[Any]) -> None:
        if kind not in HANDLES:
            if holders:
                return  # every model refers to classes and functions
            kind = CODE
        self.seen.setdefault(kind, set()).add(id(one))
        if kind not in self.examples:
            self.examples[kind] = f"{type_name(type(one))}, {_where(one, holders)}"

    def _sizes(self, taken: list[Any]) -> int:
        foreign = self._kinds.sized
        if not foreign:
            return sum(map(sys.getsizeof, taken))
        return sum(object.__sizeof__(one) if type(one) in foreign else sys.getsizeof(one) for one in taken)


def _namespaces() -> Iterator[int]:
    """The ids of the modules' namespaces."""
    for module in list(sys.modules.values()):
        # By its type, and past its own `__getattribute__`, which may load a module on first use.
        if issubclass(type(module), ModuleType):
            yield id(object.__getattribute__(module, "__dict__"))


def _last(stack: list[Any]) -> list[Any]:
    """Take the objects of one step off a stack."""
    taken = stack[-_STEP:]
    del stack[-_STEP:]
    return taken


def _elements(one: Any) -> list[Any]:
    """The contents of a numpy array of Python objects, which numpy does not show to the garbage collector."""
    if getattr(getattr(one, "dtype", None), "kind", None) != "O":
        return []
    numpy: Any = sys.modules["numpy"]
    elements: list[Any] = numpy.asarray(one).ravel().tolist()
    return elements


def _where(one: Any, holders: Sequence[Any]) -> str:
    """The place of an object in the graph: which of the holders refers to it, and how."""
    for holder in holders:
        if any(referent is one for referent in gc.get_referents(holder)):
            return _place(one, holder)
    return "given as a root"


def _place(one: Any, holder: Any) -> str:
    is_dict = type(holder) is dict
    for name, value in list((holder if is_dict else _attributes(holder)).items()):
        if value is one and isinstance(name, str):
            return f"{'key' if is_dict else 'attribute'} {reprlib.repr(name)} of a {type_name(type(holder))}"
    return f"in a {type_name(type(holder))}"


def _attributes(holder: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(holder, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:  # it has slots, or is a list or the like
        return {}
