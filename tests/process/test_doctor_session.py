"""The doctor's own session: a command is started, asked and stopped, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from tests.process.harness import wait_until

from modelguard.diagnosis import _facts_command as session_module
from modelguard.diagnosis import facts_of_command
from modelguard.diagnosis._facts_command import started
from modelguard.errors import CannotRun, InvalidOption
from modelguard.facts import _proc

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="running processes are read from /proc"),
]

SECRET = "hunter2-word"

LISTEN = "import socket, time\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\n"


def python(folder: Path, program: str) -> list[str]:
    (folder / "main.py").write_text(program)
    return [sys.executable, "main.py"]


def test_everything_that_was_started_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a child that ignores SIGTERM and has left the session; and the probe's folder is removed."""
    words = python(
        tmp_path,
        "import os, signal, subprocess, sys\n" + LISTEN
        + "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(100)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        "open('child', 'w').write(str(child.pid))\ntime.sleep(100)\n",
    )  # fmt: skip
    temporary = tmp_path / "temporary"  # of its own: other tests make such folders at the same time
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    facts = facts_of_command(words, cwd=tmp_path)
    assert 2 == len(facts.processes)
    pid = int((tmp_path / "child").read_text())
    wait_until(lambda: (child := _proc.stat(pid)) is None or not child.alive, "the child has ended")
    assert [] == list(temporary.iterdir())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raise SystemExit(3)", "ended with status 3 before it served"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"raise ValueError('{SECRET}')", "its last error is ValueError"),
        ("import os\nos.kill(os.getpid(), 9)", "ended by SIGKILL"),
    ],
)
def test_a_command_that_ends(tmp_path: Path, program: str, says: str) -> None:
    """The error says how it ended and by which error, without messages that may hold a secret."""
    with pytest.raises(InvalidOption) as caught:
        facts_of_command(python(tmp_path, program), cwd=tmp_path)
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)


def test_secrets_of_the_variables_that_a_command_is_given(tmp_path: Path) -> None:
    """They stand neither in the command nor in its last error, though this process does not have them."""
    words = python(tmp_path, "import sys\nraise NameError(sys.argv[1])")
    with pytest.raises(InvalidOption, match="its last error is NameError") as raised:
        facts_of_command([*words, SECRET], {**os.environ, "DB_PASSWORD": SECRET}, cwd=tmp_path)
    assert SECRET not in str(raised.value)


def test_a_command_that_does_not_serve(tmp_path: Path) -> None:
    """It is examined as it is, and the report says so."""
    words = python(tmp_path, "import os, time\nos.environ['MALLOC_CONF'] = 'x'\ntime.sleep(60)\n")
    facts = facts_of_command(words, cwd=tmp_path, patience=2)
    assert facts.unknown[0].startswith("it did not serve within 2 seconds")
    assert ["MALLOC_CONF"] == [variable.name for variable in facts.variables if variable.moment != "exec"]
    assert "main.py line 2" in facts.variables[-1].where


def test_a_service_on_a_unix_socket_of_its_configuration(tmp_path: Path) -> None:
    """It serves when it listens there, though the command does not name the socket."""
    listen = "import socket, time\ns = socket.socket(socket.AF_UNIX)\ns.bind('s.sock')\ns.listen()\ntime.sleep(60)\n"
    listen = listen.replace("'s.sock'", "os.path.abspath('s.sock')").replace("import socket", "import os, socket")
    assert () == facts_of_command(python(tmp_path, listen), cwd=tmp_path, patience=20).unknown


def test_a_program_without_the_probe(tmp_path: Path) -> None:
    """``python -I`` does not read PYTHONPATH: it is examined from outside, and the report says so."""
    words = [sys.executable, "-I", "-c", LISTEN + "time.sleep(60)"]
    assert any("no answer from inside" in sentence for sentence in facts_of_command(words, cwd=tmp_path).unknown)


def test_no_such_command() -> None:
    """Nothing is started."""
    with pytest.raises(CannotRun):
        facts_of_command(["no-such-command-here"])


def test_requests_that_fail_are_reported(tmp_path: Path) -> None:
    """The number that failed, and why."""
    words = python(tmp_path, LISTEN + "s.settimeout(600)\nwhile True:\n    s.accept()[0].close()\n")
    facts = facts_of_command(words, cwd=tmp_path, request="/", count=3)
    assert facts.unknown[0].startswith("3 of 3 requests failed")


def test_the_probe_chains_and_is_light(tmp_path: Path) -> None:
    """The next sitecustomize runs as before, and Python starts with no module more than ``signal``."""
    program = "import sys, json; print(json.dumps(sorted(sys.modules)), getattr(sys, 'mark', 0))"
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.mark = 7\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    plain = _run(program, environ)
    with started([sys.executable, "-c", "import time; time.sleep(60)"], environ, tmp_path) as session:
        with_probe = {**environ, "PYTHONPATH": f"{session.folder}{os.pathsep}{tmp_path}"}
        probed = _run(program, {**with_probe, "MODELGUARD_PROBE": str(session.folder)})
        removed = _run(program, with_probe)
    assert "7" == plain[1] == probed[1] == removed[1]
    light = (
        "__future__ zipimport signal _signal enum types functools operator collections reprlib keyword itertools "
        "_collections _operator _functools _typing"
    )
    more = set(light.split())
    assert set(probed[0]) - set(plain[0]) <= more
    assert set(removed[0]) - set(plain[0]) <= {"zipimport", "__future__"}


