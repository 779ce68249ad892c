"""The object graph of a model: what belongs to it, how many bytes it takes, and what only its code leads to."""

from __future__ import annotations

import functools
import gc
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from modelguard import _units

T = TypeVar("T")

# Which objects may become immortal, by their type: the model's own data, but no code and no system handles.


# The model's own.
LEAF = "leaf"  #: refers to nothing that the garbage collector knows of
BRANCH = "branch"  #: refers to other objects
DICT = "dict"  #: a branch whose keys are visited separately, unless it is the namespace of a module
UNDECIDED = "undecided"  #: depends on the object, not only on its type
# Not the model's own.
CODE = "code"

#: Kinds of objects that belong to one process or thread, and their types.
HANDLES: Mapping[str, str] = {
    "lock": "_thread.lock _thread.RLock _queue.SimpleQueue threading._RLock threading.Barrier threading.Condition "
    "threading.Event threading.Semaphore multiprocessing.synchronize.SemLock",
    "thread": "threading.Thread _thread._local _thread._ThreadHandle _threading_local.local "
    "concurrent.futures._base.Executor multiprocessing.pool.ThreadPool",
    "process": "subprocess.Popen multiprocessing.process.BaseProcess multiprocessing.pool.Pool",
    "socket": "_socket.socket _ssl._SSLSocket _ssl._SSLContext",
    "pipe": "multiprocessing.connection._ConnectionBase select.epoll select.poll",
    # Not BytesIO and StringIO, which are memory.
    "file": "_io.FileIO _io.BufferedReader _io.BufferedWriter _io.BufferedRandom _io.BufferedRWPair _io.TextIOWrapper "
    "mmap.mmap sqlite3.Connection",
    "event loop": "asyncio.events.AbstractEventLoop _asyncio.Future asyncio.futures.Future",
    "native handle": "_ctypes._CData ctypes.CDLL builtins.PyCapsule _cffi_backend._CDataBase _cffi_backend.FFI",
}

#: What modules define. It is made on import, and lives as long as the program.
_DEFINITIONS = (
    "builtins.type builtins.function builtins.code builtins.method_descriptor builtins.wrapper_descriptor "
    "builtins.classmethod_descriptor builtins.getset_descriptor builtins.member_descriptor builtins.property "
    "builtins.classmethod builtins.staticmethod functools._lru_cache_wrapper numpy.ufunc"
)

_TYPES: Mapping[str, str] = {
    DICT: "builtins.dict",
    UNDECIDED: "builtins.mappingproxy builtins.builtin_function_or_method numpy.ndarray numpy.void",
    CODE: f"{_DEFINITIONS} builtins.module builtins.frame builtins.traceback builtins.generator builtins.coroutine "
    "builtins.async_generator builtins.super weakref.ReferenceType weakref.ProxyType weakref.CallableProxyType "
    # Not code, but not the model's own either: shared by everything that logs, or runs in the same context.
    "logging.Filterer logging.LogRecord logging.Manager _contextvars.Context _contextvars.ContextVar "
    "_contextvars.Token",
    **HANDLES,
}
_KINDS = {name: kind for kind, names in _TYPES.items() for name in names.split()}
_DEFINED = frozenset(_DEFINITIONS.split())

_HAS_REFERENTS = 1 << 14  # Py_TPFLAGS_HAVE_GC


class ByType(dict[type, T]):
    """What a function says of each type that was seen so far."""

    def __init__(self, say: Callable[[type], T]) -> None:
        super().__init__()
        self._say = say

    def __missing__(self, cls: type) -> T:
        self[cls] = said = self._say(cls)
        return said


class ObjectKinds(ByType[str]):
    def __init__(self) -> None:
        super().__init__(_kind_of)
        self._own_size = ByType(_has_own_size)

    def size_of(self, item: Any) -> int:
        """The size of an object by ``sys.getsizeof``, in bytes; runs no code of the object's."""
        return object.__sizeof__(item) if self._own_size[type(item)] else sys.getsizeof(item)

    def belongs_to_model(self, item: Any) -> bool:
        """Whether an object of the kind :data:`UNDECIDED` is the model's own."""
        if isinstance(item, types.BuiltinFunctionType):  # {}.get belongs to the dict, but len to its module
            owner = item.__self__
            return owner is not None and self[type(owner)] in {LEAF, BRANCH, DICT}
        if isinstance(item, types.MappingProxyType):  # the namespace of a class, or a read-only dict
            mappings = gc.get_referents(item)
            return not any(isinstance(mapping, dict) and dict.__contains__(mapping, "__doc__") for mapping in mappings)
        return True


