"""The command ``modelguard``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast, get_args

from modelguard import _extras, _units
from modelguard.cli import _docs, _doctor, _output, _run, _top
from modelguard.cli._output import USAGE
from modelguard.errors import InvalidOption

SHELLS = ("bash", "zsh", "fish")


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


class _Parser(argparse.ArgumentParser):
    """Refuses an unknown argument where its command's own options are known, and names the nearest of them."""

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        found, unknown = super().parse_known_args(*args, **kwargs)
        if unknown:
            near = _units.nearest(unknown[0].partition("=")[0], self._option_string_actions).strip()
            fix = near or f"{self.prog} --help shows what it takes."
            self.error(f"unrecognized arguments: {' '.join(unknown)}. {fix}")
        return found, unknown


def _status(argv: Sequence[str] | None) -> int:
    description = "Keep a model inside a web service from exhausting the machine's memory."
    parser = cast("argparse.ArgumentParser", _Parser(prog="modelguard", description=description))
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_completion(commands, parser)
    _run.add_ctl(commands)
    _doctor.add_diagnose(commands)
    _docs.add_to(commands)
    _doctor.add_doctor(commands)
    _run.add_presets(commands)
    _run.add_run(commands)
    _top.add_to(commands)
    options = parser.parse_args(argv)
    options.words = sys.argv[1:] if argv is None else argv
    if options.version:
        print(f"modelguard {_doctor.version()}")  # noqa: T201 - the output of the command
        return 0
    if "run" not in options:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        status: int = options.run(options)
    # Python's own status for it is 1, by which commands say what they have found.
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        return _output.refused(options, error)
    return status


# ``modelguard completion``: a script that completes commands and options in a shell. shtab writes it.

#: Functions of bash for what shtab has no name for.
_BASH = """\
_modelguard_pids() { compgen -W "$(cd /proc && echo [0-9]*)" -- "$1"; }
_modelguard_command() { compgen -c -- "$1"; }
"""
_PIDS = {"bash": "_modelguard_pids", "zsh": "_pids", "fish": "(__fish_complete_pids)"}
_COMMANDS = {"bash": "_modelguard_command", "zsh": "_command_names -e", "fish": "(__fish_complete_command)"}


def _add_completion(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser
) -> None:
    parser = commands.add_parser(
        "completion",
        help="write a script that completes commands and options in bash, zsh or fish",
        description='Writes the script to standard output. bash: eval "$(modelguard completion bash)" in ~/.bashrc; '
        "zsh: the same with zsh in ~/.zshrc, after compinit; fish: modelguard completion fish > "
        "~/.config/fish/completions/modelguard.fish. It requires the extra cli.",
        epilog="exit status: 0 success, 2 the shell is not supported, or shtab is not installed",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=partial(_complete, whole=whole, commands=commands.choices))


def _complete(
    options: argparse.Namespace, *, whole: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]
) -> int:
    shtab = _extras.load("shtab", "modelguard completion")
    known = _known_words()
    completed = {"FILE": shtab.FILE, "DIR": shtab.DIRECTORY, "PID": _PIDS, "-- COMMAND ...": _COMMANDS}
    for name, parser in commands.items():
        for action in parser._actions:  # noqa: SLF001 - argparse has no public way to list them
            action.choices = known.get((name, action.dest), action.choices)
            if action.metavar in completed:
                action.complete = completed[str(action.metavar)]  # type: ignore[attr-defined] # read by shtab
    print(shtab.complete(whole, options.shell, preamble={"bash": _BASH}))  # noqa: T201 - the output of the command
    return 0


def _known_words() -> dict[tuple[str, str], Iterable[str]]:
    from modelguard import presets
    from modelguard.environment import _launcher, _presets

    pages: tuple[str, ...] = ()
    with suppress(InvalidOption):  # they are not installed
        pages = tuple(_docs.pages())
    return {
        ("docs", "page"): pages,
        ("presets", "format"): get_args(_presets.Format),
        ("presets", "names"): presets.names(),
        ("run", "allocator"): get_args(_launcher.Allocator),
        ("run", "preset"): presets.names(),
    }
