"""The programs of the corpus: what is known of each, and whether a diagnosis has found it.

Each file in ``corpus/leaks`` and ``corpus/healthy`` is an app with a function ``predict`` and a generator ``inputs``.
Its ``EXPECTED`` is read and not imported:

* ``causes``: all of them, the largest first; ``"a | b"`` where either is right. None of a healthy program;
* ``holders``: of these words one has to be in the evidence, the way to a holder, or the fix. A line of the file that is
  marked ``# LEAK`` will do as well;
* ``calls``: enough for growth that is clear of noise, whatever the time that they take;
* ``libraries``: what it imports and not everybody has;
* ``slow``: it takes longer than CI has, and only the benchmark runs it;
* ``open``: why neither holder nor line is named. The test then does not ask for it; the benchmark counts it as wrong.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelguard.diagnosis import GrowthReport, diagnose

__all__ = ["Outcome", "Program", "diagnosed", "programs"]

CORPUS = Path(__file__).with_name("corpus")

#: Seconds. A third of the longest time that a program may take; it is never reached on a machine that does its work.
_PATIENCE = 80.0
#: The causes that are expected explain at least so much.
_MOST_OF_IT = 0.4


@dataclass(frozen=True)
class Program:
    """A file of the corpus."""

    file: Path
    calls: int
    causes: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    slow: bool = False
    open: str = ""

    @property
    def name(self) -> str:
        return self.file.stem

    @property
    def missing(self) -> list[str]:
        """The libraries that are not installed."""
        return [library for library in self.libraries if importlib.util.find_spec(library) is None]

    @property
    def places(self) -> list[str]:
        """Words of which one has to be named."""
        lines = self.file.read_text(encoding="utf-8").splitlines()
        return [
            *self.holders,
            *(f"{self.file.name}:{number}" for number, line in enumerate(lines, 1) if line.endswith("# LEAK")),
        ]


@dataclass(frozen=True)
class Outcome:
    """What a diagnosis has made of a program.

    Attributes:
        verdict: Whether it grows.
        said: The causes with their shares, in words.
        cause: Whether these are the right ones; of a healthy program, that it is cleared.
        place: Whether the holder or the line is named.
    """

    verdict: str
    said: str
    cause: bool
    place: bool


def programs(folder: str) -> list[Program]:
    """Those in ``"leaks"`` or in ``"healthy"``."""
    return [Program(file, **_expected(file)) for file in sorted((CORPUS / folder).glob("*.py"))]


def _expected(file: Path) -> dict[str, object]:
    last = ast.parse(file.read_text(encoding="utf-8")).body[-1]
    assert isinstance(last, ast.Assign), file
    expected = ast.literal_eval(last.value)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in expected.items()}


def diagnosed(program: Program) -> tuple[GrowthReport, Outcome]:
    """Diagnose a program in a fresh process. By calls and not by time, so that a busy machine changes nothing."""
    report = diagnose(
        f"{program.name}:predict",
        generate=f"{program.name}:inputs",
        calls=program.calls,
        seconds=_PATIENCE,
        cwd=program.file.parent,
        silence=250,
    )
    return report, _outcome(program, report)


def _outcome(program: Program, report: GrowthReport) -> Outcome:
    shares: dict[str, float] = {each.name: 1.0 for each in report.measured.growing if each.name in program.causes}
    shares |= {cause.name: cause.share for cause in report.causes}
    said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    if not program.causes:
        cleared = report.verdict == "steady" and not report.causes and not report.measured.growing
        return Outcome(report.verdict, said, cleared, cleared)
    found = [[name for name in cause.split(" | ") if name in shares] for cause in program.causes]
    explained = sum(shares[name] for names in found for name in names)
    largest = not shares or any(next(iter(shares)) in names for names in found)
    text = " ".join(_evidence(report))
    return Outcome(
        report.verdict,
        f"{said}, {report.unexplained:.0%} unexplained",
        report.verdict == "grows" and all(found) and largest and explained >= _MOST_OF_IT,
        any(place in text for place in program.places),
    )


def _evidence(report: GrowthReport) -> Iterator[str]:
    for each in (*report.causes, *report.measured.growing):
        yield from (each.seen, each.fix)
