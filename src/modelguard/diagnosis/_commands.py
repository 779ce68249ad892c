"""What a command starts: which program, with which environment, as far as it can be told without running it."""

from __future__ import annotations

import argparse
import functools
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from modelguard.diagnosis._facts import Interpreter
from modelguard.diagnosis._patch_level import patch_level
from modelguard.environment import _launcher, _presets
from modelguard.environment._program import locate
from modelguard.errors import InvalidOption

__all__ = ["Command", "interpreter", "resolve"]

_MODULES = ("gunicorn", "hypercorn", "granian", "uvicorn")
_PYTHON = r"(?:python|pypy)(\d+(?:\.\d+)?)?(t)?"

#: Options of ``env`` that take a value of their own.
_ENV_VALUES = ("-u", "--unset", "-C", "--chdir")
#: And of Python itself.
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True, slots=True)
class Command:
    """A program that is started.

    Attributes:
        program: Its file; empty where the command says only a name that was not looked up.
        kind: ``"gunicorn"``, ``"uvicorn"``, ...; ``"script"`` or ``"module"`` for Python code of the user's own;
            ``"unknown"`` for everything else.
        words: What it is given; for a script or module its name first.
        environ: Its environment.
    """

    program: str
    kind: str
    words: tuple[str, ...]
    environ: Mapping[str, str]


def resolve(words: Sequence[str], environ: Mapping[str, str], *, look_up: bool = True) -> Command:
    """Find what a command starts in the end, behind ``env``, ``modelguard run`` and ``python``.

    Args:
        words: The command.
        environ: What it is given.
        look_up: Whether each program has to be found, as a shell would. A process that runs needs no such proof.

    Raises:
        CannotRun: A program was not found, or cannot be executed.
        InvalidOption: ``modelguard run`` in it would refuse its own options.
    """
    launch = _named("", list(words), environ)
    while True:
        program = locate(launch.words[0], launch.environ) if look_up and launch.words else ""
        behind = _behind(launch)
        if behind is None:
            return replace(launch, program=program, words=launch.words[1:])
        if behind.kind != "command":
            return replace(behind, program=program)
        launch = _named("", behind.words, behind.environ)


def interpreter(program: str) -> Interpreter | None:
    """Tell which Python runs a program, from its file alone.

    Args:
        program: A Python, or a script whose first line names one.
    """
    file = _first_line(program) or program
    for name in (file, os.path.realpath(file)):
        if found := re.fullmatch(rf"{_PYTHON}(?:\.exe)?", PurePath(name).name):
            version = re.fullmatch(r"(\d+)\.(\d+)", found[1] or "")
            if version:
                kind = "PyPy" if PurePath(name).name.startswith("pypy") else "CPython"
                minor = int(version[1]), int(version[2])
                return Interpreter(minor, kind, bool(found[2]), patch_level(Path(file), minor))
    return _of_virtual_environment(Path(file).parent.parent / "pyvenv.cfg")


def _named(program: str, words: Sequence[str], environ: Mapping[str, str]) -> Command:
    kind = PurePath(words[0]).name if words else ""
    return Command(program, kind if kind in _MODULES else "unknown", tuple(words), environ)


def _behind(launch: Command) -> Command | None:
    """What a program starts in its turn, None if it is the last one."""
    first = PurePath(launch.words[0]).name if launch.words else ""
    rest = list(launch.words[1:])
    if first == "env":
        return _behind_env(rest, launch.environ)
    if first == "modelguard" and rest[:1] == ["run"]:
        return _behind_run(rest[1:], launch.environ)
    if re.fullmatch(rf"{_PYTHON}(?:\.exe)?", first):
        return _behind_python(rest, launch.environ)
    return None


def _behind_env(words: list[str], environ: Mapping[str, str]) -> Command | None:
    changed = dict(environ)
    while words and (words[0].startswith("-") or "=" in words[0]):
        word = words.pop(0)
        name, has_value, value = word.partition("=")
        if word in ("-i", "-", "--ignore-environment"):
            changed = {}
        elif word in _ENV_VALUES and words:
            argument = words.pop(0)
            if word in ("-u", "--unset"):
                changed.pop(argument, None)
        elif has_value and not name.startswith("-"):
            changed[name] = value
        elif word.startswith(("-S", "--split-string")):
            return None  # a small language of its own
    return Command("", "command", tuple(words), changed) if words else None


def _behind_run(words: list[str], environ: Mapping[str, str]) -> Command:
    options = _run_options(words)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    sizes = {"workers": options.workers, "distinct_shapes": options.distinct_shapes}
    given = {name: value for name, value in sizes.items() if value is not None}
    chosen = [_presets.get(name, **given) for name in options.presets]
    preset = functools.reduce(operator.or_, chosen) if chosen else None
    planned = _launcher.plan(command, preset=preset, allocator=options.allocator, environ=environ)
    return Command("", "command", planned.argv, planned.environ)


class _Parser(argparse.ArgumentParser):
    """Refuses by an exception and prints nothing."""

    def error(self, message: str) -> None:  # type: ignore[override] # argparse exits here, we raise
        raise InvalidOption("modelguard run", message, why="is not a valid command", fix="See modelguard run --help.")


def _run_options(words: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="modelguard run", add_help=False)
    parser.add_argument("--preset", action="append", default=[], dest="presets")
    parser.add_argument("--allocator", default="none")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--distinct-shapes", type=int)
    parser.add_argument("--print", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def _behind_python(words: list[str], environ: Mapping[str, str]) -> Command | None:
    while words:
        word = words.pop(0)
        if word == "-m" or word.startswith("-m"):
            module = [*([word[2:]] if word[2:] else []), *words]
            return _module(module, environ)
        if word in _PYTHON_VALUES and words:
            words.pop(0)
        elif word.startswith("-c") or word == "-":
            return None
        elif not word.startswith("-"):
            kind = PurePath(word).name
            if kind == "modelguard" and words[:1] == ["run"]:
                return _behind_run(words[1:], environ)
            if kind in _MODULES:
                return Command("", kind, tuple(words), environ)
            return Command("", "script", (word, *words), environ)
    return None


def _module(words: list[str], environ: Mapping[str, str]) -> Command | None:
    if not words:
        return None
    if words[:2] == ["modelguard", "run"]:
        return _behind_run(words[2:], environ)
    if words[0] in _MODULES:
        return Command("", words[0], tuple(words[1:]), environ)
    return Command("", "module", tuple(words), environ)


def _first_line(program: str) -> str | None:
    """The interpreter that a script's first line names; of ``/usr/bin/env python3`` nothing is told."""
    try:
        with open(program, "rb") as stream:  # noqa: PTH123 - it may be any file's name
            line = stream.readline(256)
    except OSError:
        return None
    if not line.startswith(b"#!"):
        return None
    words = line[2:].split()
    return os.fsdecode(words[0]) if words else None


def _of_virtual_environment(config: Path) -> Interpreter | None:
    try:
        text = config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^version(?:_info)? *= *(\d+)\.(\d+)(?:\.(\d+))?", text, re.MULTILINE)
    if found is None:
        return None
    return Interpreter((int(found[1]), int(found[2])), micro=None if found[3] is None else int(found[3]))
