"""The CPUs and the memory that this process may use.

Its allocator, its memory readings and its environment variables have their own modules: :mod:`modelguard.allocator`,
:mod:`modelguard.memory`, :mod:`modelguard.presets`.
"""

from modelguard import _public
from modelguard.facts._memory import Cpus, Limit, available_cpus, memory_limit

__all__ = ["Cpus", "Limit", "available_cpus", "memory_limit"]

_public.set_module(globals())
