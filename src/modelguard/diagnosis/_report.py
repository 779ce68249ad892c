"""Run all checks, and write the report."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from modelguard.diagnosis._checks import CHECKS
from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._findings import Check, Finding
from modelguard.diagnosis._remedies import one_line
from modelguard.errors import InvalidOption

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
        fix: The command with all fixes that a command can contain, in one line to paste; empty if there is none.
        served: Whether the service served when it was examined. If it did not, most of it could not be seen.
    """

    subject: str
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    checks: int
    fix: str = ""
    served: bool = True

    @property
    def ok(self) -> bool:
        """Whether it served and there is no fault. Notes may be intended."""
        return self.served and not self.faults

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are faults."""
        return tuple(finding for finding in self.findings if finding.level == "fault")

    def without(self, numbers: Collection[str]) -> DoctorReport:
        """The report without the findings of these numbers. The line with all fixes stays as it is."""
        findings = tuple(finding for finding in self.findings if finding.number not in numbers)
        return replace(self, findings=findings, fix=self.fix if findings else "")


def examine(facts: Facts, checks: Iterable[Check] = CHECKS, *, ignore: Iterable[str] = ()) -> DoctorReport:
    """Run all checks.

    Args:
        facts: The facts about the service.
        checks: The checks. Default: all.
        ignore: The numbers of checks that are not run.

    Raises:
        InvalidOption: There is no check of that number.
    """
    ignored = {number.upper() for number in ignore}
    known = tuple(checks)
    for number in ignored - {check.number for check in known}:
        fix = f"The numbers are {known[0].number} to {known[-1].number}, as in the findings." if known else ""
        raise InvalidOption("--ignore", number, why="must be the number of a check", fix=fix)
    run = tuple(check for check in known if check.number not in ignored)
    findings = [finding for check in run if (finding := check(facts)) is not None]
    findings.sort(key=lambda finding: (finding.level != "fault", finding.number))
    server = facts.server.kind if facts.server else None
    return DoctorReport(
        _printable(facts.subject),
        tuple(findings),
        tuple(map(_printable, facts.unknown)),
        len(run),
        _printable(one_line(findings, facts.words, server)),
        facts.served,
    )


def as_json(report: DoctorReport) -> str:
    """Write a report as JSON, for programs."""
    content = {
        "subject": report.subject,
        "ok": report.ok,
        "served": report.served,
        "findings": [asdict(finding) for finding in report.findings],
        "unknown": report.unknown,
        "fix": report.fix,
    }
    return json.dumps(content, indent=2)


def as_text(report: DoctorReport, width: int | None = None) -> Iterator[tuple[str, str]]:
    """Write a report as text, for users.

    Args:
        report: The report.
        width: The column at which lines are wrapped. Default: lines are not wrapped, so that they can be searched.

    Yields:
        Lines, each with a style: ``"subject"``, ``"fault"``, ``"note"``, ``"detail"``,
        ``"unknown"``, ``"fix"`` or ``"verdict"``.
    """
    for style, line in _lines(report):
        if width is None or len(line) <= width or style == "fix":  # a line to paste stays one line
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
    if report.fix:
        yield "detail", ""
        yield "fix", f"All fixes that the command can contain: {report.fix}"
    yield "detail", ""
    yield "verdict", _verdict(report)


def _verdict(report: DoctorReport) -> str:
    faults, notes = len(report.faults), len(report.findings) - len(report.faults)
    verdict = f"{_count(faults, 'fault')} and {_count(notes, 'note')} by {report.checks} checks."
    return verdict if report.served else f"{verdict} It did not serve, so most of it could not be seen."


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def _printable(text: str) -> str:
    """Escape characters that control a terminal, or that a stream cannot encode."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
