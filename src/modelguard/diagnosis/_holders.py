"""Who holds what grows: containers at two moments, and the way to each from a module, a class, a call or a thread.

Only the standard library is used, because a process that is looked at may have no modelguard. And no code of the
objects runs: a proxy that is asked for its class may open a connection, or raise.

The way is found backwards: one pass of the collector over all objects finds who refers to a few of them, and takes
0.07 s for a million objects. From all modules on, a table of what has been seen would take 80 bytes for each object.
"""

from __future__ import annotations

import array
import gc
import itertools
import math
import sys
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

__all__ = ["Held", "Snapshot", "grown", "snapshot"]

#: Containers with fewer entries are not compared: they are most of all, and a leak soon has more.
_FEW = 16
#: How many containers are named, and of how many entries their size is estimated.
_NAMED, _SAMPLED = 4, 24
#: So many objects of an entry are weighed at most. A container with more entries belongs to no entry alone.
_WEIGHED = 3000
#: A dict with more entries is a table, and no namespace.
_TABLE = 10_000
#: A new container with at most so many times the entries of one that has gone took its place.
_REPLACED = 0.9
#: Stands in a way for a key of a dict, until it is known whose dict that is.
_PENDING = "?"
#: References from a root to a container: so many at most, and so many objects at each distance.
_LONGEST, _WIDEST = 12, 8
#: What is looked at by the diagnosis itself.
_OWN = ("modelguard.diagnosis.", "the closure of modelguard.", "the thread 'modelguard-")
#: Seconds after which a look ends, whatever is missing.
_PATIENCE = 8.0
#: Objects between two looks at the clock.
_CHUNK = 20_000

_Length = Any
_SIZED: tuple[tuple[type, _Length], ...] = tuple(
    (kind, kind.__len__) for kind in (dict, list, set, deque, bytearray, array.array)
)
#: What belongs to the program and not to an entry.
_PROGRAM = (
    types.ModuleType, type, types.BuiltinFunctionType, types.CodeType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType, threading.Thread,
)  # fmt: skip


class Snapshot(NamedTuple):
    """One moment.

    Attributes:
        lengths: The number of entries of each container, by its id.
    """

    lengths: dict[int, int]


class Held(NamedTuple):
    """A container that has grown, or a type of which there are more.

    Attributes:
        path: The way to it from a module, a class, a call or a thread; empty if none was found.
        kind: Its type.
        more: By how many entries it has grown.
        of: What the new entries are, and what they consist of for the most part.
        size: Bytes of the new entries, estimated from a few of them.
        errors: Whether the entries are exceptions.
        table: Bytes of ``size`` that are the container's own, for the places of these entries.
    """

    path: str
    kind: str
    more: int
    of: str
    size: int
    errors: bool = False
    table: int = 0

    def __str__(self) -> str:
        where = self.path or "something without a name"
        return f"{where} ({self.kind}, +{self.more:,} entries) -> {self.of}"


def snapshot() -> Snapshot:
    """Count entries. Call ``gc.collect()`` before. Takes 0.3 s for a million objects."""
    return Snapshot({id(one): length for one, length in _containers(time.monotonic() + _PATIENCE)})


