"""All fixes that the command can make, merged into one line to paste."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from modelguard.diagnosis._findings import Finding, Remedy
from modelguard.diagnosis._redact import HIDDEN

__all__ = ["one_line"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=")


def one_line(findings: Iterable[Finding], words: Sequence[str], server: str | None) -> str:
    """Write the command so that it contains every fix that a command can contain.

    Args:
        findings: The findings.
        words: The command.
        server: The server that it starts, such as ``"gunicorn"``; None if there is none.

    Returns:
        A shell command; empty if no finding has such a fix, or if there is no command.
    """
    remedies = [finding.remedy for finding in findings if finding.remedy is not None]
    if not remedies or not words:
        return ""
    settings = [each.partition("=") for each in _merged(remedies, "environ")]
    environ = {name: value for name, _, value in settings}
    unset = [name for name in _merged(remedies, "unset") if name not in environ]
    command = _without(words, {*unset, *environ}, _merged(remedies, "drop"))
    options = _options(remedies)
    if any(PurePath(word).name == server for word in command):
        command += options
    elif server == "gunicorn" and options:
        environ["GUNICORN_CMD_ARGS"] = shlex.join(options)
    run = _pairs(_merged(remedies, "run", unique=False))
    if run:
        command = ["modelguard", "run", *run, "--", *command]
    if unset or environ:
        removed = [part for name in unset for part in ("-u", name)]
        command = ["env", *removed, *(f"{name}={value}" for name, value in environ.items()), *command]
    return " && ".join([*_merged(remedies, "before"), " ".join(map(_quoted, command))])


def _merged(remedies: Iterable[Remedy], field: str, *, unique: bool = True) -> list[str]:
    values = [value for remedy in remedies for value in getattr(remedy, field)]
    return list(dict.fromkeys(values)) if unique else values


def _options(remedies: Iterable[Remedy]) -> list[str]:
    """The server's options, each once: the first remedy that has an option decides on its value."""
    found: dict[str, tuple[str, ...]] = {}
    for remedy in remedies:
        found.setdefault(remedy.options[0] if remedy.options else "", remedy.options)
    return [word for words in found.values() for word in words]


def _pairs(words: Sequence[str]) -> list[str]:
    """The options of ``modelguard run``: presets may be given several times, an allocator once."""
    pairs = list(dict.fromkeys(zip(words[::2], words[1::2], strict=True)))
    allocators = [pair for pair in pairs if pair[0] == "--allocator"]
    return [word for pair in pairs if pair[0] != "--allocator" or pair == allocators[0] for word in pair]


def _without(words: Sequence[str], names: set[str], drop: Iterable[str]) -> list[str]:
    """The command without its own settings of these variables, and without these words."""
    kept: list[str] = []
    in_front = True
    for word in words:
        assigned = _ASSIGNMENT.match(word)
        in_front = in_front and (assigned is not None or word.startswith("-") or PurePath(word).name == "env")
        if not (in_front and assigned and assigned[1] in names) and word not in drop:
            kept.append(word)
    return kept[1:] if len(kept) > 1 and kept[0] == "env" and not _is_of_env(kept[1]) else kept


def _is_of_env(word: str) -> bool:
    return word.startswith("-") or _ASSIGNMENT.match(word) is not None


def _quoted(word: str) -> str:
    return word if HIDDEN in word else shlex.quote(word)
