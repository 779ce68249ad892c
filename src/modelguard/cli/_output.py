"""Standard output and standard error of the command, which may be closed, full, or a pipe that nobody reads.

A command prints as if none of this could happen, and comes to its status. What could not be written is known here.
"""

import argparse
import io
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, TypeVar

from modelguard import _units
from modelguard.errors import CannotRun, InvalidOption, ModelGuardError, printable
from modelguard.facts import _redact

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
    own_encoding = (own.encoding, own.errors) if own is not None else ("utf-8", "strict")
    if own_encoding[1] in {"strict", "surrogateescape"}:  # what a terminal cannot show is no reason to show nothing
        own_encoding = own_encoding[0], "backslashreplace"
    raw = _Descriptor(number, "w", closefd=False)
    live = number == 2 or raw.isatty()  # noqa: PLR2004 - as above
    return io.TextIOWrapper(io.BufferedWriter(raw), *own_encoding, line_buffering=live, write_through=live)


def why_lost() -> OSError | None:
    """Why something could not be written to standard output; None if everything was."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, _Descriptor) else None


# What commands say, and the words that they are given.


def fail(command: str, why: object, status: int = USAGE) -> int:
    print(f"modelguard {command}: {printable(' '.join(str(why).split()))}", file=sys.stderr, flush=True)  # noqa: T201
    return status


#: The arguments of the library, as the command line calls them.
_TYPED = {name: f"--{name.replace('_', '-')}" for name in ("allocator", "workers", "distinct_shapes", "cpus", "format")}


def refused(options: argparse.Namespace, error: BaseException) -> int:
    """Say in one line why a command has failed; of an error that nobody expects, everything."""
    from modelguard.control._client import Unreachable

    if isinstance(error, KeyboardInterrupt):
        return fail(options.words[0], "interrupted")
    text = str(error)
    if isinstance(error, OSError):  # no folder can be written, the disk is full, a process is gone or another user's
        text = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if isinstance(error, InvalidOption):
        known = _TYPED | getattr(options, "typed", {})
        text = known.get(error.argument, error.argument) + text.removeprefix(error.argument)
    elif not isinstance(error, ModelGuardError | Unreachable | OSError):
        traceback.print_exception(error)
        return USAGE
    if options.words[0] in ("doctor", "diagnose"):  # what they look at may have told a secret
        text = _redacted(text, [getattr(options, name, None) for name in ("target", "generate", "load")])
    return fail(options.words[0], text, error.status if isinstance(error, CannotRun) else USAGE)


def _redacted(text: str, functions: Iterable[str | None]) -> str:
    """Text without secrets. The functions that were named are none, though tokenizer:encode looks like one."""
    named = "|".join(map(re.escape, filter(None, functions)))
    parts = re.split(f"({named})", text) if named else [text]
    parts[::2] = [_redact.redact(part, os.environ) for part in parts[::2]]
    return "".join(parts)


def refuse(options: argparse.Namespace, names: Iterable[str], why: str, fix: str) -> None:
    """Raise an error if one of these options is given."""
    for name in names:
        if getattr(options, name) not in (None, []):
            raise InvalidOption(f"--{name.replace('_', '-')}", getattr(options, name), why=why, fix=fix)


def add_options(parser: argparse.ArgumentParser, *options: tuple[str, str]) -> None:
    """Add options: each is ``"--flag"``, ``"--name VALUE"``, or ``"--name VALUE..."`` if it may be given again."""
    for written, help_text in options:
        name, _, value = written.partition(" ")
        if not value:
            parser.add_argument(name, action="store_true", help=help_text)
        elif value.endswith("..."):
            parser.add_argument(name, action="append", default=[], metavar=value.removesuffix("..."), help=help_text)
        else:
            parser.add_argument(name, metavar=value, help=help_text)


def behind(options: argparse.Namespace) -> list[str]:
    """The words of the command behind ``--``."""
    words: list[str] = options.command
    return words[1:] if words[:1] == ["--"] else words


T = TypeVar("T")


def whole_number(option: str, text: str | None, example: int, *, default: T) -> int | T:
    """Read a number; argparse would print an error of several lines."""
    if text is None:
        return default
    return _units.whole_number(_units.as_number(text), option, fix=f"Write {option} {example}.")


def duration(option: str, text: str | None, default: float, *, zero: bool = False) -> float:
    """Read a duration; a number alone is one of seconds."""
    if text is None:
        return default
    amount: float | str = text
    with suppress(ValueError):  # then it has a unit
        amount = float(text)
    return _units.seconds(amount, option, zero=zero)


def process_id(text: str) -> int:
    fix = "Give one, such as the number in the server's pidfile."
    return _units.process_id(_units.as_number(text), "PID", fix=fix)
