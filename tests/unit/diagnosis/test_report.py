"""Reports as text and as JSON."""

from __future__ import annotations

import json

import pytest

from modelguard.diagnosis._doctor_report import as_json, as_text, examine
from modelguard.diagnosis._facts import Check, Evidence, Facts, Level, Remedy
from modelguard.errors import InvalidOption


def check(number: str, level: Level | None) -> Check:
    evidence = None if level is None else Evidence(("this was seen",), "do that", level)
    return Check(number, "A title", "Because it matters.", lambda _: evidence)


def test_faults_come_first() -> None:
    """Notes come second, each group by number; checks without findings are not mentioned."""
    checks = [check("MG101", "note"), check("MG102", "fault"), check("MG201", None), check("MG301", "fault")]
    report = examine(Facts("it"), checks)
    assert ["MG102", "MG301", "MG101"] == [finding.number for finding in report.findings]
    assert not report.ok


def test_notes_are_not_faults() -> None:
    """A report with notes only is ok."""
    assert examine(Facts("it"), [check("MG101", "note")]).ok


def test_text() -> None:
    """Each finding has its number, level, evidence, reason, fix and page; then follow unknowns and a verdict."""
    report = examine(Facts("it", unknown=("which app is served",)), [check("MG101", "fault"), check("MG102", None)])
    expected = """\
Examined: it

MG101 fault: A title
  seen  this was seen
  why   Because it matters.
  fix   do that
  more  modelguard docs doctor#mg101

Not known:
  which app is served

1 fault and no notes by 2 checks."""
    assert expected == "\n".join(line for _, line in as_text(report))


def test_text_in_a_narrow_terminal() -> None:
    """Lines are broken between words, and the text of a detail stays in its column."""
    lines = [line for _, line in as_text(examine(Facts("it"), [check("MG101", "fault")]), width=20)]
    assert ["  why   Because it", "        matters."] == [
        line for line in lines if "ecause" in line or "matters" in line
    ]


def test_json() -> None:
    """JSON has the same content."""
    found = json.loads(as_json(examine(Facts("it"), [check("MG101", "fault")])))
    finding = {
        "number": "MG101",
        "title": "A title",
        "level": "fault",
        "seen": ["this was seen"],
        "why": "Because it matters.",
        "fix": "do that",
        "page": "modelguard docs doctor#mg101",
        "remedy": None,
    }
    rest = {"ok": False, "findings": [finding], "unknown": [], "checks": 1, "fix": "", "served": True}
    assert {"subject": "it", **rest} == found


def test_the_fixes_are_one_line() -> None:
    """It is never wrapped, so that it can be pasted."""
    fixable = Check("MG101", "T", "W", lambda _: Evidence(("s",), "f", remedy=Remedy(environ=("A=1",))))
    report = examine(Facts("it", words=("python", "a very long name.py")), [fixable])
    assert "env A=1 python 'a very long name.py'" == report.fix
    assert any(line.endswith(report.fix) for _, line in as_text(report, width=20))


def test_ignored_checks_are_not_run() -> None:
    """An unknown number is an error, so that a typing error does not pass."""
    checks = [check("MG101", "fault"), check("MG102", "fault")]
    assert ["MG102"] == [finding.number for finding in examine(Facts("it"), checks, ignore=["mg101"]).findings]
    with pytest.raises(InvalidOption, match="--ignore"):
        examine(Facts("it"), checks, ignore=["MG999"])


def test_control_characters() -> None:
    """Control characters and bytes that are not text are shown as escapes."""
    subject = examine(Facts("process 1: \x1b[2J\udcff\nx"), []).subject
    assert "process 1: \\x1b[2J\\udcff\\nx" == subject
