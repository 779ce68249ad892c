"""How many processes share one copy of a model, and what they really hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelguard.sharing._places import Places
    from modelguard.sharing._reports import ProcessReport, TreeReport, TreeWatch, report

__all__ = ["Places", "ProcessReport", "TreeReport", "TreeWatch", "report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The modules of this package do not need the reports, nor do modelguard.prefork and modelguard.weights.
    from modelguard import _public
    from modelguard.sharing import _reports

    globals().update({public: getattr(_reports, public) for public in __all__})
    _public.set_module(globals())
    return globals()[name]
