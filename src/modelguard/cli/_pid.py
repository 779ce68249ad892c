"""Process ids as they are written on the command line."""

from __future__ import annotations

import re

from modelguard.errors import InvalidOption

__all__ = ["process_id"]


def process_id(text: str) -> int:
    """Read a process id.

    Raises:
        InvalidOption: It is not one.
    """
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) == 0:
        why = "must be a process id"
        raise InvalidOption("PID", text, why=why, fix="Give one, such as the number in the server's pidfile.")
    return int(text)
