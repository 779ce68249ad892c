"""Checks and what they find."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from modelguard.diagnosis._facts import Facts

__all__ = ["Check", "Evidence", "Finding", "Level"]

#: A fault does harm, or a setting without effect. A note may be intended, and does not fail the doctor.
Level = Literal["fault", "note"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a check found.

    Attributes:
        seen: The evidence, each item in one sentence or clause.
        fix: Exactly what to do.
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
        fix: Exactly what to do.
        page: The command that prints more about it.
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
    """One question about the facts.

    Attributes:
        number: Such as ``"MG101"``; numbers are never used again.
        title: What is wrong if it finds something.
        why: Why that matters.
        look: Finds the evidence, or returns None. It looks at nothing but the facts.
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
        page = f"modelguard docs doctor#{self.number.lower()}"
        return Finding(self.number, self.title, evidence.level, evidence.seen, self.why, evidence.fix, page)
