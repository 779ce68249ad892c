"""Counts what a process holds, finds what has grown between two moments, and empties caches that are known to grow.

Only the standard library is used, because a process that is looked at may have no modelguard. And no code of the
objects runs: a proxy that is asked for its class may open a connection, or raise.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import io
import itertools
import math
import sys
import threading
import time
import types as program
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

LIBRARIES = ("onnxruntime", "paddle", "pyarrow", "spacy", "tensorflow", "tokenizers", "torch")

#: Entries that a cache gets by the way. Containers with fewer entries are not compared: they are most of all, and a
#: leak soon has more.
_FEW, _FEWEST = 10, 16

#: Characters or numbers from which on a text or an array is compared.
_LARGE = 16_000

#: Objects of a type that are few are not counted by type.
_MANY = 100

#: Objects that are looked at together, between two looks at the clock, and those whose references are listed together.
_CHUNK, _LISTED = 20_000, 500

#: Seconds of CPU time, after which it is given up: there are more than eight million objects.
_PATIENCE = 10.0

#: A dict with more entries is a table, and no namespace.
_TABLE = 10_000

#: How many containers are compared further, how many objects of types that grow, and how many of each.
_CONTAINERS, _OBJECTS, _SAMPLED = 32, 250_000, 24

#: How many objects are looked at to which a library's memory may belong.
_OWNERS = 3

_Length = Callable[[Any], int]


#: How to ask a container for its length without its own code, and from which length on it counts; by its type's name.
_LENGTHS: dict[str, tuple[_Length, int]] = {
    **{
        f"{kind.__module__}.{kind.__name__}": (kind.__len__, _LARGE if kind in {str, bytes} else _FEWEST)
        for kind in (dict, list, set, deque, bytearray, array.array, str, bytes)
    },
    "_io.BytesIO": (io.BytesIO.__sizeof__, _FEWEST),
    "numpy.ndarray": (lambda one: int(sys.modules["numpy"].ndarray.size.__get__(one)), _LARGE),
    "torch.Tensor": (lambda one: int(one.numel()) if type(one) is sys.modules["torch"].Tensor else 0, _LARGE),
}

#: Modules of queues that are asked for their length without their locks, which another thread may hold.
_QUEUES = {"queue", "_queue", "asyncio.queues"}

#: Types that are counted under a name of their own.
_NAMES = {
    ("_asyncio", "Task"): "tasks",
    ("asyncio.tasks", "Task"): "tasks",
    ("ssl", "SSLContext"): "ssl contexts",
    ("builtins", "traceback"): "tracebacks",
    ("builtins", "frame"): "frames",
    ("mmap", "mmap"): "mappings",
    ("sqlite3", "Connection"): "connections",
}


class _Kind(NamedTuple):
    """What is known of a type: what its objects count as, and how one is asked what it counts, and its length."""

    of: type
    name: str
    inner: Callable[[Any], tuple[str, int]] | None
    length: tuple[_Length, int] | None  # with the least that counts
    names: bool


class _Walk:
    """A walk over all objects that the collector lists. What is made later is not among them.

    Types are known by id, as a class may have no hash, and for no longer than a walk, as classes are garbage too.
    """

    def __init__(self, objects: list[Any], patience: float = math.inf) -> None:
        self.objects = objects  # listed before this exists: it would hold itself
        self.kinds: dict[int, _Kind] = {}
        self._end = time.thread_time() + patience

    def __iter__(self) -> Iterator[tuple[list[Any], list[int]]]:
        for start in range(0, len(self.objects), _CHUNK):
            if time.thread_time() > self._end:  # half a census would take what it lacks for new
                raise TimeoutError(f"there are too many objects: {len(self.objects):,}")
            chunk = self.objects[start : start + _CHUNK]
            yield chunk, self._learned(chunk)

    def _learned(self, objects: list[Any]) -> list[int]:
        """The types of objects, by id; each is known then."""
        keys = list(map(id, map(type, objects)))
        for key in set(keys) - self.kinds.keys():
            self.kinds[key] = _learn(type(objects[keys.index(key)]))
        return keys

    def containers(self, chunk: list[Any], keys: list[int]) -> Iterator[tuple[Any, int]]:
        """The containers among some objects with their lengths, if these are not small.

        Also those that the collector does not list, but to which a namespace or a short list or tuple refers: texts,
        arrays, and dicts and tuples of nothing that is listed.
        """
        names = {key for key, kind in self.kinds.items() if kind.names}
        yield from self._not_small(chunk, keys)
        spaces = [one for one, key in zip(chunk, keys, strict=True) if key in names and _is_short(one)]
        while spaces:
            inside = list(itertools.filterfalse(gc.is_tracked, gc.get_referents(*spaces[:_LISTED])))
            yield from self._not_small(inside, self._learned(inside))
            further = [one for one in inside if issubclass(type(one), (dict, tuple)) and _is_short(one)]
            spaces = spaces[_LISTED:] + further

    def _not_small(self, objects: list[Any], keys: list[int]) -> Iterator[tuple[Any, int]]:
        for one, key in zip(objects, keys, strict=True):
            if (known := self.kinds[key].length) is not None and (length := known[0](one)) >= known[1]:
                yield one, length


#: Types of namespaces that are not written in Python, and of what belongs to the program. By id: a class may not be
#: comparable.
_SPACES = {id(dict), id(list), id(tuple), id(program.CellType)}
_PROGRAM = {id(program.ModuleType), id(type)}


def _is_short(one: Any) -> bool:
    """Whether it is no table and no long list or tuple, whose entries would be very many."""
    return (most := _SHORT.get(id(type(one)))) is None or len(one) < most


_SHORT = {id(dict): _TABLE, id(list): _FEWEST, id(tuple): _FEWEST}


#: Types of what a program consists of, by id.
_IMPORTED = frozenset(map(id, (
    type, program.FunctionType, program.BuiltinFunctionType, program.ModuleType, program.GetSetDescriptorType,
    program.MemberDescriptorType, program.WrapperDescriptorType, program.MethodDescriptorType,
    program.ClassMethodDescriptorType, staticmethod, classmethod, property,
)))  # fmt: skip


def _learn(kind: type) -> _Kind:
    module, label = getattr(kind, "__module__", "?"), kind.__name__  # types of SWIG have none
    name = _NAMES.get((module, label), "caught errors" if issubclass(kind, BaseException) else "")
    bases = (f"{getattr(base, '__module__', '?')}.{base.__name__}" for base in kind.__mro__)
    length = next((_LENGTHS[base] for base in bases if base in _LENGTHS), None)
    written = bool(kind.__flags__ & (1 << 9))  # in Python
    return _Kind(kind, name, _inner(module, label), length, written or id(kind) in _SPACES)


def _inner(module: str, label: str) -> Callable[[Any], tuple[str, int]] | None:
    if (module, label) == ("torch", "Tensor"):
        return lambda one: ("tensors with a graph", int(getattr(one, "grad_fn", None) is not None))
    if label == "_lru_cache_wrapper":
        return lambda one: ("cached results", info.currsize if (info := one.cache_info()).maxsize is None else 0)
    if label == "Function" and module.startswith("tensorflow.python.eager"):
        return lambda one: ("tensorflow traces", one.experimental_get_tracing_count())
    if label.endswith("Queue") and module in _QUEUES:
        return lambda one: ("queued items", len(one.queue) if module == "queue" else int(one.qsize()))
    return None


def look() -> tuple[dict[str, int], dict[str, int]]:
    """Count objects: by kind, with what libraries say of themselves; and by type, of those types that have many.

    What each import adds is no type of its own. Takes 0.2 s of CPU time for a million objects.
    """
    found: Counter[str] = Counter({"threads": threading.active_count(), "blocks": sys.getallocatedblocks()})
    found["frozen"] = gc.get_freeze_count()
    walk, numbers = _Walk(gc.get_objects()), Counter[int]()
    for chunk, keys in walk:
        for key, number in Counter(keys).items():
            numbers[key] += number
            kind = walk.kinds[key]
            if kind.name:
                found[kind.name] += number
            if kind.inner is not None:
                for one in (one for one, its in zip(chunk, keys, strict=True) if its == key):
                    with contextlib.suppress(Exception):  # another thread has only begun to make it
                        name, inside = kind.inner(one)
                        found[name] += inside
    found["spacy strings"] = sum(map(len, {id(nlp.vocab.strings): nlp.vocab.strings for nlp in pipelines()}.values()))
    found["metric series"] = sum(map(_series, _collectors()))
    found["sqlite bytes"] = _sqlite_bytes()
    known = walk.kinds  # a walk in a closure is among its own objects: they would stay
    many = ((known[key].of, number) for key, number in numbers.items() if number > _MANY and key not in _IMPORTED)
    return dict(found), {f"{getattr(kind, '__module__', '?')}.{kind.__qualname__}": number for kind, number in many}


def _sqlite_bytes() -> int:
    """Memory that SQLite has, of all connections; 0 if it does not say."""
    sqlite = sys.modules.get("_sqlite3")
    used = getattr(ctypes.CDLL(sqlite.__file__), "sqlite3_memory_used", None) if sqlite is not None else None
    if used is None:
        return 0
    used.restype = ctypes.c_int64
    return int(used())


# What has grown


class ObjectCounts(NamedTuple):
    """What a census has found at one moment: lengths of containers by type, numbers of types, all objects; by ids."""

    lengths: dict[int, dict[int, int]]
    numbers: dict[int, int]
    ids: array.array[int]


class Chain(NamedTuple):
    """A type with more objects: how many more, some new ones, and the top that most of them are below."""

    more: int
    new: list[Any]
    top: Any


class Grown(NamedTuple):
    """What has grown since a moment."""

    containers: list[tuple[int, int, Any]]
    chains: list[Chain]
    native: dict[str, int]


def moment() -> ObjectCounts | None:
    """Count entries and objects; None where there are too many. Call ``gc.collect()`` before.

    Takes 0.8 s for a million objects, and then 8 bytes for each.
    """
    with contextlib.suppress(Exception):  # foreign objects can raise anything, too
        walk = _Walk(gc.get_objects(), _PATIENCE)  # before what follows, which grows while it walks
        found, numbers = ObjectCounts({}, {}, array.array("Q")), Counter[int]()
        for chunk, keys in walk:
            numbers.update(keys)
            found.ids.extend(map(id, chunk))
            for one, length in walk.containers(chunk, keys):
                found.lengths.setdefault(id(type(one)), {})[id(one)] = length
        return found._replace(numbers=dict(numbers))
    return None


def grown(before: ObjectCounts | None, calls: int) -> Grown:
    """What has grown since a moment; nothing where that could not be found out."""
    with contextlib.suppress(Exception):  # as above
        if before is not None:
            return _grown(before, calls)
    return Grown([], [], {})


def _grown(before: ObjectCounts, calls: int) -> Grown:
    least = max(_FEWEST, calls // 50)
    walk, numbers = _Walk(gc.get_objects(), _PATIENCE), Counter[int]()
    found: dict[int, tuple[int, Any]] = {}
    for chunk, keys in walk:
        numbers.update(keys)
        found.update((id(one), (length, one)) for one, length in walk.containers(chunk, keys))
    for own in (*before, *before.lengths.values()):
        found.pop(id(own), None)
    kinds: dict[int, int] = {}
    left = _OBJECTS
    for number, key in sorted((number, key) for key, number in numbers.items() if key not in _PROGRAM):
        if (more := number - before.numbers.get(key, 0)) >= least and number <= left:
            kinds[key] = more
            left -= number
    containers = _longer(before, found, least)
    known = walk.kinds  # not the walk: in a closure it is among its own objects
    connections = sum(number for key, number in numbers.items() if known[key].name == "connections")
    native = {"sqlite3.Connection": _sqlite_bytes() // max(1, connections)}
    return Grown(containers, _Chains(walk, before, kinds, containers).found() if kinds else [], native)


def _longer(before: ObjectCounts, now: dict[int, tuple[int, Any]], least: int) -> list[tuple[int, int, Any]]:
    """The containers that have more entries than before, by how many.

    A new one took the place of the longest of its type that has gone, as where each call makes a longer list anew. Many
    new ones of a type and a length are what is held.
    """
    more, new = [], dict[int, list[tuple[int, Any]]]()
    for key, (length, one) in now.items():
        old = before.lengths.get(id(type(one)), {}).get(key)
        if old is None:
            new.setdefault(id(type(one)), []).append((length, one))
        elif length - old >= least:
            more.append((length - old, length, one))
    for kind, ones in new.items():
        ones.sort(key=lambda each: -each[0])  # the longest first
        gone = sorted(length for key, length in before.lengths.get(kind, {}).items() if key not in now)
        same = [(length - (gone.pop() if gone else 0), length, one) for length, one in ones]
        same = [each for each in same if each[0] >= least]
        usual = 2 * same[len(same) // 2][0] if len(same) >= least else 0
        more += [each for each in same if each[0] > usual]
    more.sort(key=lambda each: -each[0])
    return more[:_CONTAINERS]


class _Chains:
    """Objects of types of which there are more: which of them refer to each other, and to which others do."""

    def __init__(
        self, walk: _Walk, before: ObjectCounts, kinds: dict[int, int], containers: list[tuple[int, int, Any]]
    ) -> None:
        self._kinds = kinds
        self._among = {
            id(one): one
            for chunk, keys in walk
            if not kinds.keys().isdisjoint(keys)
            for one, key in zip(chunk, keys, strict=True)
            # The namespace of a module or class is not a part of what its variables hold.
            if key in kinds and not (type(one) is dict and ("__builtins__" in one or "__module__" in one))
        }
        self._new = set(self._among)
        self._new.difference_update(before.ids)
        self._ends = {id(one) for *_, one in containers}
        self._entered: set[int] = set()
        self._parents: dict[int, list[Any]] = {}
        self._tops: dict[int, Any] = {}
        if self._new:
            self._link(walk)

    def _link(self, walk: _Walk) -> None:
        modules = {key for key, kind in walk.kinds.items() if issubclass(kind.of, program.ModuleType)}
        for chunk, keys in walk:
            # Not of modules: that of _asyncio lists freed objects (CPython 3.12), which would then be freed once more.
            others = chunk
            if not modules.isdisjoint(keys) or not self._among.keys().isdisjoint(map(id, chunk)):
                others = [one for one in chunk if id(one) not in self._among and id(type(one)) not in modules]
            for at in range(0, len(others), _LISTED):
                self._entered.update(self._among.keys() & map(id, gc.get_referents(*others[at : at + _LISTED])))
        for one in self._among.values():
            for each in gc.get_referents(one):
                if id(each) in self._among and each is not one:
                    self._parents.setdefault(id(each), []).append(one)

    def found(self) -> list[Chain]:
        """At each top one chain: that of its own type, if there is one."""
        new: dict[int, list[Any]] = {}
        for each in self._new:
            one = self._among[each]
            some = new.setdefault(id(type(one)), [])
            if len(some) < _SAMPLED:
                some.append(one)
        found: dict[int, Chain] = {}
        for key, some in new.items():
            tops = [top for one in some if (top := self._top(one)) is not None]
            ((number, times),) = Counter(map(id, tops)).most_common(1) or [(0, 0)]
            top = self._among.get(number)
            if len(some) > 1 and times * 2 >= len(some) and (number not in found or type(top) is type(some[0])):
                found[number] = Chain(self._kinds[key], some, top)
        return list(found.values())

    def _top(self, one: Any) -> Any:
        """The nearest, upwards, to which something else refers; None below a container that has grown."""
        level, seen, top = [one], {id(one)}, None
        while level:
            ids = set(map(id, level))
            if ids & self._ends:
                return None
            if known := ids & self._tops.keys():
                top = self._tops[known.pop()]
                break
            if ends := [each for each in level if id(each) in self._entered or id(each) not in self._parents]:
                top = ends[0]
                break
            above = {id(each): each for child in level for each in self._parents[id(child)] if id(each) not in seen}
            level = list(above.values())
            seen.update(above)
        self._tops.update(dict.fromkeys(seen, top))
        return top


# Libraries


def loaded() -> list[str]:
    return [name for name in LIBRARIES if name in sys.modules]


def guard_uses() -> list[tuple[str, int, int]]:
    """The guards of this process: what tells each from the others, generation, and calls that have ended on it."""
    module = sys.modules.get("modelguard.lifecycle.guard")
    statuses = [(id(guard), guard.status()) for guard in module.guards] if module is not None else []
    return [(f"{status.name} at {number:#x}", status.generation, status.uses) for number, status in statuses]


def cache_sizes() -> dict[int, int]:
    """The number of entries of each ``lru_cache`` without a limit, and of series of each metric, by its id."""
    sizes = {id(cache): cache.cache_info().currsize for cache in _unbounded()}
    return sizes | {id(collector): _series(collector) for collector in _collectors()}


def caches(before: Mapping[int, int]) -> Iterator[tuple[str, Callable[[], object]]]:
    for cache in _unbounded():
        with contextlib.suppress(Exception):
            info = cache.cache_info()
            if info.currsize > before.get(id(cache), 0) + _FEW:
                name = f"{getattr(cache, '__module__', '?')}.{getattr(cache, '__qualname__', '?')}"
                yield f"lru_cache:{name} ({info.currsize:,} entries)", cache.cache_clear
    for collector in _collectors():
        # Only what has more series: memory that another thread frees in the moment of the emptying is not theirs.
        if _series(collector) > before.get(id(collector), 0) + _FEW:
            yield f"metric:{getattr(collector, '_name', '?')}", collector.clear


def _collectors() -> list[Any]:
    """The metrics of the client itself: in an application's collectors these attributes may be anything."""
    registry = getattr(sys.modules.get("prometheus_client.registry"), "REGISTRY", None)
    kind = getattr(sys.modules.get("prometheus_client.metrics"), "MetricWrapperBase", ())
    return [one for one in list(getattr(registry, "_collector_to_names", ())) if isinstance(one, kind)]


