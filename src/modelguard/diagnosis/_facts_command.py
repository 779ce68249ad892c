"""Facts about a command: it is started, examined from outside and from inside while it serves, and stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from modelguard.diagnosis import _redact, _requests
from modelguard.diagnosis._facts import Facts, ServiceProcess
from modelguard.diagnosis._facts_process import Answers, facts_of_tree
from modelguard.diagnosis._requests import Driven
from modelguard.diagnosis._session import ANSWER, Session, started
from modelguard.environment import _proc
from modelguard.environment._limits import Strain
from modelguard.errors import InvalidOption, NotSupported

__all__ = ["PATIENCE", "REQUESTS", "facts_of_command"]

#: Seconds to wait until a service serves: longer than most models take to load.
PATIENCE = 120.0

#: How many requests to send, unless told otherwise.
REQUESTS = 100


def facts_of_command(
    words: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    cwd: Path | None = None,
    request: str | None = None,
    count: int = REQUESTS,
    patience: float = PATIENCE,
) -> Facts:
    """Start a command, examine it once it serves, and stop it with everything that it has started.

    Args:
        words: The command and its arguments.
        environ: The variables that it gets. ``PYTHONPATH`` and ``MODELGUARD_PROBE`` are added.
        cwd: The folder that it runs in. Default: the current one.
        request: An address, or a path on the port that it serves, to request by GET meanwhile.
        count: How many requests to send.
        patience: Seconds to wait until it serves. If it does not, it is examined as it is.

    Raises:
        CannotRun: The command was not found, or cannot be executed.
        InvalidOption: The command is empty, or has ended; or the address is not one.
        NotSupported: There is no ``/proc``.
    """
    if not words:
        raise InvalidOption("command", "", why="must not be empty", fix="Write it after --, with its arguments.")
    if request is not None:
        _requests.check_url(request)
    if not _proc.is_mounted():
        raise NotSupported("modelguard doctor -- COMMAND", reason="there is no /proc")
    with started(words, environ, cwd or Path.cwd()) as session:
        began = time.monotonic()
        took = session.wait(patience)
        waited = time.monotonic() - began
        before = session.private()
        driven = _requests.drive(request, count, session.listening()) if request is not None else None
        session.require_running()
        answers = session.answers()
        facts = _examine(session, answers, f"the command: {_redact.redact_command(words, environ)}")
        strain = replace(facts.machine.strain or Strain(), killed=session.killed())
    if driven is not None:
        facts = replace(facts, processes=tuple(_with_growth(process, before) for process in facts.processes))
    unknown = (*_unknown(took, waited, driven, answers, facts), *facts.unknown)
    shown = tuple(_redact.redacted_words(words, environ))
    machine = replace(facts.machine, strain=strain)
    return replace(facts, machine=machine, unknown=unknown, words=shown, served=took is not None)


def _with_growth(process: ServiceProcess, before: Mapping[int, int]) -> ServiceProcess:
    return replace(process, grown=process.private - before[process.pid]) if process.pid in before else process


def _examine(session: Session, answers: Answers, subject: str) -> Facts:
    """The service begins at the uppermost process that has the probe: a shell above it is not looked at.

    It may have left the question unanswered. The first that has answered may be one of its workers, without the others.
    """
    top = next(iter([*session.probed(), *session.pids()]), session.process.pid)
    try:
        return facts_of_tree(top, subject, answers)
    except ProcessLookupError:
        session.require_running()
        raise


def _unknown(took: float | None, waited: float, driven: Driven | None, answers: Answers, facts: Facts) -> Iterator[str]:
    if took is None:
        yield (
            f"it did not serve within {waited:.0f} seconds (it listens on no port, or still computes), so it was "
            "examined as it was then"
        )
    if driven is not None and driven.failed:
        yield f"{driven.failed} of {driven.failed + driven.answered} requests failed, the last with {driven.last}"
    silent = [process.pid for process in facts.processes if process.role != "other" and process.pid not in answers]
    if silent:
        pids = ", ".join(map(str, silent))
        busy = f"its main thread ran no Python for {ANSWER:g} seconds (it computes, or waits in a system call)"
        yield f"no answer from inside of {pids}: not a Python that reads PYTHONPATH, or {busy}"
    for pid, answer in answers.items():
        for failed in answer.get("failed", ()):
            yield f"process {pid} could not say all of itself ({failed})"