def _run(program: str, environ: dict[str, str]) -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert 0 == done.returncode, done.stderr
    modules, _, mark = done.stdout.strip().rpartition(" ")
    return json.loads(modules), mark


def test_a_busy_process_does_not_hold_up_the_examination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named as silent after the time to answer."""
    monkeypatch.setattr(session_module, "ANSWER", 1.0)
    words = python(tmp_path, LISTEN + "sum(range(10**12))\n")
    began = time.monotonic()
    facts = facts_of_command(words, cwd=tmp_path, patience=2)
    assert any("ran no Python" in sentence for sentence in facts.unknown)
    assert time.monotonic() - began < 50


def test_a_silent_server_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only its worker answers, the service still begins at the server, which the report names as silent."""
    monkeypatch.setattr(session_module, "ANSWER", 1.0)
    program = LISTEN + "import os\nif os.fork():\n    sum(range(10**12))\ntime.sleep(100)\n"
    facts = facts_of_command(python(tmp_path, program), cwd=tmp_path, patience=2)
    server, worker = facts.processes
    assert ("main", None) == (server.role, server.inside)
    assert "forked" == worker.role
    assert worker.inside is not None
    assert any(f"no answer from inside of {server.pid}:" in sentence for sentence in facts.unknown)


def test_the_tracker_of_multiprocessing_is_not_asked(tmp_path: Path) -> None:
    """It waits in a read that no signal ends, so the doctor would wait for its answer for nothing."""
    program = "from multiprocessing import resource_tracker\nresource_tracker.ensure_running()\nimport time\n"
    words = python(tmp_path, program + "time.sleep(100)\n")
    with started(words, dict(os.environ), tmp_path) as session:
        wait_until(lambda: 2 == len(session.pids()), "the tracker")
        wait_until(lambda: list(session.folder.glob("*.ready")), "the probe")
        assert {session.process.pid} == set(session.answers())
        assert {f"{session.process.pid}.ready"} == {path.name for path in session.folder.glob("*.ready")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_doctor_ends_what_it_has_started(tmp_path: Path, number: signal.Signals) -> None:
    """Its port is free then, and the doctor's status tells the signal; SIGINT is answered in a line."""
    words = python(tmp_path, LISTEN + "open('port', 'w').write(str(s.getsockname()[1]))\nsum(range(10**12))\n")
    command = [sys.executable, "-m", "modelguard", "doctor", "--", *words]
    # A shell may have started the tests with SIGINT ignored, which this process then would pass on.
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    doctor = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, **default)  # type: ignore[call-overload]
    wait_until(lambda: (tmp_path / "port").exists() and (tmp_path / "port").read_text() != "", "the service")
    port = int((tmp_path / "port").read_text())
    doctor.send_signal(number)
    _, said = doctor.communicate(timeout=60)
    assert (2 if number == signal.SIGINT else -number) == doctor.returncode, said
    wait_until(lambda: _is_free(port), "the port to be free")


def test_a_daemon_is_ended(tmp_path: Path) -> None:
    """A command that leaves a service behind, in a session of its own, has not served; the service is ended."""
    daemon = "import os\nif os.fork():\n    os._exit(0)\nos.setsid()\nif os.fork():\n    os._exit(0)\n"
    told = "open('port', 'w').write(str(s.getsockname()[1]))\n"
    program = LISTEN + told + daemon + "time.sleep(100)\n"
    with pytest.raises(InvalidOption, match="ended with status 0"):
        facts_of_command(python(tmp_path, program), cwd=tmp_path)
    port = int((tmp_path / "port").read_text())
    wait_until(lambda: _is_free(port), "the port to be free")


def _is_free(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) != 0


def test_a_command_that_does_not_serve_is_not_without_faults(tmp_path: Path) -> None:
    """The status is 2 and the last line says why."""
    words = python(tmp_path, "import time\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "modelguard", "doctor", "--wait", "2", "--ignore", "MG302", "--", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert 2 == done.returncode, done.stderr
    assert "It did not serve" in done.stdout.splitlines()[-1]


def test_what_the_system_takes_in_no_command_is_named() -> None:
    """Before anything is started."""
    with pytest.raises(InvalidOption, match=r"^command='x.*has a NUL character"):
        facts_of_command([sys.executable, "x\0"])
    with pytest.raises(InvalidOption, match=r"^cwd=.*has a NUL character"):
        facts_of_command([sys.executable], cwd=Path("x\0"))
