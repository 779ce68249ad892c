"""Checks, and the findings that they report."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from modelguard.diagnosis._facts import Facts

__all__ = ["Check", "Evidence", "Finding", "Level", "Remedy"]

#: A fault does harm, or is a setting without effect. A note may be intended, and does not make the doctor fail.
Level = Literal["fault", "note"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A fix as changes to the command that starts the service.

    Attributes:
        environ: Variables to set, as ``NAME=VALUE``.
        unset: Variables to remove.
        run: Options of ``modelguard run``.
        options: Options to add to the server's own.
        drop: Words to remove from the command.
        before: Shell commands to run before it.
    """

    environ: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a check found.

    Attributes:
        seen: The evidence, each item a sentence or clause.
        fix: Exactly what to do.
        level: How serious it is.
        remedy: The fix as changes to the command; None if the command cannot change it.
    """

    seen: tuple[str, ...]
    fix: str
    level: Level = "fault"
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, or a possible problem.

    Attributes:
        number: Such as ``"MG101"``.
        title: What is wrong, in one line.
        level: How serious it is.
        seen: The evidence.
        why: Why it matters.
        fix: Exactly what to do.
        page: The command that prints more about it.
        remedy: The fix as changes to the command; None if the command cannot change it.
    """

    number: str
    title: str
    level: Level
    seen: tuple[str, ...]
    why: str
    fix: str
    page: str
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check for one problem.

    Attributes:
        number: Such as ``"MG101"``; numbers are never reused.
        title: The problem, in one line.
        why: Why it matters.
        find: Finds the evidence in the facts, or returns None.
    """

    number: str
    title: str
    why: str
    find: Callable[[Facts], Evidence | None]

    def __call__(self, facts: Facts) -> Finding | None:
        """Run the check."""
        evidence = self.find(facts)
        if evidence is None:
            return None
        page = f"modelguard docs doctor#{self.number.lower()}"
        return Finding(
            self.number, self.title, evidence.level, evidence.seen, self.why, evidence.fix, page, evidence.remedy
        )
