"""The command ``modelguard``."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from modelguard.cli import _completion, _ctl, _diagnose, _docs, _doctor, _output, _presets, _run, _top

__all__ = ["main"]

USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of modelguard.

    Args:
        argv: Words after the command's name. Default: those of this process.

    Returns:
        The exit status: 0 for success, 1 if the command has failed, 2 if it could not run, or its output could not be
        written. A reader that has closed the pipe, as head does, changes nothing.
    """
    with _output.safely():
        status = _status(argv)
        lost = _output.why_lost()
        if lost is None or isinstance(lost, BrokenPipeError):
            return status
        print(f"modelguard: the output could not be written: {lost.strerror}", file=sys.stderr)  # noqa: T201
    return USAGE


def _status(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="modelguard", description="Keep a model inside a web service from exhausting the machine's memory."
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _completion.add_to(commands, parser)
    _ctl.add_to(commands)
    _diagnose.add_to(commands)
    _docs.add_to(commands)
    _doctor.add_to(commands)
    _presets.add_to(commands)
    _run.add_to(commands)
    _top.add_to(commands)
    options = parser.parse_args(argv)
    options.words = sys.argv[1:] if argv is None else argv
    if options.version:
        print(f"modelguard {_diagnose.version()}")  # noqa: T201 - the output of the command
        return 0
    if "run" not in options:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        print(f"modelguard {options.words[0]}: interrupted", file=sys.stderr)  # noqa: T201
        return USAGE
    except Exception:  # noqa: BLE001 - Python's own status for it is 1, by which commands say what they have found
        traceback.print_exc()
        return USAGE
    return status
