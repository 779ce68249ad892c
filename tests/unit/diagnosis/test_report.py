"""Reports as text and as JSON."""

from __future__ import annotations

import json

from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._findings import Check, Evidence, Level
from modelguard.diagnosis._report import as_json, as_text, examine


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
    }
    assert {"subject": "it", "ok": False, "findings": [finding], "unknown": []} == found


def test_control_characters() -> None:
    """Control characters and bytes that are not text are shown as escapes."""
    subject = examine(Facts("process 1: \x1b[2J\udcff\nx"), []).subject
    assert "process 1: \\x1b[2J\\udcff\\nx" == subject
