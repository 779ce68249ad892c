"""Where CPython keeps an object's reference count, which count makes it immortal, and whether this works here.

Since PEP 683 the lower 32 bits of the count decide: ``Py_DECREF`` does not change a count whose 31st bit is set, and
``Py_INCREF`` does not change the interpreter's own immortal value or, since 3.14, any count above it. If a count is
never written, its page is never copied.
"""

from __future__ import annotations

import functools
import struct
import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["IMMORTAL", "Build", "memory", "self_test", "unsupported", "unsupported_here", "value"]

#: The lowest immortal count, as ``sys.getrefcount`` returns it: ``_Py_IsImmortal`` in 3.12 - 3.15.
IMMORTAL = 1 << 31

#: The count of CPython's own immortal objects, by the first version that used it: ``_Py_IMMORTAL_REFCNT`` in
#: Include/object.h of 3.12 and 3.13, ``_Py_IMMORTAL_INITIAL_REFCNT`` in Include/refcount.h of 3.14 and 3.15.
_VALUES = {(3, 12): 0xFFFF_FFFF, (3, 14): 0xC000_0000}

#: The newest version whose headers were checked. Later versions may keep their counts elsewhere.
_NEWEST = (3, 15)

_WORD = 4  # bytes
_WRITABLE = 0x200  # PyBUF_WRITE


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
        (build.version < min(_VALUES), "has no immortal objects; the first version that has them is 3.12"),
        (build.version > _NEWEST, "is newer than this modelguard knows, and may keep its reference counts elsewhere"),
        (build.free_threaded, "is free-threaded here, and splits its reference counts between threads"),
        (build.checks, "is a debug build here, which checks its reference counts"),
        (build.pointer_bytes != 2 * _WORD, "is not a 64-bit build here"),
    )
    return next((f"{named} {why}" for applies, why in obstacles if applies), None)


def value(version: tuple[int, int]) -> int:
    """The immortal count of a supported version."""
    return _VALUES[max(known for known in _VALUES if known <= version)]


def memory() -> memoryview[int]:
    """The process's memory as 32-bit words: ``memory()[id(x) >> 2]`` is the reference count of ``x``.

    There is one view for all objects: one view for each would take longer than everything else.

    Raises:
        ImportError, AttributeError, OSError: This Python has no ctypes, or no access to its C API.
    """
    import ctypes

    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
    view: Any = prototype(("PyMemoryView_FromMemory", ctypes.pythonapi))
    low = 0 if sys.byteorder == "little" else _WORD  # the lower half of the 64-bit count comes first, or second
    return view(low, sys.maxsize // _WORD * _WORD, _WRITABLE).cast("I")  # type: ignore[no-any-return]


def self_test(words: memoryview[int], immortal: int) -> str | None:
    """Make a private object immortal, and check the result.

    It reads first, and writes only if the count is where it should be, so a different layout changes nothing.

    Returns:
        What is wrong; None if nothing is.
    """
    probe: list[Any] = []
    at = id(probe) >> 2

    def counts() -> tuple[int, ...]:
        """Read the count while references are added and removed, one by one and many at a time."""
        before = words[at]
        one_by_one = [probe for _ in range(3)]
        more = words[at]
        one_by_one.clear()
        fewer = words[at]
        many = [probe] * 3
        most = words[at]
        many.clear()
        return before, more, fewer, most, words[at]

    start = words[at]
    if counts() != (start, start + 3, start, start + 3, start) or not 0 < start < IMMORTAL:
        return "the reference count of an object is not where CPython's headers define it"
    words[at] = immortal
    if counts() != (immortal,) * 5:
        return "an object with the immortal reference count is still counted"
    is_immortal: Any = getattr(sys, "_is_immortal", None)  # since 3.14
    if sys.getrefcount(probe) < IMMORTAL or (is_immortal is not None and not is_immortal(probe)):
        return "the interpreter does not treat an object with the immortal reference count as immortal"
    return None


@functools.cache
def unsupported_here() -> str | None:
    """Why this interpreter is not supported; None if it is. Tested once, with one small object that is never freed."""
    build = Build.here()
    reason = unsupported(build)
    if reason is not None:
        return reason
    try:
        words = memory()
    except (ImportError, AttributeError, OSError) as error:
        return f"this Python has no ctypes ({error})"
    return self_test(words, value(build.version))
