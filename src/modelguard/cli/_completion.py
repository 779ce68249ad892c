"""``modelguard completion``: a script that completes the commands and options of ``modelguard`` in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from modelguard.cli import _completion_scripts as scripts
from modelguard.cli._completion_scripts import Argument, Command, Kind


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser], whole: argparse.ArgumentParser) -> None:
    """Add the command to those of ``modelguard``.

    Args:
        commands: Where it is added.
        whole: The parser of ``modelguard`` itself, whose commands and options are completed.
    """
    parser = commands.add_parser(
        "completion",
        help="write a script that completes commands and options in bash, zsh or fish",
        description='Writes the script to standard output. bash: eval "$(modelguard completion bash)" in ~/.bashrc; '
        "zsh: the same with zsh in ~/.zshrc, after compinit; fish: modelguard completion fish > "
        "~/.config/fish/completions/modelguard.fish.",
        epilog="exit status: 0 success, 2 the shell is not supported",
    )
    parser.add_argument("shell", choices=tuple(scripts.SHELLS), metavar="SHELL", help=", ".join(scripts.SHELLS))
    parser.set_defaults(run=partial(run, whole=whole))


def run(options: argparse.Namespace, *, whole: argparse.ArgumentParser) -> int:
    """Run the command; returns the exit status."""
    print(scripts.SHELLS[options.shell](list(read(whole))), end="")  # noqa: T201 - the output of the command
    return 0


def read(whole: argparse.ArgumentParser) -> Iterator[Command]:
    """Find the commands in a parser, each with its options and arguments."""
    for action in _actions(whole):
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 - argparse has no public way to list them
            helps = {pseudo.dest: pseudo.help or "" for pseudo in action._choices_actions}  # noqa: SLF001
            for name, parser in action.choices.items():
                arguments = tuple(_argument(name, each) for each in _actions(parser))
                yield Command(name, helps.get(name, ""), arguments)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # noqa: SLF001 - as above


def _argument(command: str, action: argparse.Action) -> Argument:
    flags = tuple(action.option_strings)
    values = tuple(map(str, action.choices or ())) or _known_values(command, action.dest)
    return Argument(
        flags=flags,
        help=(action.help or "") % {"default": action.default, "prog": "modelguard"},
        kind=_kind(action, values),
        values=values,
        repeats=action.nargs in {"*", "+"},
    )


def _kind(action: argparse.Action, values: tuple[str, ...]) -> Kind:
    if action.option_strings and action.nargs == 0:
        return "flag"
    if action.nargs == argparse.REMAINDER:
        return "command"
    if values:
        return "values"
    kinds: Mapping[object, Kind] = {"FILE": "files", "DIR": "files", "PID": "process"}
    return kinds.get(action.metavar, "none")


def _known_values(command: str, dest: str) -> tuple[str, ...]:
    """Values that the command checks by itself, to say what was meant."""
    find = _VALUES.get((command, dest))
    return () if find is None else tuple(find())


def _presets() -> tuple[str, ...]:
    from modelguard import presets

    return presets.names()


def _formats() -> tuple[str, ...]:
    from modelguard.environment._renderings import formats

    return tuple(formats())


def _allocators() -> tuple[str, ...]:
    return ("auto", "jemalloc", "mimalloc", "tcmalloc", "glibc", "none")


def _pages() -> tuple[str, ...]:
    from modelguard.cli._docs import page_names

    return page_names()


_VALUES: Mapping[tuple[str, str], Callable[[], tuple[str, ...]]] = {
    ("docs", "page"): _pages,
    ("presets", "format"): _formats,
    ("presets", "names"): _presets,
    ("run", "allocator"): _allocators,
    ("run", "presets"): _presets,
}
