"""How many processes live on one copy of a model, and what they really hold."""

from __future__ import annotations

from modelguard.sharing.reporting import Places, ProcessReport, TreeReport, TreeWatch, report

__all__ = ["Places", "ProcessReport", "TreeReport", "TreeWatch", "report"]
