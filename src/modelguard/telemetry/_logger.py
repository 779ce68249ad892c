"""The logger of the whole library."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from modelguard import _units


def _in_one_line(record: logging.LogRecord) -> bool:
    """Escape what would begin a line of its own, or control a terminal: names and the texts of errors are not ours."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_printable, record.args))
    elif isinstance(record.args, Mapping) and "%(" in str(record.msg):  # else it is shown as a whole, by its repr
        record.args = {name: _printable(value) for name, value in record.args.items()}
    return True


def _printable(value: object) -> object:
    if not isinstance(value, str | BaseException):
        return value
    try:
        return _units.printable(str(value))
    except Exception:  # noqa: BLE001 - its own code; handlers report it, and do not raise into whoever logs
        return value


logger = logging.getLogger("modelguard")
logger.addHandler(logging.NullHandler())
logger.addFilter(_in_one_line)
