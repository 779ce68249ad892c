"""A file with the findings that are accepted, so that only new ones fail a build."""

from __future__ import annotations

import json
from pathlib import Path

from modelguard.diagnosis._report import DoctorReport
from modelguard.errors import InvalidOption

__all__ = ["known_findings", "write_baseline"]

_FIX = "Remove the file, and the next run writes it."


def known_findings(file: str) -> frozenset[str] | None:
    """Read the numbers of the findings that a baseline accepts; None if there is no such file.

    Raises:
        InvalidOption: The file cannot be read, or is not a baseline.
    """
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        numbers = content["accepted"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidOption("--baseline", file, why=f"cannot be read ({type(error).__name__})", fix=_FIX) from None
    if not isinstance(numbers, list) or not all(isinstance(number, str) for number in numbers):
        raise InvalidOption("--baseline", file, why="must hold a list of numbers as 'accepted'", fix=_FIX)
    return frozenset(numbers)


def write_baseline(file: str, report: DoctorReport) -> None:
    """Accept all findings of a report.

    Raises:
        InvalidOption: The file cannot be written.
    """
    content = {"accepted": sorted({finding.number for finding in report.findings})}
    try:
        Path(file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidOption("--baseline", file, why=f"cannot be written ({error.strerror})", fix=_FIX) from None
