"""The CPUs and the memory that this process may use.

Its allocator, its memory readings and its environment variables have their own modules: :mod:`modelguard.allocator`,
:mod:`modelguard.memory`, :mod:`modelguard.presets`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelguard.facts._memory import Cpus, Limit, available_cpus, memory_limit

__all__ = ["Cpus", "Limit", "available_cpus", "memory_limit"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Importing one module of this package should not import all of them.
    from modelguard import _public
    from modelguard.facts import _memory

    found = {"Cpus": _memory.Cpus, "available_cpus": _memory.available_cpus}
    globals().update(found, Limit=_memory.Limit, memory_limit=_memory.memory_limit)
    _public.set_module(globals())
    return globals()[name]
