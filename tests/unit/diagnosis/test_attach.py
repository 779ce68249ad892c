"""Looking inside a running process: what is checked before it is touched, and the talk over a socket."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from modelguard import guard
from modelguard.control import _client
from modelguard.diagnosis import _facts_process
from modelguard.diagnosis._facts_process import Ask, inside_of, require_attachable
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts._proc import Interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc")

PYTHON = Interpreter((3, 14))
VERSION = (3, 14)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Processes 1 (in the same root), 2 (in another root) and this one."""
    for name, where in (("self", "/"), ("1", "/"), ("2", str(tmp_path))):
        (tmp_path / "proc" / name).mkdir(parents=True)
        (tmp_path / "proc" / name / "root").symlink_to(where)
    return tmp_path


@pytest.mark.parametrize(
    ("pid", "interpreter", "version", "user", "kind", "says"),
    [
        (
            1,
            PYTHON,
            (3, 13),
            None,
            NotSupported,
            "process 1 did not answer in 10 s; otherwise it requires Python 3.14 (this is 3.13)",
        ),
        (3, PYTHON, VERSION, None, InvalidOption, "does not exist"),
        (1, PYTHON, VERSION, os.geteuid() + 1, InvalidOption, "belongs to another user"),
        (
            2,
            PYTHON,
            VERSION,
            None,
            NotSupported,
            "process 2 runs in a container or a chroot; run modelguard inside of it",
        ),
        (1, None, VERSION, None, InvalidOption, "does not run CPython"),
        (1, Interpreter((3, 14), "PyPy"), VERSION, None, InvalidOption, "does not run CPython"),
        (1, Interpreter((3, 15)), VERSION, None, NotSupported, "runs on CPython 3.15, and this is Python 3.14"),
    ],
)
def test_why_it_cannot_be_done(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    pid: int,
    *,
    interpreter: Interpreter | None,
    version: tuple[int, int],
    user: int | None,
    kind: type[Exception],
    says: str,
) -> None:
    """Each reason is said plainly, before the process is touched."""
    if user is not None and os.geteuid() == 0:
        user = 4711  # the files of the fixture are root's
    monkeypatch.setattr(_facts_process, "_THIS", version)
    if user is not None:
        monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(kind) as caught:
        require_attachable(pid, interpreter, "process 1 did not answer in 10 s", root=root)
    assert says in str(caught.value)


def test_a_process_of_ones_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in the way; root may look at anybody's."""
    monkeypatch.setattr(_facts_process, "_THIS", VERSION)
    require_attachable(1, PYTHON, "", root=root)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    require_attachable(1, PYTHON, "", root=root)


def test_why_it_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that listens and does not answer, or has another modelguard, is not said to take no commands."""

    def refuse(_: int) -> NoReturn:
        raise _client.Unreachable("its modelguard is 0.1, and this is 0.2")

    monkeypatch.setattr(_client, "inspect", refuse)
    monkeypatch.setattr(_facts_process, "_THIS", (3, 13))
    with (
        pytest.raises(NotSupported, match=r"its modelguard is 0\.1, and this is 0\.2; otherwise"),
        inside_of(1, PYTHON),
    ):
        pass


def test_processes_of_isolated_functions_take_no_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """In them `listen()` does nothing, so the report does not ask for it; other processes are told what to call."""

    @contextmanager
    def asked(pid: int, _: object) -> Iterator[Ask]:
        if pid != os.getpid():
            raise NotSupported("looking inside a running process", reason="call modelguard.control.listen()")
        yield lambda _: {}

    monkeypatch.setattr(_facts_process, "inside_of", asked)
    monkeypatch.setattr(_facts_process, "_THIS", (3, 13))
    code = "print(flush=True); input()"
    with ExitStack() as ending:
        pids = []
        for name in ("modelguard.isolation._mold_program", "celery"):
            words = [sys.executable, "-c", code, name]
            program = ending.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            ending.callback(program.kill)
            assert program.stdout is not None
            program.stdout.readline()
            pids.append(program.pid)
        unknown = _facts_process.facts_from_inside(os.getpid()).unknown
    mold, other = pids
    assert f"processes of isolated functions take no commands, and were not asked: {mold}" in unknown
    assert [str(other)] == [text.split(":")[0].split()[-1] for text in unknown if "listen()" in text]


def here(_: int, script: str) -> None:
    """Stands for ``sys.remote_exec``: runs the script in this process."""
    exec(Path(script).read_text(encoding="utf-8"), {"__name__": "script"})


@contextmanager
def reached(run: Callable[[int, str], None]) -> Iterator[Ask]:
    """This process, into which a script is put like that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "remote_exec", run, raising=False)
        patch.setattr(_facts_process, "_FIRST", sys.version_info[:2])
        with inside_of(os.getpid(), Interpreter(sys.version_info[:2])) as inside:
            yield inside


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name == "modelguard-inside":
            thread.join(10)
            assert not thread.is_alive()


def test_a_process_answers(no_thread_is_left: None) -> None:
    """It describes itself, counts objects, and knows its guards; a question that it cannot answer is no accident."""
    nlp = guard(dict, reload_on=None, name="nlp")
    with nlp.lease():
        pass
    with reached(here) as inside:
        assert 0 < inside("describe")["tracked"]
        look = inside("look")
        assert "failed" not in look, look
        assert look["census"]["threads"] >= 2
        assert max(look["types"].values()) > 100  # which types are the most depends on what other tests have left
        uses = inside("uses")
        assert [f"nlp at {id(nlp):#x}", 1, 1] in uses.get("uses", []), uses
        assert {} == inside("trim")
        assert {"failed": "KeyError"} == inside("nonsense")


def failing(error: Exception) -> Callable[[int, str], None]:
    def run(_: int, __: str) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(errno.EPERM, "no"), "CAP_SYS_PTRACE"),
        (ProcessLookupError(), "has ended meanwhile"),
        (RuntimeError("Remote debugging is not enabled"), "does not allow that, or is another build"),
        (OSError(errno.EIO, "no"), "does not allow that, or is another build"),
    ],
)
def test_the_kernel_or_the_process_refuses(error: Exception, says: str) -> None:
    """The reason, and what would help."""
    with pytest.raises(ModelGuardError) as caught, reached(failing(error)):
        pass
    assert says in str(caught.value)


def test_a_process_that_runs_no_python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread is in a library, or sleeps: the wait ends."""
    monkeypatch.setattr(_facts_process, "_PATIENCE", 0.05)
    with pytest.raises(InvalidOption, match="has run no Python code"), reached(lambda *_: None):
        pass


def test_a_process_that_ends_meanwhile() -> None:
    """A question then says so."""

    def hang_up(_: int, script: str) -> None:
        text = Path(script).read_text(encoding="utf-8")
        assert "for line in stream:" in text
        exec(text.replace("for line in stream:", "for line in ():"), {"__name__": "script"})

    with reached(hang_up) as inside, pytest.raises(InvalidOption, match="no longer answers"):
        inside("look")
