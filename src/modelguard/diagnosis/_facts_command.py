"""Facts about a command: it is started, examined from outside and from inside while it serves, and stopped."""

import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from modelguard import _units
from modelguard.diagnosis import _inside
from modelguard.diagnosis._facts import KNOWN, Facts
from modelguard.diagnosis._facts_process import Answers, facts_of_tree, require_proc
from modelguard.diagnosis._target import SIGNAL, in_session
from modelguard.environment import _loaded_files
from modelguard.environment._launcher import locate
from modelguard.errors import InvalidOption
from modelguard.facts import _memory, _proc, _redact
from modelguard.runtime.child_processes import ending_signals, kill, kill_group

# A command that is started to be examined: in its own session, with the probe, and stopped with all it started.


#: Seconds that a process may take to answer the probe's signal: its 0.3 s of computing and imports took more than 10 s
#: where ten programs shared a processor.
ANSWER = 30.0

#: Seconds. After how long a silent process is asked again, and how long a service may take to stop.
_AGAIN, _STOP = 10.0, 10.0

#: A service is ready when it listens, and in ten looks in a row its processes have not been busy more than twice.
_LOOKS, _BUSY, _PAUSE = 10, 2, 0.1

#: A server of which the kernel has killed so many processes will not serve, however long one waits.
_KILLED = 3

#: Messages of these errors name modules and syntax. Any other error's message may hold a secret.
_HARMLESS = frozenset({"ImportError", "ModuleNotFoundError", "NameError", "SyntaxError"})
_ERROR = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Exit|Interrupt|Failed)): ?(.*)")