def grown(before: Snapshot, calls: int) -> list[Held]:
    """The containers that have grown with the calls, with what holds them; what weighs most comes first.

    Args:
        before: A moment before these calls.
        calls: How many calls there were.
    """
    end = time.monotonic() + _PATIENCE
    candidates = _candidates(before.lengths, max(_FEW, calls // 50), end)
    weighed = [(_weigh(one, more), more, one) for more, one in candidates if time.monotonic() < end]
    weighed.sort(key=lambda each: -each[0].size)
    found: list[Held] = []
    inside: set[int] = set()
    for weight, more, one in weighed:
        if id(one) in inside:  # an entry of a container that is named already
            continue
        inside |= weight.ids
        hidden = {id(candidates), id(weighed), id(found), *map(id, candidates), *map(id, weighed)}
        way = path(one, hidden, end=end)
        if not way.startswith(_OWN):
            found.append(Held(way, name(type(one)), more, weight.of, weight.size, weight.errors, weight.table))
        if len(found) == _NAMED:
            break
    return found


def _candidates(before: dict[int, int], least: int, end: float) -> list[tuple[int, Any]]:
    """The containers that have more entries than before, by how many.

    A new one that is as long as one that has gone took its place, as a list that each call makes anew does.
    """
    new: list[tuple[int, Any]] = []
    more: list[tuple[int, Any]] = []
    seen: set[int] = set()
    for one, length in _containers(end):
        if one is before or id(one) in seen:
            continue
        seen.add(id(one))
        if id(one) not in before:
            new.append((length, one))
        elif length - before[id(one)] >= least:
            more.append((length - before[id(one)], one))
    gone = sorted(length for key, length in before.items() if key not in seen)
    for length, one in sorted(new, key=lambda pair: -pair[0]):
        if gone and gone[-1] >= _REPLACED * length:
            gone.pop()
        elif length >= least:
            more.append((length, one))
    more.sort(key=lambda pair: -pair[0])
    return more[: 8 * _NAMED]


def name(kind: type) -> str:
    """A type as a programmer writes it."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _containers(end: float) -> Iterator[tuple[Any, int]]:
    """The containers of this process with their lengths, if these are not small.

    Also those that the collector does not list, but to which a namespace refers: dicts without containers, and buffers.
    """
    objects = gc.get_objects()
    for start in range(0, len(objects), _CHUNK):
        if time.monotonic() > end:
            return
        chunk = objects[start : start + _CHUNK]
        yield from _sized(chunk)
        below = gc.get_referents(*(one for one in chunk if _has_attributes(one)))
        yield from _sized(one for one in below if not gc.is_tracked(one))


def _sized(objects: Iterable[Any]) -> Iterator[tuple[Any, int]]:
    for one in objects:
        length = _length_of(type(one))
        if length is not None and (entries := length(one)) >= _FEW:
            yield one, entries


def _has_attributes(one: Any) -> bool:
    """Whether an object may be a namespace: what it refers to has names."""
    kind = type(one)
    if kind is dict:
        return len(one) < _TABLE
    return bool(kind.__flags__ & (1 << 9)) or kind is types.CellType  # a class written in Python


def _length_of(kind: type) -> _Length | None:
    """How to ask for the length of a container without its own code. By id: a class may have no hash."""
    known = _lengths.get(id(kind))
    if known is None:
        known = _lengths[id(kind)] = kind, next((length for base, length in _SIZED if issubclass(kind, base)), None)
    return known[1]


#: By the id of each type: the type, so that it stays, and how to ask for a length.
_lengths: dict[int, tuple[type, _Length | None]] = {}


# What entries weigh


class _Weight(NamedTuple):
    size: int
    of: str
    ids: set[int]
    errors: bool = False
    table: int = 0


def _weigh(container: Any, more: int) -> _Weight:
    """Estimate what the newest entries weigh, from some of them; what several of them share is not theirs."""
    entries = _newest(container, min(more, _SAMPLED))
    if not entries:
        return _Weight(more, name(type(container)), set(), table=more)
    below = [_below(entry) for entry in entries]
    shared = Counter(itertools.chain.from_iterable(below))
    kinds: Counter[str] = Counter()
    for each in below:
        for key, one in each.items():
            if shared[key] == 1 or len(below) == 1:
                kinds[name(type(one))] += weight(one)
    outer = Counter(name(type(entry[-1])) for entry in entries).most_common(1)[0][0]
    heaviest = kinds.most_common(1)[0][0] if kinds else outer
    of = outer if heaviest == outer else f"{outer} -> {heaviest}"
    own = {key for key, times in shared.items() if times == 1} if len(below) > 1 else set(shared)
    errors = _is(entries[0][-1], BaseException)
    length = _length_of(type(container))
    table = 0 if length is None else weight(container) * more // max(more, length(container))
    return _Weight(sum(kinds.values()) * more // len(entries) + table, of, own, errors, table)


def _newest(container: Any, count: int) -> list[tuple[Any, ...]]:
    """The entries that came last, each as key and value or as a value alone; of a set, any of them."""
    try:
        if _is(container, dict):
            return list(itertools.islice(reversed(dict.items(container)), count))
        for kind in (list, deque):
            if _is(container, kind):
                return [(one,) for one in itertools.islice(kind.__reversed__(container), count)]
        if _is(container, set):
            return [(one,) for one in itertools.islice(set.__iter__(container), count)]
    except RuntimeError:  # changed meanwhile
        pass
    return []


def _below(entry: tuple[Any, ...]) -> dict[int, Any]:
    """The objects that an entry consists of, by id; of large containers in it, the container alone."""
    found: dict[int, Any] = {}
    level = list(entry)
    while level and len(found) < _WEIGHED:
        level = [one for one in level if id(one) not in found and not _is_program(one)][: _WEIGHED - len(found)]
        found.update((id(one), one) for one in level)
        bases = [base for one in level if (base := _base_of(one)) is not None]
        level = [*gc.get_referents(*filter(_is_small, level)), *bases]
    return found


def _is_small(one: Any) -> bool:
    length = _length_of(type(one))
    return length is None or length(one) <= _WEIGHED


def _base_of(one: Any) -> Any:
    """The array that a view shows, which does not tell the collector; None of anything else."""
    return one.base if type(one).__module__ == "numpy" and hasattr(type(one), "base") else None


def _is(one: Any, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` by the type alone: proxies have a ``__class__`` of their own."""
    return issubclass(type(one), kinds)


def _is_program(one: Any) -> bool:
    """Whether it belongs to the program and not to an entry: a closure has variables of its own."""
    if _is(one, types.FunctionType):
        return one.__closure__ is None
    return _is(one, _PROGRAM) or (_is(one, dict) and dict.__contains__(one, "__builtins__"))


def weight(one: Any) -> int:
    """Bytes of one object, with what it holds outside of Python's memory."""
    try:
        size = sys.getsizeof(one, 0)
        module = type(one).__module__
        if module == "torch" or module.startswith("torch."):
            storage = getattr(one, "untyped_storage", None)
            size += storage().nbytes() if storage is not None else 0
        elif module == "mmap":
            size += len(one)
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        return 0
    return size


# The way to a root


class _Node(NamedTuple):
    """A place on the way from a container to its root: what is there, and the way from there on.

    Attributes:
        one: What is there.
        way: From there to the container.
        key: How it, a dict, holds the next on the way: an attribute if it is a namespace, else what nobody should see.
    """

    one: Any
    way: str
    key: str = ""


def path(target: Any, hidden: Iterable[int] = (), *, end: float = math.inf) -> str:
    """The shortest way to an object from a module, a class, a call or a thread; empty if none is found.

    Args:
        target: The object.
        hidden: The ids of what the caller holds it by.
        end: When to stop looking, on the monotonic clock.
    """
    modules = {id(_attributes(module)): label for label, module in list(sys.modules.items())}
    calls = dict(_variables())
    level, seen, running = [_Node(target, "")], {id(target), *hidden}, ""
    for _ in range(_LONGEST):
        running = running or next((calls[id(node.one)] + node.way for node in level if id(node.one) in calls), "")
        children = [node.one for node in level]
        found: list[_Node] = []
        seen |= {id(level), id(children), id(found), *map(id, level)}
        if time.monotonic() > end:
            break
        parents = [one for one in gc.get_referrers(*children) if id(one) not in seen]
        seen |= {id(parents), *map(id, parents)}
        parents.sort(key=lambda one: (id(one) not in modules, _is(one, (list, tuple))))
        for parent in parents[:_WIDEST]:
            if _is(parent, (types.FrameType, _Node)):
                continue
            node = next((each for each in level if _refers(parent, each.one)), level[0])
            node = node._replace(way=_resolved(parent, node), key="")
            if id(parent) in modules:
                return f"{modules[id(parent)]}{_dotted(_key(parent, node.one))}{node.way}"
            if (root := _root(parent, node)) is not None:
                return root
            found.append(_step(parent, node))
        if not found:
            break
        level = found
    return running  # whatever else refers to it is there longer than a call


def _resolved(parent: Any, node: _Node) -> str:
    """The way from a child on, whose keys are names only if the child is the namespace of its parent."""
    if not _is(node.one, dict) or not node.way.startswith(_PENDING):
        return node.way
    own = node.one is _attributes(parent) or (_is(parent, type) and dict.__contains__(node.one, "__module__"))
    return (_dotted(node.key) if own and node.key else "[...]") + node.way.removeprefix(_PENDING)


def _variables() -> Iterator[tuple[int, str]]:
    """What running calls have in their variables, by id: the collector does not know their frames."""
    for frame in sys._current_frames().values():  # noqa: SLF001 - CPython's own
        running: types.FrameType | None = frame
        while running is not None:
            code = running.f_code
            if running.f_globals is not globals() and code.co_name != "<module>":
                where = f"of the running call {running.f_globals.get('__name__', '?')}.{code.co_qualname}"
                yield from ((id(value), f"{variable} {where}") for variable, value in list(running.f_locals.items()))
            running = running.f_back


def _refers(parent: Any, child: Any) -> bool:
    return any(one is child for one in gc.get_referents(parent))


def _root(parent: Any, node: _Node) -> str | None:
    """The way, if the parent is what a programmer finds by its name."""
    if _is(parent, type):
        return name(parent) + (node.way if _is(node.one, dict) else f" -> {name(type(node.one))}{node.way}")
    if _is(parent, types.FunctionType):
        return _of_function(parent, node)
    if _is(parent, threading.Thread):
        return f"the thread {parent.name!r}{_dotted(_attribute(parent, node.one))}{node.way}"
    if type(parent).__name__ == "_lru_cache_wrapper":
        return f"the lru_cache of {getattr(parent, '__module__', '?')}.{getattr(parent, '__qualname__', '?')}"
    if _is(parent, (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)):
        return f"the suspended call {parent.__qualname__}{node.way}"
    return None


def _of_function(function: types.FunctionType, node: _Node) -> str:
    where, way = f"{function.__module__}.{function.__qualname__}", node.way.removeprefix("[...]")
    if node.one is function.__closure__ or _is(node.one, types.CellType):
        return f"the closure of {where}{way}"
    if node.one is function.__defaults__ or node.one is function.__kwdefaults__:
        return f"a default argument of {where}{way}"
    return f"{where}{node.way}"


def _step(parent: Any, node: _Node) -> _Node:
    """The parent as the next place on the way."""
    if _is(parent, dict):
        return _Node(parent, _PENDING + node.way, _key(parent, node.one))
    if _is(parent, (list, tuple, set, deque)):
        return _Node(parent, f"[...]{node.way}")
    if node.one is _attributes(parent):
        return _Node(parent, node.way)  # the way names the attribute already
    return _Node(parent, f"{_dotted(_attribute(parent, node.one))}{node.way}")


def _attributes(one: Any) -> dict[Any, Any] | None:
    """The namespace of an object, without its own code; None if it has none."""
    try:
        if _is(one, types.ModuleType):
            found = vars(types.ModuleType)["__dict__"].__get__(one)
        else:
            found = object.__getattribute__(one, "__dict__")
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        return None
    return found if type(found) is dict else None


def _key(holder: dict[Any, Any], child: Any) -> str:
    """The key by which a dict holds an object, if it is a name; of a large one, which is no namespace, none."""
    if dict.__len__(holder) > _TABLE:
        return ""
    items = list(dict.items(holder))
    return next((key for key, value in items if value is child and type(key) is str and key.isidentifier()), "")


def _attribute(holder: Any, child: Any) -> str:
    """The name of the attribute by which an object holds another; empty if it has none."""
    if (key := _key(_attributes(holder) or {}, child)) != "":
        return key
    slots = (
        (slot, member)
        for kind in type(holder).__mro__
        for slot, member in list(vars(type)["__dict__"].__get__(kind).items())
        if type(member) is types.MemberDescriptorType
    )
    return next((slot for slot, member in slots if _slot(member, holder) is child), "")


def _slot(member: types.MemberDescriptorType, holder: Any) -> Any:
    try:
        return member.__get__(holder)
    except Exception:  # noqa: BLE001 - it is empty
        return None


def _dotted(attribute: str) -> str:
    return f".{attribute}" if attribute else ""
