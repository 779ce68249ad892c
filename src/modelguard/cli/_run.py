"""``modelguard run``: becomes another command, with the right environment from its start."""

from __future__ import annotations

import argparse
import functools
import operator
import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from modelguard.errors import CannotRun, InvalidOption, ModelGuardError

if TYPE_CHECKING:
    from modelguard.environment._presets import Preset

USAGE = 2

#: The options with the numbers of a preset. Parsed here and not by argparse, which prints errors of several lines.
_SIZES = {"--workers": "workers", "--distinct-shapes": "distinct_shapes"}

#: The arguments of the library, as the command line calls them.
_TYPED = {"name": "--preset", "allocator": "--allocator"}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``modelguard``."""
    parser = commands.add_parser(
        "run",
        usage="modelguard run [--preset NAME]... [--allocator NAME] [options] -- COMMAND ...",
        help="start a command with presets and an allocator in force from its start",
        description="Set the variables that a program needs at its start, and become the command: the process id "
        "stays, and signals and the exit status are the command's own. Variables that are already set win.",
        epilog="exit status: the command's own, or 2 usage, 126 the command cannot be executed, 127 it was not found",
    )
    parser.add_argument(
        "--preset", action="append", default=[], dest="presets", metavar="NAME", help="may be given several times"
    )
    parser.add_argument(
        "--allocator",
        default="none",
        metavar="NAME",
        help="auto (the best that is installed), jemalloc, mimalloc, tcmalloc, glibc (made to return freed memory), "
        "or none (no change), default: %(default)s",
    )
    parser.add_argument("--workers", metavar="N", help="processes that share the CPUs, default: 1")
    parser.add_argument(
        "--distinct-shapes", metavar="N", help="how many different input shapes the traffic has, if known"
    )
    parser.add_argument("--print", action="store_true", help="print the command as a shell command, and exit")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="the command")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns only if this process has not become another program."""
    from modelguard.environment import _launcher

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        preset = _preset(options)
        plan = _launcher.plan(command, preset=preset, allocator=options.allocator)
        nothing = _note_on_nothing_set(options)
        for note in plan.notes or nothing:
            _say(note)
        if not options.print:
            if not nothing:
                _say(plan.in_force)
            _launcher.become(plan)
    except CannotRun as error:
        _say(str(error))
        return error.status
    except InvalidOption as error:
        _say(_as_typed(error))
        return USAGE
    except ModelGuardError as error:
        _say(str(error))
        return USAGE
    # As bytes: arguments and variables do not have to be valid text.
    sys.stdout.buffer.write(os.fsencode(f"{plan}\n"))
    return 0


def _preset(options: argparse.Namespace) -> Preset | None:
    given = {option: text for option, name in _SIZES.items() if (text := getattr(options, name)) is not None}
    sizes = {_SIZES[option]: _whole_number(option, text) for option, text in given.items()}
    if not options.presets:
        for option, text in given.items():
            why = "requires a preset"
            raise InvalidOption(option, text, why=why, fix="Add one, such as --preset torch-cpu.")
        return None
    from modelguard.environment import _presets

    for name in options.presets:
        if "," in name:
            fix = f"Write {' '.join(f'--preset {each}' for each in name.split(','))}."
            raise InvalidOption("--preset", name, why="must be one name", fix=fix)
    return functools.reduce(operator.or_, [_presets.get(name, **sizes) for name in options.presets])


def _note_on_nothing_set(options: argparse.Namespace) -> list[str]:
    if options.presets or options.allocator != "none":
        return []
    return ["nothing is set, because neither --preset nor --allocator is given"]


def _whole_number(option: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise InvalidOption(option, text, why="must be a whole number of at least 1", fix=f"Write {option} 4.")
    return int(text)


def _as_typed(error: InvalidOption) -> str:
    """The message, with the option as it is written on the command line."""
    option = _TYPED.get(error.argument, error.argument)
    return option + str(error).removeprefix(error.argument)


def _say(line: str) -> None:
    with suppress(OSError):  # if stderr is closed, the command should still start
        print(f"modelguard run: {line}", file=sys.stderr, flush=True)  # noqa: T201