class Session:
    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._words, self._environ = words, environ
        self._killed_before = {self._cgroups(None): _memory.oom_kills() or 0}

    def pids(self) -> list[int]:
        return [each.pid for each in _proc.tree(self.process.pid)]

    def probed(self) -> list[int]:
        return [pid for pid in self.pids() if (self.folder / f"{pid}.ready").exists()]

    def listening(self) -> set[int | str]:
        listened = (_proc.if_readable(_proc.listening, pid) or () for pid in self.pids())
        return {at for found in listened for at in found if isinstance(at, int) or at.startswith("/")}

    def wait(self, patience: float) -> float | None:
        """Wait until it serves: it listens, and has finished loading."""
        began = time.monotonic()
        looks: list[bool] = []
        while time.monotonic() < began + patience and self.killed() < _KILLED:
            self.require_running()
            busy = any(_proc.if_readable(_proc.is_busy, pid) for pid in self.pids())
            looks = [*looks, busy][-_LOOKS:]
            if self.listening() and len(looks) == _LOOKS and sum(looks) <= _BUSY:
                if self._has_loaded():
                    return time.monotonic() - began
                looks = []
            time.sleep(_PAUSE)
        return None

    @staticmethod
    def _cgroups(pid: int | None) -> str:
        return str(_proc.if_readable(_proc.cgroups, pid))

    def _has_loaded(self) -> bool:
        """Whether all of gunicorn's workers have loaded the app: they may be idle while they load."""
        answers = self.answers().values()
        servers = (answer.get("server", {}) for answer in answers)
        wanted = [server["workers"] for server in servers if server.get("kind") == "gunicorn"]
        return sum(answer.get("booted") is True for answer in answers) >= max(wanted, default=0)

    def killed(self) -> int:
        """How many processes of its cgroup the kernel has killed for want of memory since the start."""
        pid = self.process.pid if self.process.poll() is None else None  # it may have moved to a cgroup of its own
        counted = _memory.oom_kills(pid) or 0
        return max(0, counted - self._killed_before.setdefault(self._cgroups(pid), counted))

    def require_running(self) -> None:
        status = self.process.poll()
        if status is None:
            return
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        if killed := self.killed():
            how += f" (by the kernel's OOM killer, probably: {killed} process(es) of its cgroup were killed)"
        command = _redact.redact_command(self._words, self._environ)
        why = f"ended {how} before it served{self._last_error()}"
        raise InvalidOption("command", command, why=why, fix="Start it by itself to see what it prints.")

    def answers(self) -> dict[int, Mapping[str, Any]]:
        for old in self.folder.glob("*.json"):
            old.unlink(missing_ok=True)
        files = {pid: self.folder / f"{pid}.json" for pid in self.probed()}
        deadline, again = time.monotonic() + ANSWER, -math.inf
        while time.monotonic() < deadline:
            silent = [pid for pid in self.pids() if pid in files and not files[pid].exists()]
            if not silent:
                break
            if time.monotonic() >= again:
                again = time.monotonic() + _AGAIN
                for pid in silent:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, SIGNAL)
            time.sleep(_PAUSE / 2)
        return {pid: json.loads(file.read_bytes()) for pid, file in files.items() if file.exists()}

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End it and everything that it has started, also what has left it and its session, as a daemon does."""
        pids = {*(each.pid for each in _proc.tree(process.pid)), *filter(self._is_ours, _proc.processes())}
        process.terminate()  # nothing is sent to one that has ended
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP)
        kill_group(process.pid)
        kill(filter(self._is_ours, pids))
        process.wait()
        deadline = time.monotonic() + _STOP
        while any(map(self._is_ours, pids)) and time.monotonic() < deadline:
            time.sleep(_PAUSE / 2)

    def _is_ours(self, pid: int) -> bool:
        """Whether a process was started in this session. Its id may have been given to another one meanwhile."""
        environ = _proc.if_readable(_proc.environment, pid) or {}
        return environ.get("MODELGUARD_PROBE") == str(self.folder)

    def _last_error(self) -> str:
        """The error that it has printed last, without a message that may hold a secret."""
        text = (self.folder / "output").read_text(encoding="utf-8", errors="replace")
        found = [match.groups() for line in text.splitlines() if (match := _ERROR.fullmatch(line.strip()))]
        if not found:
            return ""
        name, message = found[-1]
        told = f": {_redact.redact(message, self._environ)}" if name in _HARMLESS else ""
        return f"; its last error is {name}{told}"


@contextmanager
def started(words: Sequence[str], environ: Mapping[str, str], cwd: Path) -> Iterator[Session]:
    """Start a command with the probe, and end it with all it has started, also if a signal ends this process."""
    temporary = tempfile.TemporaryDirectory(prefix="modelguard-", ignore_cleanup_errors=True)
    with ending_signals(), temporary as name, Path(name, "output").open("wb") as output:
        folder = Path(name)
        shutil.copyfile(_inside.__file__, folder / "sitecustomize.py")
        shutil.copyfile(_loaded_files.__file__, folder / "malloc")
        (folder / "names").write_text("\n".join([str(SIGNAL), *sorted(KNOWN)]), encoding="ascii")
        path = os.pathsep.join([name, *filter(None, [environ.get("PYTHONPATH")])])
        probed = {**environ, "PYTHONPATH": path, "MODELGUARD_PROBE": name}
        session, program = Session(folder, words, environ), locate(words[0], environ)
        start = partial(in_session, words, session.stop, output=output, ends_by=signal.SIGTERM)
        with start(executable=program, env=probed, cwd=cwd) as session.process:
            yield session


# Requests that drive a service while it is examined.

#: Seconds that one request may take.
_TIMEOUT = 30.0

#: What a request that has reached the model is answered with: a wrong path gets 404, a missing parameter 422.
_SUCCESS = range(200, 300)

#: Seconds to wait before the next request where nobody takes one.
_REFUSED = 0.05


def check_url(url: str) -> None:
    fix = "Write a path such as /predict?text=x, or http://127.0.0.1:8000/predict."
    if url and not re.fullmatch(r"[!-~]+", url):  # no request can have them
        fix = f"Write it as {urllib.parse.quote(url, '/:?#[]@!$&()*+,;=%', errors='surrogateescape')}."
        raise InvalidOption("--request", url, why="must have no spaces, and letters of ASCII only", fix=fix)
    with suppress(ValueError):  # of a host such as "[::1"
        parts = urllib.parse.urlsplit(url)
        if url.startswith("/") or (parts.scheme == "http" and parts.hostname and parts.port != 0):
            return
    raise InvalidOption("--request", url, why="must be a path or an http:// address", fix=fix)


def drive(url: str, count: int, listening: Iterable[int | str]) -> list[str]:
    """Send requests one after the other; returns why some have failed."""
    parts = urllib.parse.urlsplit(url)
    port = parts.port or (80 if parts.hostname else min((one for one in listening if isinstance(one, int)), default=0))
    if not port:
        return count * ["the service listens on no TCP port"]
    path, failed = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, "")), []
    for _ in range(count):
        connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", port, timeout=_TIMEOUT)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException) as error:
            failed.append(type(error).__name__)
            time.sleep(_REFUSED if isinstance(error, OSError) else 0)
        else:
            failed += [] if response.status in _SUCCESS else [f"status {response.status}"]
        finally:
            connection.close()
    return failed


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
    _units.command(words)
    if why := _units.unnameable(folder := os.fspath(cwd or "")):
        raise InvalidOption("cwd", folder, why=why, fix="Remove it.")
    if request is not None:
        check_url(request)
    require_proc()
    with started(words, environ, cwd or Path.cwd()) as session:
        began = time.monotonic()
        took = session.wait(patience)
        waited = time.monotonic() - began
        before = {pid: _memory.private_of(pid) for pid in session.pids() if request is not None}
        failed = drive(request, count, session.listening()) if request is not None else []
        session.require_running()
        answers = session.answers()
        facts = _examine(session, answers, f"the command: {_redact.redact_command(words, environ)}")
        strain = replace(facts.machine.strain, killed=session.killed())
    seen = []
    if took is None:
        not_served = f"it did not serve within {waited:.0f} seconds (it listens on no port, or still computes)"
        seen.append(f"{not_served}, so it was examined as it was then")
    if failed:
        seen.append(f"{len(failed)} of {count} requests failed, the last with {failed[-1]}")
    grown = {each.pid: each.private - before[each.pid] for each in facts.processes if each.pid in before}
    return replace(
        facts,
        machine=replace(facts.machine, strain=strain),
        processes=tuple(replace(each, grown=grown.get(each.pid)) for each in facts.processes),
        unknown=(*seen, *_unknown(answers, facts), *facts.unknown),
        words=tuple(_redact.redacted_words(words, environ)),
        served=took is not None,
    )


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


def _unknown(answers: Answers, facts: Facts) -> Iterator[str]:
    silent = [process.pid for process in facts.processes if process.role != "other" and process.pid not in answers]
    if silent:
        pids = ", ".join(map(str, silent))
        busy = f"its main thread ran no Python for {ANSWER:g} seconds (it computes, or waits in a system call)"
        yield f"no answer from inside of {pids}: not a Python that reads PYTHONPATH, or {busy}"
    for pid, answer in answers.items():
        for failed in answer.get("failed", ()):
            yield f"process {pid} could not say all of itself ({failed})"