def _series(collector: Any) -> int:
    return len(getattr(collector, "_metrics", ()))


def pools() -> Iterator[tuple[str, Callable[[], object]]]:
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        yield "pyarrow", arrow.default_memory_pool().release_unused
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield "cuda", torch.cuda.empty_cache
    if "onnxruntime" in sys.modules:
        yield "onnxruntime", _shrink_arenas


def _shrink_arenas() -> None:
    runtime, numpy = sys.modules["onnxruntime"], sys.modules["numpy"]
    for session in _instances("onnxruntime", "InferenceSession"):
        with contextlib.suppress(Exception):  # it has no arena, or takes other inputs
            options = runtime.RunOptions()
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
            zeros = {each.name: numpy.zeros(*_smallest(each)) for each in session.get_inputs()}
            session.run(None, zeros, options)


def _smallest(given: Any) -> tuple[list[int], str]:
    kind: str = given.type.removeprefix("tensor(").removesuffix(")")
    shape = [length if isinstance(length, int) else 1 for length in given.shape]
    return shape, {"float": "float32", "double": "float64"}.get(kind, kind)


def switch_off_caches() -> bool:
    """Switch off the caches of tokenizers; returns whether there are any. Emptying them gives nothing back (0.23)."""
    models = [thing.model for thing in _instances("tokenizers", "Tokenizer") if hasattr(thing.model, "_resize_cache")]
    for model in models:
        model._resize_cache(0)  # noqa: SLF001 - there is no other way
    return bool(models)


