"""The library that serves ``malloc`` in this process: which it is, what it holds, and how to trim it."""

from __future__ import annotations

from modelguard import _public
from modelguard.environment._allocator import (
    AllocatorInfo,
    AllocatorInForce,
    detect,
    in_force,
    restart_threads,
    stats,
    trim,
)
from modelguard.environment._allocator_files import (
    AllocatorFile,
    Figures,
    How,
    Kind,
    Library,
    Problem,
    ProblemKind,
    SmallObjects,
    check_preload,
    find,
)
from modelguard.environment._allocator_problems import Observed, observe

__all__ = [
    "AllocatorFile",
    "AllocatorInForce",
    "AllocatorInfo",
    "Figures",
    "How",
    "Kind",
    "Library",
    "Observed",
    "Problem",
    "ProblemKind",
    "SmallObjects",
    "check_preload",
    "detect",
    "find",
    "in_force",
    "observe",
    "restart_threads",
    "stats",
    "trim",
]

_public.set_module(globals())
