"""``doctor --pid --inside`` and ``diagnose --pid`` at processes that run: from outside, by socket, and by script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modelguard.diagnosis import diagnose_process
from modelguard.errors import InvalidOption

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc"),
]
by_script = pytest.mark.skipif(not hasattr(sys, "remote_exec"), reason="sys.remote_exec came with Python 3.14")

SERVICE = """
import socket, sys, time
from modelguard import TTL, guard
kept = []
nlp = guard(dict, reload_on=TTL("1d"), name="nlp")
@nlp
def call(model):
    kept.append([0] * 1000)
if "listen" in sys.argv:
    from modelguard import control
    control.listen()
sockets = []
print("ready", flush=True)
while True:
    for _ in range(20):
        call()
    if len(sockets) < 400:
        sockets.append(socket.socket())
    time.sleep(0.02)
"""


@contextmanager
def service(folder: Path, program: str = SERVICE, *words: str, **environ: str) -> Iterator[int]:
    (folder / "service.py").write_text(program)
    process = subprocess.Popen(
        [sys.executable, "service.py", *words], cwd=folder, stdout=subprocess.PIPE, env={**os.environ, **environ}
    )
    try:
        assert process.stdout is not None
        assert b"ready\n" == process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def modelguard(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelguard", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


def refused(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether this place gives no right to trace."""
    return "does not let this process trace it" in done.stderr


WAYS = ["listen", pytest.param("", marks=by_script)]


@pytest.mark.parametrize("way", WAYS)
def test_a_running_service_is_asked(tmp_path: Path, way: str) -> None:
    """Nothing but the variables that it has set itself stays unknown."""
    with service(tmp_path, SERVICE, way) as pid:
        done = modelguard("doctor", "--pid", str(pid), "--inside", "--json")
    if refused(done):
        pytest.skip("no right to trace processes here")
    assert done.returncode in (0, 1), done.stderr
    assert ["which variables it has set for itself since it started, cannot be asked"] == json.loads(done.stdout)[
        "unknown"
    ]


@pytest.mark.parametrize("way", WAYS)
def test_a_running_service_is_diagnosed(tmp_path: Path, way: str) -> None:
    """Its growth is per call on its guard, and the list that holds it is named, without what imports leave behind."""
    with service(tmp_path, SERVICE, way) as pid:
        done = modelguard("diagnose", "--pid", str(pid), "--time", "8s", "--json")
    assert 1 == done.returncode, done.stderr
    report = json.loads(done.stdout)
    if not report["causes"]:
        pytest.skip("no right to trace processes here")
    cause = report["causes"][0]
    assert ("calls", "python objects") == (report["measured"]["per"], cause["name"])
    assert "held by __main__.kept (list, +" in cause["seen"]
    assert cause["fix"].startswith("Give __main__.kept a bound")
    assert "descriptor" not in cause["seen"]


def test_a_service_is_watched_from_outside(tmp_path: Path) -> None:
    """Its growth is judged by time; the report says what grew, what it has not looked at, and how to get that."""
    with service(tmp_path, PYTHON_DISABLE_REMOTE_DEBUG="1") as pid:
        done = modelguard("diagnose", "--pid", str(pid), "--time", "6s")
    assert 1 == done.returncode, done.stdout + done.stderr
    assert "Not looked at: its Python objects, what holds them, and its calls, because " in done.stdout
    assert "call modelguard.control.listen() where its application is made" in done.stdout
    assert "Where private memory grew: " in done.stdout
    assert "more open files in " in done.stdout
    assert "unexplained" not in done.stdout


def test_a_process_that_is_not_python() -> None:
    """It is watched from outside, and nobody is told to call something in it."""
    busy = "while :; do i=$((i+1)); done"
    with subprocess.Popen(["sh", "-c", busy]) as process:
        try:
            done = modelguard("diagnose", "--pid", str(process.pid), "--time", "1s")
        finally:
            process.kill()
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "because it runs no Python." in done.stdout


@pytest.mark.parametrize("signals", [[], [signal.SIGSTOP]], ids=["idle", "stopped"])
def test_of_a_process_that_computes_nothing_nothing_is_known(signals: list[signal.Signals]) -> None:
    """Its memory cannot grow before it goes on: "does not grow" would be no answer. The report says what it needs."""
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            for each in signals:
                process.send_signal(each)
            report = diagnose_process(process.pid, seconds=1)
        finally:
            process.kill()
    assert "undecided" == report.verdict
    assert any("continue it if it is stopped; send it requests" in sentence for sentence in report.unknown)


def test_a_process_that_ends_while_it_is_watched() -> None:
    """The error says so, also where its parent has not collected it: nothing is left that could grow."""
    with subprocess.Popen(["sleep", "60"]) as process:
        with pytest.raises(InvalidOption, match="has ended meanwhile"):
            diagnose_process(process.pid, seconds=1, sleep=lambda _: _end(process))
        assert process.poll() == -signal.SIGKILL


def _end(process: subprocess.Popen[bytes]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_process_that_has_ended_from_inside() -> None:
    """Its parent has not collected it yet."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        done = modelguard("doctor", "--pid", str(process.pid), "--inside")
    finally:
        process.wait()
    assert (2, "") == (done.returncode, done.stdout)
    assert "has ended" in done.stderr


def test_no_such_process_from_inside() -> None:
    """That is said, and not how a process could be asked."""
    done = modelguard("doctor", "--pid", "4194305", "--inside")
    assert (2, "") == (done.returncode, done.stdout)
    assert "does not exist" in done.stderr


@by_script
def test_a_service_that_forbids_it(tmp_path: Path) -> None:
    """PYTHON_DISABLE_REMOTE_DEBUG is respected, and the error says so."""
    with service(tmp_path, PYTHON_DISABLE_REMOTE_DEBUG="1") as pid:
        done = modelguard("doctor", "--pid", str(pid), "--inside")
    assert (2, "") == (done.returncode, done.stdout)
    assert "its Python does not allow that" in done.stderr or refused(done)


@by_script
def test_a_service_whose_main_thread_is_away(tmp_path: Path) -> None:
    """It sleeps in a library: after ten seconds the error says so."""
    with service(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(1000)") as pid:
        done = modelguard("doctor", "--pid", str(pid), "--inside")
    assert "has run no Python code in its main thread for 10 seconds" in done.stderr or refused(done)
