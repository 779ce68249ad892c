"""Prints what the diagnosis has made of each program of the corpus."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The confusion table: each program, what it has, and what was named."""
    rows = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == "confusion"
    ]
    if rows:
        terminalreporter.section("corpus of the diagnosis")
        for target, expected, named in sorted(map(tuple, rows)):
            terminalreporter.write_line(f"{target:34} {expected:32} {named}")
