"""Facts about a running service, from outside and from inside: its processes are asked where that is possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modelguard.diagnosis._attach import inside_of
from modelguard.diagnosis._facts import Facts
from modelguard.diagnosis._facts_process import (
    above,
    facts_of_tree,
    interpreter_of,
    named_process,
    process_number,
    readable,
)
from modelguard.environment import _proc
from modelguard.errors import ModelGuardError, NotSupported

__all__ = ["facts_from_inside"]


def facts_from_inside(pid: str | int) -> Facts:
    """Look at a process and everything that it has started, and ask those that can be asked.

    They have called ``modelguard.control.listen()``, or run the same CPython as this process, 3.14 or later: a short
    script then runs in each of them, in a thread of its own.

    Args:
        pid: The id of the process.

    Raises:
        InvalidOption: It is not a process id, the process does not exist, belongs to another user, or does not answer.
        NotSupported: It has no control socket, and this Python is older than 3.14, the process runs another one, or in
            a container, or this process has no right to trace it.
    """
    number = process_number(pid)
    if not _proc.is_mounted():
        raise NotSupported("modelguard doctor --pid", reason="there is no /proc to read it from")
    with readable(number):
        _proc.maps(number)  # so that of no process that does not exist it is said how it could be asked
    answers: dict[int, Mapping[str, Any]] = {number: _describe(number)}
    unknown: list[str] = ["which variables it has set for itself since it started, cannot be asked"]
    for process in _proc.descendants(number, _proc.processes()):
        if process.pid != number and interpreter_of(process.pid) is not None:
            try:
                answers[process.pid] = _describe(process.pid)
            except ModelGuardError as error:
                unknown.append(f"no answer from inside of {process.pid}: {error}")
    with readable(number):
        facts = facts_of_tree(number, named_process(number), answers)
    return replace(facts, unknown=(*unknown, *facts.unknown, *above(number)))


def _describe(pid: int) -> dict[str, Any]:
    with inside_of(pid, interpreter_of(pid)) as inside:
        return inside.ask("describe")
