"""The logger of the whole library."""

from __future__ import annotations

import logging

from modelguard import _units


def _in_one_line(record: logging.LogRecord) -> bool:
    """Escape what would begin a line of its own, or control a terminal: names and the texts of errors are not ours."""
    if isinstance(record.args, tuple):
        record.args = tuple(
            _units.printable(str(value)) if isinstance(value, str | BaseException) else value for value in record.args
        )
    return True


logger = logging.getLogger("modelguard")
logger.addHandler(logging.NullHandler())
logger.addFilter(_in_one_line)
