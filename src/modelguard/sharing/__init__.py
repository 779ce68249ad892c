"""How much memory a tree of processes actually uses, and where the private memory of each process is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelguard.sharing._memory_report import Places, ProcessReport, TreeReport, TreeWatch, report

__all__ = ["Places", "ProcessReport", "TreeReport", "TreeWatch", "report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Importing one module of this package, modelguard.prefork or modelguard.weights should not import the reports.
    from modelguard import _public
    from modelguard.sharing import _memory_report

    globals().update({public: getattr(_memory_report, public) for public in __all__})
    _public.set_module(globals())
    return globals()[name]