def _kind_of(cls: type) -> str:
    for base in cls.__mro__:
        kind = _KINDS.get(_units.type_name(base))
        if kind is not None:
            return kind
        # Functions that Cython and others have compiled.
        if "__code__" in base.__dict__ or "__globals__" in base.__dict__:
            return CODE
    return BRANCH if cls.__flags__ & _HAS_REFERENTS else LEAF


def _has_own_size(cls: type) -> bool:
    """Whether its ``__sizeof__`` is written in Python, and may have any effect."""
    return isinstance(cls.__sizeof__, types.FunctionType)


def is_definition(cls: type) -> bool:
    """Whether objects of this type are classes, functions or what these are made of."""
    return any(_units.type_name(base) in _DEFINED or "__code__" in base.__dict__ for base in cls.__mro__)


# Where CPython keeps an object's reference count, which count makes it immortal, and whether this works here.
#
# Since PEP 683 the lower 32 bits of the count decide: ``Py_DECREF`` does not change a count whose 31st bit is set, and
# ``Py_INCREF`` does not change the interpreter's own immortal value or, since 3.14, any count above it. If a count is
# never written, its page is never copied.
#
# Since 3.14 this has two exceptions, both in references on the interpreter's own stack. References that were taken
# while the object was mortal are dropped without looking at the count (``Py_DECREF_MORTAL``), so the count needs room
# below it. And references that the stack takes over (``PyStackRef_FromPyObjectSteal``) are counted unless the object's
# flags, the upper 16 bits of the same word, say that it is immortal: without the flag, each read of an attribute counts
# down.


#: The lowest immortal count, as ``sys.getrefcount`` returns it: ``_Py_IsImmortal`` in 3.12 - 3.15.
IMMORTAL = 1 << 31

#: The bits of an object's first word that are not its count: ``ob_flags``, since 3.14. They stay as they are.
KEPT = 0xFFFF << 48

#: What makes an object immortal, by the first version that uses it. Until 3.13 the count of CPython's own immortal
#: objects: ``_Py_IMMORTAL_REFCNT`` in Include/object.h. Since 3.14 a count in the middle between ``IMMORTAL`` and the
#: highest, with room for 536 million references to be dropped above ``_Py_IMMORTAL_INITIAL_REFCNT`` (0xC0000000), and
#: the flag ``_Py_IMMORTAL_FLAGS``: Include/refcount.h of 3.14 and 3.15.
_MARKS = {(3, 12): 0xFFFF_FFFF, (3, 14): 1 << 48 | 0xE000_0000}

#: The newest version whose headers were checked. Later versions may keep their counts elsewhere.
_NEWEST = (3, 15)

_WORD = 8  # bytes
_COUNT = 0xFFFF_FFFF  # the bits of a word that are the count
_WRITABLE = 0x200  # PyBUF_WRITE

#: How often the self-test reads an object in each way. The interpreter rewrites code that runs often: after 2 runs, and
#: for its compiler after 4096 (``JUMP_BACKWARD_INITIAL_VALUE`` in pycore_backoff.h of 3.14).
_READS = 10_000


@dataclass(frozen=True, slots=True)
class Build:
    """The properties that determine whether an interpreter is supported."""

    implementation: str
    version: tuple[int, int]
    pointer_bytes: int
    free_threaded: bool
    #: Whether it checks its reference counts (``Py_DEBUG``, ``Py_TRACE_REFS``, assertions), and so rejects a text that
    #: is immortal and not interned.
    checks: bool

    @classmethod
    def here(cls) -> Build:
        import sysconfig

        asserts = "--with-assertions" in str(sysconfig.get_config_var("CONFIG_ARGS"))
        return cls(
            implementation=sys.implementation.name,
            version=sys.version_info[:2],
            pointer_bytes=struct.calcsize("P"),
            free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
            checks=asserts or hasattr(sys, "gettotalrefcount") or hasattr(sys, "getobjects"),
        )


