"""Run all checks, and write the report."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePath
from typing import Any

from modelguard.diagnosis import _doctor_checks
from modelguard.diagnosis._facts import Check, Facts, Finding, Remedy
from modelguard.errors import InvalidOption, printable
from modelguard.facts._redact import HIDDEN

# All fixes that the command can make, merged into one line to paste.


_ASSIGNMENT = re.compile(r"([^=-][^=]*)=")
_OF_THE_SHELL = '"$GUNICORN_CMD_ARGS '


def one_line(findings: Iterable[Finding], words: Sequence[str], server: str) -> str:
    """Write the command so that it contains every fix that a command can contain."""
    remedies = [finding.remedy for finding in findings if finding.remedy is not None]
    if not words:
        return ""
    merged = {field.name: [word for each in remedies for word in getattr(each, field.name)] for field in fields(Remedy)}
    environ = {name: value for name, _, value in (each.partition("=") for each in merged["environ"])}
    unset = [name for name in dict.fromkeys(merged["unset"]) if name not in environ]
    command = _without(words, {*unset, *environ}, set(merged["drop"]))
    options, run = _once(each.options for each in remedies), _once(each.run for each in remedies)
    if any(PurePath(word).name == server for word in command):
        command += options
    elif server == "gunicorn" and options:
        # Behind what stands there already: the last of two options decides.
        own = [word for word in command if word.startswith("GUNICORN_CMD_ARGS=")]
        command = [f"{word} {shlex.join(options)}" if word in own else word for word in command]
        environ |= {} if own else {"GUNICORN_CMD_ARGS": f'{_OF_THE_SHELL}{shlex.join(options)}"'}
    if run:
        command = ["modelguard", "run", *run, "--", *command]
    if unset or environ:
        removed = [part for name in unset for part in ("-u", name)]
        command = ["env", *removed, *(f"{name}={value}" for name, value in environ.items()), *command]
    if command == list(words) and not merged["before"]:
        return ""  # a program that starts its server itself cannot be given options
    line = " ".join(word if HIDDEN in word or _OF_THE_SHELL in word else shlex.quote(word) for word in command)
    return " && ".join([*dict.fromkeys(merged["before"]), line])


def _once(options: Iterable[tuple[str, ...]]) -> list[str]:
    """Options with their values, each once: the first decides."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for words in options:
        found.setdefault(words[:1], words)
    return [word for words in found.values() for word in words]


def _without(words: Sequence[str], names: set[str], drop: set[str]) -> list[str]:
    """The command without its own settings of these variables, and without these options: "=" stands for a value."""
    kept: list[str] = []
    in_front, before = True, ""
    for word in words:
        assigned = _ASSIGNMENT.match(word)
        in_front = in_front and (assigned is not None or word.startswith("-") or PurePath(word).name == "env")
        # With its value: behind "=", or the next word.
        dropped = {word, f"{word.partition('=')[0]}=", f"{before}="} & drop
        if not (in_front and assigned and assigned[1] in names) and not dropped:
            kept.append(word)
        before = word
    of_env = len(kept) > 1 and (kept[1].startswith("-") or _ASSIGNMENT.match(kept[1]))
    return kept[1:] if len(kept) > 1 and kept[0] == "env" and not of_env else kept


# All checks, by number: MG1xx the allocator, 2xx presets, 3xx memory, 4xx servers, 5xx the interpreter.

CHECKS: tuple[Check, ...] = tuple(
    sorted((each for each in vars(_doctor_checks).values() if isinstance(each, Check)), key=lambda each: each.number)
)

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
    unknown = tuple(map(printable, facts.unknown))
    fix = printable(one_line(findings, facts.words, facts.server.kind))
    return DoctorReport(printable(facts.subject), tuple(findings), unknown, len(run), fix, facts.served)


def as_json(report: DoctorReport) -> str:
    return json.dumps({"ok": report.ok, **asdict(report)}, indent=2)


def as_text(report: DoctorReport, width: int | None = None) -> Iterator[tuple[str, str]]:
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
        details = [*(("seen", each) for each in finding.seen), ("why", finding.why), ("fix", finding.fix)]
        details.append(("more", finding.page))  # under python -OO there are no docstrings, and none says why
        yield from (("detail", f"  {name:4}  {printable(text)}") for name, text in details if text)
    if report.unknown:
        yield "detail", ""
        yield "unknown", "Not known:"
        yield from (("unknown", f"  {sentence}") for sentence in report.unknown)
    if report.fix:
        yield "detail", ""
        yield "fix", f"All fixes that the command can contain: {report.fix}"
    yield "detail", ""
    faults, notes = len(report.faults), len(report.findings) - len(report.faults)
    numbers = ((faults, "fault"), (notes, "note"))
    counted = [f"{number or 'no'} {word}{'' if number == 1 else 's'}" for number, word in numbers]
    unserved = "" if report.served else " It did not serve, so most of it could not be seen."
    yield "verdict", f"{' and '.join(counted)} by {report.checks} checks.{unserved}"


# A file with the findings that are accepted, so that only new ones fail a build.


def without_accepted(report: DoctorReport, file: str) -> DoctorReport:
    """The report without the findings that the file accepts. A missing file is written, and accepts all of them."""
    numbers: Any = sorted({finding.number for finding in report.findings})
    why = "must hold a list of numbers as 'accepted'"
    try:
        numbers = json.loads(Path(file).read_text(encoding="utf-8"))["accepted"]
    except FileNotFoundError:
        try:
            Path(file).write_text(json.dumps({"accepted": numbers}, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            numbers, why = None, f"cannot be written ({error.strerror})"
    except (OSError, ValueError, KeyError, TypeError) as error:
        numbers, why = None, f"cannot be read ({type(error).__name__})"
    if not isinstance(numbers, list) or not all(isinstance(number, str) for number in numbers):
        raise InvalidOption("--baseline", file, why=why, fix="Remove the file, and the next run writes it.")
    return report.without(numbers)
