"""MG5xx: what the interpreter itself does to memory."""

from __future__ import annotations

from modelguard.diagnosis._checks_servers import MANY_OBJECTS
from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._findings import Check, Evidence, Remedy

__all__ = ["CHECKS"]

_IMMORTAL = (3, 12)  # the first version of CPython with immortal objects

#: The first release that can keep small objects in huge pages.
_HUGE_PAGES = (3, 15)

#: The patches of CPython 3.14 whose garbage collector worked in increments. 3.14.5 went back to that of 3.13.
_INCREMENTAL = (3, 14), range(5)


def _no_immortal_objects(facts: Facts) -> Evidence | None:
    python, server, main = facts.interpreter, facts.server, facts.running("main")
    if python is None or server is None or not server.preforks or not facts.running("forked") or not main:
        return None
    objects = main[0].inside.frozen + main[0].inside.tracked if main[0].inside else 0
    if objects < MANY_OBJECTS:
        return None
    if python.name == "CPython" and python.version >= _IMMORTAL and not python.free_threaded:
        return None
    fix = "If the model consists of many Python objects, use CPython 3.12 or newer, with the GIL."
    return Evidence((f"workers share {objects:,} objects on {python}",), fix, "note")


def _incremental_collector(facts: Facts) -> Evidence | None:
    python = facts.interpreter
    version, patches = _INCREMENTAL
    if python is None or python.name != "CPython" or python.free_threaded:
        return None
    if python.version != version or python.micro not in patches:
        return None
    seen = f"the service runs on CPython 3.14.{python.micro}, whose garbage collector works in increments"
    return Evidence((seen,), "Use CPython 3.14.5 or newer.", "note")


def _huge_pages(facts: Facts) -> Evidence | None:
    setting = facts.last("PYTHON_PYMALLOC_HUGEPAGES")
    built = [process for process in facts.running("forked") if process.inside and process.inside.huge_pages]
    if not built or built[0].inside is None or built[0].inside.version < _HUGE_PAGES or setting is None:
        return None
    if setting.value in ("", "0"):
        return None
    seen = f"{setting.where} sets {setting.name}={setting.value}, and process {built[0].pid} is a fork"
    return Evidence((seen,), f"Remove {setting.name}.", remedy=Remedy(unset=(setting.name,)))


def _debug_allocator(facts: Facts) -> Evidence | None:
    setting = facts.last("PYTHONMALLOC")
    if setting is None or setting.moment != "exec" or not setting.value.endswith("debug"):
        return None
    seen = f"{setting.where} sets {setting.name}={setting.value}"
    return Evidence((seen,), f"Remove {setting.name}.", remedy=Remedy(unset=(setting.name,)))


def _gil_switched_on(facts: Facts) -> Evidence | None:
    found = [process for process in facts.serving if process.inside and process.inside.gil_for is not None]
    if not found or found[0].inside is None:
        return None
    names = ", ".join(found[0].inside.gil_for or ())
    seen = f"process {found[0].pid} is free-threaded, and has switched the GIL on to load {names or 'an extension'}"
    what = names or "the extension that Python's RuntimeWarning names at its import"
    fix = f"Use a release of {what} that supports Python without the GIL, or the ordinary build of Python."
    return Evidence((seen,), fix)


CHECKS = (
    Check(
        "MG501",
        "This Python has no immortal objects",
        "Reading an object changes its reference count, which copies its page in the worker, even if it is frozen. "
        "Since CPython 3.12, objects can be made immortal, and reading them then writes nothing. Tensors and arrays "
        "are not affected: their data has no reference counts.",
        _no_immortal_objects,
    ),
    Check(
        "MG502",
        "This Python's garbage collector lets memory grow",
        "It looks at a part of the heap at a time, so objects in reference cycles stay longer, and memory grows more "
        "before they are freed. Traces, requests and models with cycles look like a leak.",
        _incremental_collector,
    ),
    Check(
        "MG503",
        "Python keeps small objects in huge pages, and workers are forked",
        "A page that a worker writes to must be copied. If no huge page is free at that moment, the kernel ends the "
        "worker with SIGBUS.",
        _huge_pages,
    ),
    Check(
        "MG504",
        "Python's allocator runs with its debug checks",
        "It adds 24 to 32 bytes to every block, fills blocks when they are made and freed, and checks them: more "
        "memory and time for every object. It is meant to find faults of extensions.",
        _debug_allocator,
    ),
    Check(
        "MG505",
        "An extension has switched the GIL back on",
        "A Python without the GIL switches it on when it imports an extension module that does not say that it needs "
        "none. From then on one thread runs at a time, and what the build costs in speed and memory buys nothing.",
        _gil_switched_on,
    ),
)
