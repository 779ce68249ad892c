"""Where CPython keeps an object's reference count, which count makes it immortal, and whether this works here.

Since PEP 683 the lower 32 bits of the count decide: ``Py_DECREF`` does not change a count whose 31st bit is set, and
``Py_INCREF`` does not change the interpreter's own immortal value or, since 3.14, any count above it. If a count is
never written, its page is never copied.

Since 3.14 this has two exceptions, both in references on the interpreter's own stack. References that were taken while
the object was mortal are dropped without looking at the count (``Py_DECREF_MORTAL``), so the count needs room below it.
And references that the stack takes over (``PyStackRef_FromPyObjectSteal``) are counted unless the object's flags, the
upper 16 bits of the same word, say that it is immortal: without the flag, each read of an attribute counts down.
"""

from __future__ import annotations

import functools
import struct
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["IMMORTAL", "KEPT", "Build", "mark", "memory", "self_test", "unsupported", "unsupported_here"]

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
    """The properties that determine whether an interpreter is supported.

    Attributes:
        implementation: ``sys.implementation.name``.
        version: Major and minor.
        pointer_bytes: 8 on every 64-bit platform.
        free_threaded: Whether it was built without the GIL: counts are then split between threads.
        checks: Whether it was built to check its reference counts (``Py_DEBUG``, ``Py_TRACE_REFS``, assertions). Such a
            build rejects a string that is immortal but not interned.
    """

    implementation: str
    version: tuple[int, int]
    pointer_bytes: int
    free_threaded: bool
    checks: bool

    @classmethod
    def here(cls) -> Build:
        """Describe this interpreter."""
        import sysconfig

        configured = sysconfig.get_config_var("CONFIG_ARGS") or ""
        return cls(
            implementation=sys.implementation.name,
            version=sys.version_info[:2],
            pointer_bytes=struct.calcsize("P"),
            free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
            checks=hasattr(sys, "gettotalrefcount")
            or hasattr(sys, "getobjects")
            or "--with-assertions" in str(configured),
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

    Raises:
        ImportError, AttributeError, OSError: This Python has no ctypes, or no access to its C API.
    """
    import ctypes

    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view: Any = prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))
    return view(0, sys.maxsize // _WORD * _WORD, _WRITABLE).cast("Q")  # type: ignore[no-any-return]


def self_test(words: memoryview[int], immortal: int) -> str | None:
    """Make private objects immortal, one of each kind, and check that reading them writes nothing.

    It reads first, and writes only if the count is where it should be, so a different layout changes nothing.

    Args:
        words: What :func:`memory` returns.
        immortal: What :func:`mark` returns.

    Returns:
        What is wrong; None if nothing is.
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
    at = id(probe) >> 3
    before = words[at] & _COUNT
    one_by_one = [probe for _ in range(3)]
    more = words[at] & _COUNT
    one_by_one.clear()
    many = [probe] * 3
    most = words[at] & _COUNT
    many.clear()
    return 0 < before < IMMORTAL and (before + 3, before + 3, before) == (more, most, words[at] & _COUNT)


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
    found = {words[at]}
    for _ in range(_READS):
        in_slot, in_instance = holder.slot, holder.plain.own
        in_list, in_dict, in_tuple = holder.items[0], holder.keys["key"], holder.pair[0]
        unpacked, _nothing = holder.pair
        iterated = returned = None
        for iterated in holder.items:
            returned = _passed(iterated), holder.returned()
        found.add(words[at])
        del in_slot, in_instance, in_list, in_dict, in_tuple, unpacked, iterated, returned
        found.add(words[at])
    return found


def _passed(item: object) -> object:
    return item


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
