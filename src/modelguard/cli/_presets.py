"""``modelguard presets``: shows the variables of presets, or writes them in the format of a configuration file."""

from __future__ import annotations

import argparse
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

from modelguard.environment import _presets
from modelguard.environment._presets import formats
from modelguard.errors import InvalidOption

USAGE = 2

# The options with the numbers of a preset, and their types.
_SIZES: dict[str, Callable[[str], float]] = {"workers": int, "distinct_shapes": int, "cpus": float}

#: The arguments of the library, as the command line calls them.
_TYPED = {
    "name": "NAME",
    "workers": "--workers",
    "distinct_shapes": "--distinct-shapes",
    "cpus": "--cpus",
    "format": "--format",
}


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of ``modelguard``."""
    parser = commands.add_parser(
        "presets",
        help="list and explain presets of environment variables, or write them for a Dockerfile, a unit, ...",
        description="Without a name, list the presets. With names, explain every variable that they set: its value, "
        "when it is read, what it does and what it costs. If two presets set the same variable, the later one wins.",
        epilog="exit status: 0 success, 2 there is no such preset or format, or a number is out of range",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="presets, combined in this order")
    parser.add_argument("--workers", metavar="N", help="processes that share the CPUs, default: 1")
    parser.add_argument("--cpus", metavar="N", help="CPUs that they share, default: what this process may use")
    parser.add_argument(
        "--distinct-shapes", metavar="N", help="how many different input shapes the traffic has, if known"
    )
    parser.add_argument("--format", metavar="F", help=f"write the variables instead, for: {', '.join(formats())}")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        print(_answer(options), end="")  # noqa: T201 - the output of the command
    except InvalidOption as error:
        option = _TYPED.get(error.argument, error.argument)
        print(f"modelguard presets: {option}{str(error).removeprefix(error.argument)}", file=sys.stderr)  # noqa: T201
        return USAGE
    return 0


def _answer(options: argparse.Namespace) -> str:
    sizes = {name: _number(text, kind) for name, kind in _SIZES.items() if (text := getattr(options, name)) is not None}
    if options.names:
        preset = functools.reduce(operator.or_, [_presets.get(name, **sizes) for name in options.names])
        return f"{preset.explain()}\n" if options.format is None else preset.render(options.format)
    if options.format is not None:
        why = "requires the name of a preset"
        raise InvalidOption("--format", options.format, why=why, fix="Add one, such as torch-cpu.")
    return _table()


def _number(text: str, kind: Callable[[str], float]) -> Any:
    """Convert a number; other text is returned unchanged, and the preset rejects it with a message of one line."""
    try:
        return kind(text)
    except ValueError:
        return text


def _table() -> str:
    width = max(map(len, _presets.names()))
    lines = [f"{name:{width}}  {_presets.describe(name)}" for name in _presets.names()]
    return "\n".join([*lines, "", "modelguard presets NAME... explains what they set.\n"])
