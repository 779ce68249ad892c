"""Worker processes that share one copy of a model by ``fork``."""

from __future__ import annotations

from modelguard import _public
from modelguard.sharing._graph import Mortal
from modelguard.sharing._hazards import Hazard, HazardKind, find_hazards
from modelguard.sharing._immortal import ImmortalReport, Skipped, immortalize, immortalize_unsupported
from modelguard.sharing._prefork import ForkReport, in_child, prepare

__all__ = [
    "ForkReport",
    "Hazard",
    "HazardKind",
    "ImmortalReport",
    "Mortal",
    "Skipped",
    "find_hazards",
    "immortalize",
    "immortalize_unsupported",
    "in_child",
    "prepare",
]

_public.set_module(globals())
