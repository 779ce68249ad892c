"""A short name for a process, from its command line: the server and its app."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from modelguard.diagnosis import _redact

__all__ = ["process_name"]

_PYTHON = re.compile(r"(?:python|pypy)[\d.]*t?(?:\.exe)?")

#: Options of Python that take a value.
_PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")

#: Programs that serve an app, each with the options that name the app. For other programs no argument is shown.
_SERVERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("celery", "flask"), ("-A", "--app")),
    **dict.fromkeys(("daphne", "granian", "gunicorn", "hypercorn", "uvicorn"), ()),
    "uwsgi": ("-w", "--module", "--wsgi", "--wsgi-file"),
}

#: ``package.module:app``; unlike in an address, a name follows the colon. ``-c python:module`` of gunicorn names a
#: configuration.
_APP = re.compile(r"(?!python:)[A-Za-z_][\w.]*:[A-Za-z_][\w.]*(?:\(\))?")


def process_name(command: Sequence[str]) -> str:
    """Name a process.

    Args:
        command: The words of its command line.

    Returns:
        The program, or the module after ``python -m``, and for a known server its app: ``"gunicorn app:app"``,
        ``"train.py"``, ``"python -c"``. If a program has overwritten its command line with a title, the title. ``"?"``
        if the command line is empty. Secrets are hidden.
    """
    if len(command) == 1 and " " in command[0]:
        return _printable(_redact.redact(command[0], {})) or "?"
    program, arguments = _program(tuple(_redact.redacted_words(command, {})))
    app = _app(arguments, _SERVERS[program]) if program in _SERVERS else None
    name = program if app is None else f"{program} {app}"
    return _printable(name) or "?"


def _program(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The program, or the script or module that Python runs, and its arguments."""
    if not command:
        return "", ()
    name = PurePath(command[0]).name
    return _behind_python(name, command[1:]) if _PYTHON.fullmatch(name) else (name, command[1:])


def _behind_python(python: str, arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "-m" and waiting:
            return waiting[0], waiting[1:]
        if word == "-c":
            return _behind_program(python, *waiting), ()
        if word in _PYTHON_VALUES and waiting:
            waiting.pop(0)
        elif not word.startswith("-"):
            return PurePath(word).name, waiting
    return python, ()


def _behind_program(python: str, program: str = "", *arguments: str) -> str:
    """Name a program that is text on the command line."""
    if "spawn_main" in program:  # multiprocessing, and with it uvicorn, starts workers like this
        return "python (spawned worker)"
    if "modelguard.isolation" in program and arguments:  # a mold, or a worker, which has its mold's command line
        return f"{'broker' if arguments[0] == 'broker' else 'isolated'} {arguments[-1]}"
    return f"{python} -c"


def _app(arguments: Sequence[str], options: tuple[str, ...]) -> str | None:
    """The app among the arguments of a server."""
    for option, value in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, joined = option.partition("=")
        if name in options and (joined if has_value else value):
            return joined if has_value else value
    return next((word for word in arguments if _APP.fullmatch(word)), None)


def _printable(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
