"""``modelguard completion``: a script that completes the commands and options of ``modelguard`` in a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

# The scripts that complete the words of ``modelguard`` in bash, zsh and fish.


#: What an argument takes: nothing, one of some words, a file, a process id, a command with its own words, or something
#: that cannot be completed.
Kind = Literal["flag", "values", "files", "process", "command", "none"]


@dataclass(frozen=True)
class Argument:
    """An option or a positional argument.

    Attributes:
        flags: How the option is written; empty for a positional argument.
        help: What it is, in one line.
        kind: What it takes.
        values: The words that it takes.
        repeats: Whether a positional argument takes any number of words.
    """

    flags: tuple[str, ...]
    help: str
    kind: Kind
    values: tuple[str, ...] = ()
    repeats: bool = False


@dataclass(frozen=True)
class Command:
    """A command of ``modelguard``."""

    name: str
    help: str
    arguments: tuple[Argument, ...]

    @property
    def flags(self) -> list[str]:
        """All its options as they are written."""
        return [flag for argument in self.arguments for flag in argument.flags]

    @property
    def taking_values(self) -> list[tuple[str, Argument]]:
        """Its options that take a word, each as it is written."""
        return [(flag, each) for each in self.arguments for flag in each.flags if each.kind != "flag"]

    @property
    def positional(self) -> list[Argument]:
        """Its arguments without a name, in their order."""
        return [argument for argument in self.arguments if not argument.flags]


_TOP = ("--help", "--version")

_BASH = """\
# Completion of modelguard for bash, written by `modelguard completion bash`.
_modelguard() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
    local word skip= position=0
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W {top} -- "$current") )
        return
    fi
    if [[ $current == = ]]; then current=; elif [[ $previous == = ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    for word in "${{COMP_WORDS[@]:2:COMP_CWORD-2}}"; do
        if [[ $word == -- ]]; then
            if [[ $previous == -- ]]; then COMPREPLY=( $(compgen -c -- "$current") ); fi
            return
        fi
        if [[ $word == = ]]; then continue; fi
        if [[ -n $skip ]]; then skip=; continue; fi
        case "$command $word" in
            {taking}) skip=1;;
            *' -'*) ;;
            *) (( position += 1 ));;
        esac
    done
    case "$command $previous" in
{options}
    esac
    if [[ $current == -* ]]; then
        case $command in
{flags}
        esac
        return
    fi
    case "$command $position" in
{positional}
    esac
    compopt +o default 2>/dev/null
}}
complete -o default -F _modelguard modelguard
"""

_ZSH = """\
#compdef modelguard
# Completion of modelguard for zsh, written by `modelguard completion zsh`.
_modelguard() {{
    local current=${{words[CURRENT]}} previous=${{words[CURRENT-1]}} command=${{words[2]}}
    local word skip= position=0
    local -a commands=(
{top}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        compadd -- --help --version
        return
    fi
    for word in "${{(@)words[3,CURRENT-1]}}"; do
        if [[ $word == -- ]]; then
            if [[ $previous == -- ]]; then _command_names -e; else _files; fi
            return
        fi
        if [[ -n $skip ]]; then skip=; continue; fi
        case "$command $word" in
            {taking}) skip=1;;
            *' -'*) ;;
            *) (( position += 1 ));;
        esac
    done
    case "$command $previous" in
{options}
    esac
    if [[ $current == -* ]]; then
        case $command in
{flags}
        esac
        return
    fi
    case "$command $position" in
{positional}
    esac
}}
if [[ ${{funcstack[1]-}} == _modelguard ]]; then _modelguard "$@"; else compdef _modelguard modelguard; fi
"""


def _bash_words(argument: Argument) -> str:
    """What completes the word of an argument in bash."""
    if argument.kind == "values":
        return f'COMPREPLY=( $(compgen -W {_words(argument.values)} -- "$current") )'
    if argument.kind == "process":
        return 'COMPREPLY=( $(compgen -W "$(cd /proc && echo [0-9]*)" -- "$current") )'
    # An empty answer is completed with files by -o default.
    return ":" if argument.kind in {"files", "command"} else "compopt +o default 2>/dev/null"


def _zsh_words(argument: Argument) -> str:
    """What completes the word of an argument in zsh."""
    if argument.kind == "values":
        return f"compadd -- {' '.join(map(shlex.quote, argument.values))}"
    return {"process": "_pids", "files": "_files", "command": "_files"}.get(argument.kind, ":")


def bash(commands: Sequence[Command]) -> str:
    """The script for bash."""
    return _BASH.format(
        top=_words((*(command.name for command in commands), *_TOP)),
        flags=_cases(
            (command.name, f'COMPREPLY=( $(compgen -W {_words(command.flags)} -- "$current") )') for command in commands
        ),
        **_shared(commands, _bash_words),
    )


def zsh(commands: Sequence[Command]) -> str:
    """The script for zsh."""
    described = (f"{command.name}:{command.help}" for command in commands)
    return _ZSH.format(
        top="\n".join(f"        {shlex.quote(line)}" for line in described),
        flags=_cases((command.name, f"compadd -- {' '.join(command.flags)}") for command in commands),
        **_shared(commands, _zsh_words),
    )


def _shared(commands: Sequence[Command], words: Callable[[Argument], str]) -> dict[str, str]:
    """The parts that bash and zsh write alike."""
    taking = [(f"{command.name} {flag}", each) for command in commands for flag, each in command.taking_values]
    return {
        "taking": "|".join(shlex.quote(name) for name, _ in taking),
        "options": _cases((name, f"{words(each)}; return") for name, each in taking),
        "positional": _cases(
            (f"{command.name} {'*' if each.repeats else at}", f"{words(each)}; return")
            for command in commands
            for at, each in enumerate(command.positional)
        ),
    }


def _cases(pairs: Iterator[tuple[str, str]]) -> str:
    """Arms of a ``case``; a star at the end of a pattern stays one."""
    lines = []
    for pattern, do in pairs:
        stem = pattern.removesuffix("*")
        lines.append(f"        {shlex.quote(stem)}{'*' if stem != pattern else ''}) {do};;")
    return "\n".join(lines)


def _words(words: Sequence[str]) -> str:
    return shlex.quote(" ".join(words))


def fish(commands: Sequence[Command]) -> str:
    """The script for fish."""
    lines = [
        "# Completion of modelguard for fish, written by `modelguard completion fish`.",
        "complete -c modelguard -f",
        "complete -c modelguard -n __fish_use_subcommand -l version -d 'show the version and exit'",
    ]
    for command in commands:
        lines.append(f"complete -c modelguard -n __fish_use_subcommand -a {command.name} -d {_fish(command.help)}")
        seen = f"complete -c modelguard -n '__fish_seen_subcommand_from {command.name}'"
        lines += [f"{seen} {_fish_argument(argument)}" for argument in command.arguments]
    return "\n".join(lines) + "\n"


def _fish_argument(argument: Argument) -> str:
    parts = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in argument.flags]
    if argument.flags and argument.kind != "flag":
        parts.append("-r")
    if argument.kind == "values":
        parts.append(f"-a {_fish(' '.join(argument.values))}")
    elif argument.kind == "process":
        parts.append("-a '(__fish_complete_pids)'")
    elif argument.kind in {"files", "command"}:
        parts.append("-F")
    return " ".join([*parts, f"-d {_fish(argument.help)}"])


def _fish(text: str) -> str:
    """A word of fish, whose single quotes know two escapes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHELLS: Mapping[str, Callable[[Sequence[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


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
    parser.add_argument("shell", choices=tuple(SHELLS), metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=partial(run, whole=whole))


def run(options: argparse.Namespace, *, whole: argparse.ArgumentParser) -> int:
    """Run the command; returns the exit status."""
    print(SHELLS[options.shell](list(read(whole))), end="")  # noqa: T201 - the output of the command
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
    from modelguard.environment._presets import formats

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
