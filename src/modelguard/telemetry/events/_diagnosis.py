"""What ``modelguard.diagnosis.watch`` reports."""

from __future__ import annotations

from dataclasses import dataclass

from modelguard.telemetry.events._base import Event


@dataclass(frozen=True, kw_only=True)
class GrowthFound(Event):
    """``modelguard.diagnosis.watch`` has decided that the memory of this process grows with its calls, and why.

    Attributes:
        guard: The name that ``watch`` was given.
        cause: The main cause, such as ``"spacy strings"``; None if none is known.
        share: Its share of the growth, from 0 to 1.
        seen: The evidence, in a sentence.
        fix: What to do.
        growth: Bytes by which private memory grew while it was watched.
        calls: Calls meanwhile; milliseconds if no calls are counted.
    """

    cause: str | None
    share: float
    seen: str
    fix: str
    growth: int
    calls: int
