"""Who holds what grows: containers at two moments, and the way to each from a module, a class, a call or a thread.

Only the standard library is used, because a process that is looked at may have no modelguard.

The way is found backwards: one pass of the collector over all objects finds who refers to a few of them, and takes
0.07 s for a million objects. From all modules on, a table of what has been seen would take 80 bytes for each object.
"""

from __future__ import annotations

import array
import gc
import itertools
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
#: What is below one entry: so many objects are weighed at most.
_WEIGHED = 3000
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
        types: The number of objects by type, of types that have many.
        whole: Whether all objects were looked at.
    """

    lengths: dict[int, int]
    types: dict[str, int]
    whole: bool


class Held(NamedTuple):
    """A container that has grown, or a type of which there are more.

    Attributes:
        path: The way to it from a module, a class, a call or a thread; empty if none was found.
        kind: Its type.
        more: By how many entries it has grown.
        of: What the new entries are, and what they consist of for the most part.
        size: Bytes of the new entries, estimated from a few of them.
        errors: Whether the entries are exceptions.
    """

    path: str
    kind: str
    more: int
    of: str
    size: int
    errors: bool = False

    def __str__(self) -> str:
        where = self.path or "something without a name"
        return f"{where} ({self.kind}, +{self.more:,} entries) -> {self.of}"


def snapshot() -> Snapshot:
    """Count entries and objects. Call ``gc.collect()`` before. Takes about 0.6 s for a million objects."""
    lengths: dict[int, int] = {}
    whole = True
    end = time.monotonic() + _PATIENCE
    found: Counter[type] = Counter()
    for chunk in _chunks(gc.get_objects()):
        found.update(map(type, chunk))
        lengths.update((id(one), length) for one, length in _sized(chunk))
        if time.monotonic() > end:
            whole = False
            break
    many = {name(kind): count for kind, count in found.items() if count >= _FEW}
    return Snapshot(lengths, many, whole)


def grown(before: Snapshot, calls: int) -> list[Held]:
    """The containers that have grown with the calls, with what holds them; what weighs most comes first.

    Args:
        before: A moment before these calls.
        calls: How many calls there were.
    """
    least = max(_FEW, calls // 50)
    candidates: list[tuple[int, Any]] = []
    end = time.monotonic() + _PATIENCE
    for chunk in _chunks(gc.get_objects()):
        candidates += (
            (more, one) for one, length in _sized(chunk) if (more := length - before.lengths.get(id(one), 0)) >= least
        )
        if time.monotonic() > end:
            break
    candidates = [pair for pair in candidates if pair[1] is not before.lengths and pair[1] is not before.types]
    candidates.sort(key=lambda pair: -pair[0])
    weighed = [(_weigh(one, more), more, one) for more, one in candidates[: 8 * _NAMED]]
    weighed.sort(key=lambda each: -each[0].size)
    found: list[Held] = []
    inside: set[int] = set()
    for weight, more, one in weighed:
        if id(one) in inside:  # an entry of a container that is named already
            continue
        inside |= weight.ids
        hidden = {id(candidates), id(weighed), id(found), *map(id, candidates), *map(id, weighed)}
        way = path(one, hidden)
        if not way.startswith(_OWN):
            found.append(Held(way, name(type(one)), more, weight.of, weight.size, weight.errors))
        if len(found) == _NAMED:
            break
    return found


def name(kind: type) -> str:
    """A type as a programmer writes it."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _chunks(objects: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(objects), _CHUNK):
        yield objects[start : start + _CHUNK]


def _sized(chunk: list[Any]) -> Iterator[tuple[Any, int]]:
    """The containers among some objects and directly below them, with their lengths, if these are not small.

    Below them are those that the collector does not list: dicts without containers, and buffers.
    """
    length_of = _lengths
    for one in chunk:
        length = length_of(type(one))
        if length is not None and (entries := length(one)) >= _FEW:
            yield one, entries
    for one in gc.get_referents(*(each for each in chunk if _has_attributes(each))):
        if not gc.is_tracked(one):
            length = length_of(type(one))
            if length is not None and (entries := length(one)) >= _FEW:
                yield one, entries


