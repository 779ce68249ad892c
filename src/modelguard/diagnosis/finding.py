"""What a check is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from modelguard.diagnosis.facts import Facts

__all__ = ["Check", "Evidence", "Finding", "Level"]

#: A fault does harm, or does not do what it was set for. A note may be meant that way, and does not fail the doctor.
Level = Literal["fault", "note"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a check saw.

    Attributes:
        seen: Each in one sentence or clause.
        fix: The exact thing to do.
        level: How bad it is.
    """

    seen: tuple[str, ...]
    fix: str
    level: Level = "fault"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        number: Such as ``"MG101"``.
        title: What is wrong, in one line.
        level: How bad it is.
        seen: The evidence.
        why: Why it matters.
        fix: The exact thing to do.
        page: Where more is written about it.
    """

    number: str
    title: str
    level: Level
    seen: tuple[str, ...]
    why: str
    fix: str
    page: str


@dataclass(frozen=True, slots=True)
class Check:
    """A question to the facts.

    Attributes:
        number: Such as ``"MG101"``; numbers are never given anew.
        title: What is wrong where it finds something.
        why: Why that matters.
        look: Finds the evidence, None where there is nothing to find. It looks at the facts and at nothing else.
    """

    number: str
    title: str
    why: str
    look: Callable[[Facts], Evidence | None]

    def __call__(self, facts: Facts) -> Finding | None:
        """Ask."""
        evidence = self.look(facts)
        if evidence is None:
            return None
        page = f"docs/doctor.md#{self.number.lower()}"
        return Finding(self.number, self.title, evidence.level, evidence.seen, self.why, evidence.fix, page)
