"""Which objects may become immortal, by their type: the model's own data, but no code and no system handles."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["BRANCH", "CODE", "DICT", "HANDLES", "LEAF", "UNDECIDED", "ObjectKinds", "type_name"]

# The model's own.
LEAF = "leaf"  #: refers to nothing that the garbage collector knows of
BRANCH = "branch"  #: refers to other objects
DICT = "dict"  #: a branch whose keys are visited separately, unless it is the namespace of a module
UNDECIDED = "undecided"  #: depends on the object, not only on its type
# Not the model's own.
CODE = "code"

#: Kinds of objects that belong to one process or thread, and their types.
HANDLES: Mapping[str, tuple[str, ...]] = {
    "lock": (
        "_thread.lock",
        "_thread.RLock",
        "_queue.SimpleQueue",
        "threading._RLock",
        "threading.Barrier",
        "threading.Condition",
        "threading.Event",
        "threading.Semaphore",
        "multiprocessing.synchronize.SemLock",
    ),
    "thread": (
        "threading.Thread",
        "_thread._local",
        "_thread._ThreadHandle",
        "_threading_local.local",
        "concurrent.futures._base.Executor",
        "multiprocessing.pool.ThreadPool",
    ),
    "process": ("subprocess.Popen", "multiprocessing.process.BaseProcess", "multiprocessing.pool.Pool"),
    "socket": ("_socket.socket", "_ssl._SSLSocket", "_ssl._SSLContext"),
    "pipe": ("multiprocessing.connection._ConnectionBase", "select.epoll", "select.poll"),
    # Not BytesIO and StringIO, which are memory.
    "file": (
        "_io.FileIO",
        "_io.BufferedReader",
        "_io.BufferedWriter",
        "_io.BufferedRandom",
        "_io.BufferedRWPair",
        "_io.TextIOWrapper",
        "mmap.mmap",
        "sqlite3.Connection",
    ),
    "event loop": ("asyncio.events.AbstractEventLoop", "_asyncio.Future", "asyncio.futures.Future"),
    "native handle": (
        "_ctypes._CData",
        "ctypes.CDLL",
        "builtins.PyCapsule",
        "_cffi_backend._CDataBase",
        "_cffi_backend.FFI",
    ),
}

_CODE = (
    "builtins.type",
    "builtins.module",
    "builtins.function",
    "builtins.code",
    "builtins.frame",
    "builtins.traceback",
    "builtins.generator",
    "builtins.coroutine",
    "builtins.async_generator",
    "builtins.method_descriptor",
    "builtins.wrapper_descriptor",
    "builtins.classmethod_descriptor",
    "builtins.getset_descriptor",
    "builtins.member_descriptor",
    "builtins.property",
    "builtins.classmethod",
    "builtins.staticmethod",
    "builtins.super",
    "functools._lru_cache_wrapper",
    "numpy.ufunc",
    "weakref.ReferenceType",
    "weakref.ProxyType",
    "weakref.CallableProxyType",
    # Not code, but not the model's own either: shared by everything that logs, or runs in the same context.
    "logging.Filterer",
    "logging.LogRecord",
    "logging.Manager",
    "_contextvars.Context",
    "_contextvars.ContextVar",
    "_contextvars.Token",
)

_KINDS = {
    "builtins.dict": DICT,
    **dict.fromkeys(
        ("builtins.mappingproxy", "builtins.builtin_function_or_method", "numpy.ndarray", "numpy.void"), UNDECIDED
    ),
    **dict.fromkeys(_CODE, CODE),
    **{name: kind for kind, names in HANDLES.items() for name in names},
}

_HAS_REFERENTS = 1 << 14  # Py_TPFLAGS_HAVE_GC


class ObjectKinds(dict[type, str]):
    """The kind of each type that was seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self._sized: set[type] = set()  # their `__sizeof__` is written in Python, and may have any effect

    def __missing__(self, cls: type) -> str:
        kind = self[cls] = _kind_of(cls)
        if isinstance(cls.__sizeof__, types.FunctionType):
            self._sized.add(cls)
        return kind

    def size_of(self, *items: Any) -> int:
        """The size of objects whose types were seen by ``sys.getsizeof``, in bytes; runs no code of theirs."""
        if not self._sized:
            return sum(map(sys.getsizeof, items))
        return sum(object.__sizeof__(item) if type(item) in self._sized else sys.getsizeof(item) for item in items)

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
        kind = _KINDS.get(type_name(base))
        if kind is not None:
            return kind
        # Functions that Cython and others have compiled.
        if "__code__" in base.__dict__ or "__globals__" in base.__dict__:
            return CODE
    return BRANCH if cls.__flags__ & _HAS_REFERENTS else LEAF


def type_name(cls: type) -> str:
    """The full name of a type."""
    return f"{cls.__module__}.{cls.__qualname__}"