def _has_attributes(one: Any) -> bool:
    """Whether an object may be a namespace: what it refers to has names."""
    kind = type(one)
    if kind is dict:
        return len(one) < 10_000  # noqa: PLR2004 - a namespace, and no table
    return bool(kind.__flags__ & (1 << 9)) or kind is types.CellType  # a class written in Python


def _length_of(kind: type) -> _Length | None:
    return next((length for base, length in _SIZED if issubclass(kind, base)), None)


class _Lengths(dict):  # type: ignore[type-arg]
    def __missing__(self, kind: type) -> _Length | None:
        self[kind] = found = _length_of(kind)
        return found


_lengths = _Lengths().__getitem__


# What entries weigh


class _Weight(NamedTuple):
    size: int
    of: str
    ids: set[int]
    errors: bool = False


def _weigh(container: Any, more: int) -> _Weight:
    """Estimate what the newest entries weigh, from some of them; what several of them share is not theirs."""
    entries = _newest(container, min(more, _SAMPLED))
    if not entries:
        return _Weight(more, name(type(container)), set())
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
    errors = isinstance(entries[0][-1], BaseException)
    return _Weight(sum(kinds.values()) * more // len(entries), of, own, errors)


def _newest(container: Any, count: int) -> list[tuple[Any, ...]]:
    """The entries that came last, each as key and value or as a value alone; of a set, any of them."""
    try:
        if isinstance(container, dict):
            return list(itertools.islice(reversed(dict.items(container)), count))
        if isinstance(container, list | deque):
            return [(one,) for one in itertools.islice(reversed(container), count)]
        if isinstance(container, set):
            return [(one,) for one in itertools.islice(set.__iter__(container), count)]
    except RuntimeError:  # changed meanwhile
        pass
    return []


def _below(entry: tuple[Any, ...]) -> dict[int, Any]:
    """The objects that an entry consists of, by id."""
    found: dict[int, Any] = {}
    level = [one for one in entry if not _is_program(one)]
    while level and len(found) < _WEIGHED:
        found.update((id(one), one) for one in level)
        level = [one for one in gc.get_referents(*level) if id(one) not in found and not _is_program(one)]
    return found


def _is_program(one: Any) -> bool:
    """Whether it belongs to the program and not to an entry: a closure has variables of its own."""
    if isinstance(one, types.FunctionType):
        return one.__closure__ is None
    return isinstance(one, _PROGRAM) or (isinstance(one, dict) and "__builtins__" in one)


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
    """A place on the way from a container to its root: what is there, and the way from there on."""

    one: Any
    way: str


def path(target: Any, hidden: Iterable[int] = ()) -> str:
    """The shortest way to an object from a module, a class, a call or a thread; empty if none is found.

    Args:
        target: The object.
        hidden: The ids of what the caller holds it by.
    """
    modules = {id(vars(module)): label for label, module in list(sys.modules.items()) if hasattr(module, "__dict__")}
    calls = dict(_variables())
    level, seen, running = [_Node(target, "")], {id(target), *hidden}, ""
    for _ in range(_LONGEST):
        running = running or next((calls[id(node.one)] + node.way for node in level if id(node.one) in calls), "")
        found: list[_Node] = []
        children = [node.one for node in level]
        seen |= {id(level), id(children), id(found), *map(id, level)}
        for parent in gc.get_referrers(*children):
            if id(parent) in seen or isinstance(parent, types.FrameType | _Node):
                continue
            seen.add(id(parent))
            node = next((each for each in level if _refers(parent, each.one)), level[0])
            if id(parent) in modules:
                return f"{modules[id(parent)]}{_dotted(_key(parent, node.one))}{node.way}"
            if (root := _root(parent, node)) is not None:
                return root
            found.append(_Node(parent, _step(parent, node)))
        level = sorted(found, key=lambda node: isinstance(node.one, list | tuple))[:_WIDEST]
        if not level:
            break
    return running  # whatever else refers to it is there longer than a call


def _variables() -> Iterator[tuple[int, str]]:
    """What running calls have in their variables, by id: the collector does not know their frames."""
    for frame in sys._current_frames().values():  # noqa: SLF001 - CPython's own
        running: types.FrameType | None = frame
        while running is not None:
            if running.f_globals is not globals():
                code = running.f_code
                for variable, value in list(running.f_locals.items()) if code.co_name != "<module>" else ():
                    yield (
                        id(value),
                        f"{variable} of the running call {running.f_globals.get('__name__', '?')}.{code.co_qualname}",
                    )
            running = running.f_back


def _refers(parent: Any, child: Any) -> bool:
    return any(one is child for one in gc.get_referents(parent))


def _root(parent: Any, node: _Node) -> str | None:
    """The way, if the parent is what a programmer finds by its name."""
    if isinstance(parent, type):
        return name(parent) + (node.way if isinstance(node.one, dict) else f" -> {name(type(node.one))}{node.way}")
    if isinstance(parent, types.FunctionType):
        return _of_function(parent, node)
    if isinstance(parent, threading.Thread):
        return f"the thread {parent.name!r}{_dotted(_attribute(parent, node.one))}{node.way}"
    if type(parent).__name__ == "_lru_cache_wrapper":
        return f"the lru_cache of {getattr(parent, '__module__', '?')}.{getattr(parent, '__qualname__', '?')}"
    if isinstance(parent, types.CoroutineType | types.GeneratorType | types.AsyncGeneratorType):
        return f"the suspended call {parent.__qualname__}{node.way}"
    return None


def _of_function(function: types.FunctionType, node: _Node) -> str:
    where, way = f"{function.__module__}.{function.__qualname__}", node.way.removeprefix("[...]")
    if node.one is function.__closure__ or isinstance(node.one, types.CellType):
        return f"the closure of {where}{way}"
    if node.one is function.__defaults__ or node.one is function.__kwdefaults__:
        return f"a default argument of {where}{way}"
    return f"{where}{node.way}"


def _step(parent: Any, node: _Node) -> str:
    """The way from a parent on."""
    if isinstance(parent, dict):
        # A namespace has attributes; the keys of other tables may be secrets.
        key = _key(parent, node.one)
        return (
            _dotted(key) if key.isidentifier() and len(parent) < _WEIGHED and _is_namespace(parent) else "[...]"
        ) + node.way
    if isinstance(parent, list | tuple | set | deque):
        return f"[...]{node.way}"
    if isinstance(parent, types.CellType | types.MethodType):
        return node.way
    attribute = _attribute(parent, node.one)
    return f"{_dotted(attribute)}{node.way}" if attribute else node.way


def _is_namespace(found: dict[Any, Any]) -> bool:
    """Whether a dict is that of an object or a class."""
    return any(
        isinstance(owner, type) or getattr(type(owner), "__dictoffset__", 0) for owner in gc.get_referrers(found)
    )


def _key(holder: dict[Any, Any], child: Any) -> str:
    return next((key for key, value in list(holder.items()) if value is child and isinstance(key, str)), "")


def _attribute(holder: Any, child: Any) -> str:
    """The name of the attribute by which an object holds another; empty if it has none."""
    try:
        for key, value in list(vars(holder).items()):
            if value is child:
                return str(key)
    except TypeError:
        pass
    slots = (slot for kind in type(holder).__mro__ for slot in _slots(kind))
    return next((slot for slot in slots if _slot(holder, slot) is child), "")


def _slots(kind: type) -> tuple[str, ...]:
    found = kind.__dict__.get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _slot(holder: Any, slot: str) -> Any:
    try:
        return getattr(holder, slot, None)
    except Exception:  # noqa: BLE001 - a foreign object may raise anything
        return None


def _dotted(attribute: str) -> str:
    return f".{attribute}" if attribute else ""
