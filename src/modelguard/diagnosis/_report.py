"""Run all checks, and write the report."""

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from modelguard.diagnosis._checks import CHECKS
from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._findings import Check, Finding

__all__ = ["DoctorReport", "as_json", "as_text", "examine"]

#: The column at which the text of a detail begins.
_INDENT = 8


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The result of all checks.

    Attributes:
        subject: What was examined.
        findings: Faults first, then notes, each by number.
        unknown: What could not be determined, in sentences.
        checks: The number of checks that were run.
    """

    subject: str
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    checks: int

    @property
    def ok(self) -> bool:
        """Whether there is no fault. Notes may be intended."""
        return not self.faults

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are faults."""
        return tuple(finding for finding in self.findings if finding.level == "fault")


def examine(facts: Facts, checks: Iterable[Check] = CHECKS) -> DoctorReport:
    """Run all checks.

    Args:
        facts: The facts about the service.
        checks: The checks. Default: all.
    """
    run = tuple(checks)
    findings = [finding for check in run if (finding := check(facts)) is not None]
    findings.sort(key=lambda finding: (finding.level != "fault", finding.number))
    return DoctorReport(_printable(facts.subject), tuple(findings), tuple(map(_printable, facts.unknown)), len(run))


def as_json(report: DoctorReport) -> str:
    """Write a report as JSON, for programs."""
    content = {
        "subject": report.subject,
        "ok": report.ok,
        "findings": [asdict(finding) for finding in report.findings],
        "unknown": report.unknown,
    }
    return json.dumps(content, indent=2)


def as_text(report: DoctorReport, width: int | None = None) -> Iterator[tuple[str, str]]:
    """Write a report as text, for users.

    Args:
        report: The report.
        width: The column at which lines are wrapped. Default: lines are not wrapped, so that they can be searched.

    Yields:
        Lines, each with a style: ``"subject"``, ``"fault"``, ``"note"``, ``"detail"``,
        ``"unknown"`` or ``"verdict"``.
    """
    for style, line in _lines(report):
        if width is None or len(line) <= width:
            yield style, line
            continue
        indent = " " * _INDENT if style == "detail" else "  "
        yield from ((style, part) for part in textwrap.wrap(line, width, subsequent_indent=indent))


def _lines(report: DoctorReport) -> Iterator[tuple[str, str]]:
    yield "subject", f"Examined: {report.subject}"
    for finding in report.findings:
        yield "detail", ""
        yield finding.level, f"{finding.number} {finding.level}: {finding.title}"
        for seen in finding.seen:
            yield "detail", f"  seen  {_printable(seen)}"
        yield "detail", f"  why   {finding.why}"
        yield "detail", f"  fix   {_printable(finding.fix)}"
        yield "detail", f"  more  {finding.page}"
    if report.unknown:
        yield "detail", ""
        yield "unknown", "Not known:"
        for sentence in report.unknown:
            yield "unknown", f"  {sentence}"
    yield "detail", ""
    yield "verdict", _verdict(report)


def _verdict(report: DoctorReport) -> str:
    faults, notes = len(report.faults), len(report.findings) - len(report.faults)
    return f"{_count(faults, 'fault')} and {_count(notes, 'note')} by {report.checks} checks."


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def _printable(text: str) -> str:
    """Escape characters that control a terminal, or that a stream cannot encode."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