def unsupported(build: Build) -> str | None:
    """Why objects cannot be made immortal in such an interpreter; None if they can, as far as is known."""
    name = "CPython" if build.implementation == "cpython" else build.implementation
    named = "{} {}.{}".format(name, *build.version)
    obstacles = (
        (build.implementation != "cpython", "is not CPython, whose reference counts are known"),
        (build.version < min(_MARKS), "has no immortal objects; the first version that has them is 3.12"),
        (build.version > _NEWEST, "is newer than this modelguard knows, and may keep its reference counts elsewhere"),
        (build.free_threaded, "is free-threaded here, and splits its reference counts between threads"),
        (build.checks, "is a debug build here, which checks its reference counts"),
        (build.pointer_bytes != _WORD, "is not a 64-bit build here"),
    )
    return next((f"{named} {why}" for applies, why in obstacles if applies), None)


def mark(version: tuple[int, int]) -> int:
    """The first word of an immortal object in a supported version: its count, and its flags where there are any."""
    return _MARKS[max(known for known in _MARKS if known <= version)]


def memory() -> memoryview[int]:
    """The process's memory as 64-bit words: ``memory()[id(x) >> 3]`` is the first word of ``x``, with its count.

    There is one view for all objects: one view for each would take longer than everything else.
    """
    import ctypes

    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view: Any = prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))
    return view(0, sys.maxsize // _WORD * _WORD, _WRITABLE).cast("Q")  # type: ignore[no-any-return]


def self_test(words: memoryview[int], immortal: int) -> str | None:
    """Make private objects immortal, one of each kind, and check that reading them writes nothing: what is wrong.

    It reads first, and writes only if the count is where it should be, so a different layout changes nothing.
    """
    if not _is_counted(words):
        return "the reference count of an object is not where CPython's headers define it"
    is_immortal: Any = getattr(sys, "_is_immortal", None)  # since 3.14
    for probe in _probes():
        at, holder = id(probe) >> 3, _Holder(probe)
        taken_before = also_before = probe
        words[at] = words[at] & KEPT | immortal
        del taken_before, also_before  # since 3.14 this may count down
        found = _read(holder, words, at)
        if len(found) != 1:
            return f"an object with the immortal reference count is still counted ({type(probe).__name__})"
        if sys.getrefcount(probe) < IMMORTAL or (is_immortal is not None and not is_immortal(probe)):
            return "the interpreter does not treat an object with the immortal reference count as immortal"
    return None


def _is_counted(words: memoryview[int]) -> bool:
    """Whether the count of a mortal object is where it should be, and changes as it should."""
    probe: list[Any] = []
    at, held = id(probe) >> 3, list[Any]()
    before = words[at] & _COUNT
    held += [probe, probe, probe]
    more = words[at] & _COUNT
    held.clear()
    return 0 < before < IMMORTAL and (before + 3, before) == (more, words[at] & _COUNT)


class _Plain:
    """Keeps its attributes where its class says, or in a dict."""

    def __init__(self) -> None:
        self.own = 1.5


class _Slotted:
    __slots__ = ("own",)


class _Holder:
    """Refers to an object in every way in which models do."""

    __slots__ = ("items", "keys", "pair", "plain", "slot")

    def __init__(self, probe: object) -> None:
        self.slot = probe
        self.plain = _Plain()
        self.plain.own = probe  # type: ignore[assignment] # any object will do
        self.items = [probe]
        self.keys = {"key": probe}
        self.pair = (probe, None)

    def returned(self) -> object:
        return self.slot


def _probes() -> list[Any]:
    """New objects that nothing else refers to, one of each kind that models are made of."""
    number, words = _READS, ["a", "text"]
    return [
        _Plain(),
        _Slotted(),
        [number],
        type("_Made", (), {}),
        types.FunctionType(_nothing.__code__, {}),
        _nothing.__code__.replace(),
        (number, words),
        {number: words},
        {number},
        frozenset([number, 1]),
        " ".join(words),
        " ".join(words).encode(),
        number << 40,
        number / 7,
        words.copy,
    ]


def _read(holder: _Holder, words: memoryview[int], at: int) -> set[int]:
    """Read an object often, and return each content that its first word had meanwhile."""
    found, use = {words[at]}, _use_of(holder.slot)
    for _ in range(_READS):
        used = use()
        in_slot, in_instance = holder.slot, holder.plain.own
        in_list, in_dict, in_tuple = holder.items[0], holder.keys["key"], holder.pair[0]
        unpacked, _nothing = holder.pair
        iterated = returned = None
        for iterated in holder.items:
            returned = _passed(iterated), holder.returned()
        found.add(words[at])
        del used, in_slot, in_instance, in_list, in_dict, in_tuple, unpacked, iterated, returned
        found.add(words[at])
    return found


def _use_of(probe: object) -> Callable[[], object]:
    if isinstance(probe, types.CodeType):
        return types.FunctionType(probe, {})
    return probe if isinstance(probe, type | types.FunctionType) else _nothing


def _passed(item: object) -> object:
    return item


def _nothing() -> None:
    pass


@functools.cache
def unsupported_here() -> str | None:
    """Why this interpreter is not supported; None if it is.

    Tested once, in 30 ms, with a few small objects that are never freed.
    """
    build = Build.here()
    reason = unsupported(build)
    if reason is not None:
        return reason
    try:
        words = memory()
    except (ImportError, AttributeError, OSError) as error:
        return f"this Python has no ctypes ({error})"
    return self_test(words, mark(build.version))


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
    """Add up the sizes of all objects that belong to models by ``sys.getsizeof``, in bytes, until it is enough.

    Of one object ``most`` bytes count: with the size of a page, what writing reference counts copies.
    """
    return _Measure(mortal=False, most=most).add(roots, enough)[1]


def behind_code(code: Iterable[Any]) -> tuple[Mortal, ...]:
    """What these functions, classes and caches lead to, except through the namespaces of modules; largest first."""
    walk = _Measure(mortal=True)
    found: dict[str, list[Any]] = {}
    for one in code:
        for place, start in _places(one):
            found.setdefault(place, []).append(start)
    mortal = [Mortal(place, *walk.add(starts)) for place, starts in found.items()]
    reported = (one for one in mortal if one.bytes_held >= _REPORTED)
    return tuple(sorted(reported, key=lambda one: one.bytes_held, reverse=True))


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


def namespaces() -> Iterator[dict[str, Any]]:
    """The modules' namespaces, and ``sys.modules``."""
    yield sys.modules
    for module in list(sys.modules.values()):
        # By its type, and without its own `__getattribute__`, which may load a module on first use.
        if issubclass(type(module), types.ModuleType):
            yield object.__getattribute__(module, "__dict__")


def is_made_at_run_time(cls: type) -> bool:
    """Whether a program has made the class, and not a compiler: those are immortal from the start."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def classes() -> Iterator[type]:
    """All classes there are."""
    waiting, seen = [object], set[int]()
    while waiting:
        cls = waiting.pop()
        if id(cls) not in seen:
            seen.add(id(cls))
            waiting += type.__subclasses__(cls)  # not by a metaclass of its own
            yield cls


class _Measure:
    """Walks through objects without changing them; each object counts once.

    If ``mortal``, immortal objects are left out, and what functions and caches lead to belongs to it.
    """

    def __init__(self, *, mortal: bool, most: float = float("inf")) -> None:
        self._mortal = mortal
        self._most = most
        self._kinds = ObjectKinds()
        self._seen = set(map(id, namespaces()))
        self._left = _LIMIT

    def add(self, start: Iterable[Any], enough: float = float("inf")) -> tuple[int, int]:
        """The number of new objects behind ``start``, and their bytes."""
        waiting, objects, size = list(start), 0, 0
        while waiting and size < enough and self._left:
            item = waiting.pop()
            if id(item) in self._seen or (self._mortal and sys.getrefcount(item) >= IMMORTAL):
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
        if is_made_at_run_time(base):
            for name, value in list(type.__dict__["__dict__"].__get__(base).items()):
                yield f"attribute {name!r} of class {_units.type_name(base)}", value


def _data_of(code: Any) -> list[Any]:
    """What a function or a cache refers to; not the namespace of its module."""
    if isinstance(code, types.FunctionType):
        cells = [cell for cell in code.__closure__ or () if gc.get_referents(cell)]  # the others are still empty
        return [*(cell.cell_contents for cell in cells), code.__defaults__, code.__kwdefaults__, vars(code)]
    return gc.get_referents(code) if isinstance(code, _WRAPPERS) else []