def owners() -> dict[str, list[Any]]:
    """What the memory of libraries belongs to, by the cause of its growth; a few of each."""
    found = {
        "spacy strings": pipelines(),
        "tokenizer caches": _instances("tokenizers", "Tokenizer"),
        "onednn plans": _outermost_modules(),
        "autograd": _referred_graphs(),
        "databases": _instances("sqlite3", "Connection"),
    }
    return {cause: some[:_OWNERS] for cause, some in found.items() if some}


def _outermost_modules() -> list[Any]:
    found = [one for one in _instances("torch.nn", "Module") if "_modules" in vars(one)]
    inner = {id(part) for one in found for part in vars(one)["_modules"].values()}
    return [one for one in found if id(one) not in inner]


def _referred_graphs() -> list[Any]:
    """Tensors of torch with a graph to which something in Python refers: to the others their graph does."""
    found = {id(one): one for one in _instances("torch", "Tensor") if getattr(one, "grad_fn", None) is not None}
    parents = [one for one in gc.get_referrers(*found.values()) if one is not found] if found else []
    others = [one for one in parents if type(one) is not program.FrameType]
    return [found[id(one)] for one in gc.get_referents(*others) if id(one) in found]


def _unbounded() -> list[Any]:
    return [cache for cache in _instances("functools", "_lru_cache_wrapper") if cache.cache_info().maxsize is None]


def pipelines() -> list[Any]:
    return _instances("spacy.language", "Language")


def _instances(module: str, name: str) -> list[Any]:
    """The objects of a class and of those made of it; none where the module is not imported."""
    kind = getattr(sys.modules.get(module), name, None)
    if kind is None:
        return []
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    if not found and gc.get_freeze_count():  # they are frozen: not listed, and others refer to them
        every = (each for thing in gc.get_objects() for each in gc.get_referents(thing))
        found = list({id(each): each for each in every if issubclass(type(each), kind)}.values())
    return found
