"""Standard output and standard error of the command, which may be closed, full, or a pipe that nobody reads.

A command prints as if none of this could happen, and comes to its status. What could not be written is known here.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from modelguard.errors import InvalidOption, printable

#: The exit status of a command that could not run.
USAGE = 2


class _Descriptor(io.FileIO):
    """A descriptor whose first failure is kept, and that takes everything after it without writing it."""

    error: OSError | None = None

    def write(self, data: object, /) -> int:
        if self.error is None:
            try:
                return super().write(data) or 0  # type: ignore[arg-type]
            except OSError as error:
                self.error = error
        return len(memoryview(data))  # type: ignore[arg-type]


@contextmanager
def safely() -> Iterator[None]:
    """Streams that a test or a program has put in place stay."""
    # So that no file gets the number of a closed one, and is written to. A program that is executed finds it closed.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - standard error
        pass
    os.close(number)
    own = (sys.stdout, sys.stderr)
    try:
        if sys.stdout is sys.__stdout__:
            sys.stdout = _stream(1, own[0])
        if sys.stderr is sys.__stderr__:
            sys.stderr = _stream(2, own[1])
        yield
    finally:
        for stream in {sys.stdout, sys.stderr} - {*own}:
            stream.flush()
        sys.stdout, sys.stderr = own


def _stream(number: int, own: TextIO | None) -> TextIO:
    own_encoding = (own.encoding, own.errors) if own is not None else ("utf-8", "backslashreplace")
    raw = _Descriptor(number, "w", closefd=False)
    live = number == 2 or raw.isatty()  # noqa: PLR2004 - as above
    return io.TextIOWrapper(io.BufferedWriter(raw), *own_encoding, line_buffering=live, write_through=live)


def why_lost() -> OSError | None:
    """Why something could not be written to standard output; None if everything was."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, _Descriptor) else None


def is_lost() -> bool:
    return why_lost() is not None


# What commands say, and the words that they are given.


def fail(command: str, why: object, status: int = USAGE) -> int:
    print(f"modelguard {command}: {printable(' '.join(str(why).split()))}", file=sys.stderr, flush=True)  # noqa: T201
    return status


def whole_number(option: str, text: str, example: int) -> int:
    """Read a number; argparse would print an error of several lines."""
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) == 0:
        why = "must be a whole number of at least 1"
        raise InvalidOption(option, text, why=why, fix=f"Write {option} {example}.")
    return int(text)


def process_id(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) == 0:
        why = "must be a process id"
        raise InvalidOption("PID", text, why=why, fix="Give one, such as the number in the server's pidfile.")
    return int(text)
