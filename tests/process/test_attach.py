"""``doctor --pid --inside`` and ``diagnose --pid`` at processes that run. Python 3.14 and later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not hasattr(sys, "remote_exec"), reason="sys.remote_exec came with Python 3.14"),
    pytest.mark.skipif(sys.platform != "linux", reason="processes are read from /proc"),
]

SERVICE = """
import time
from modelguard import TTL, guard
kept = []
nlp = guard(dict, reload_on=TTL("1d"), name="nlp")
@nlp
def call(model):
    kept.append([0] * 1000)
print("ready", flush=True)
while True:
    for _ in range(20):
        call()
    time.sleep(0.005)
"""


@contextmanager
def service(folder: Path, program: str = SERVICE, **environ: str) -> Iterator[int]:
    (folder / "service.py").write_text(program)
    process = subprocess.Popen(
        [sys.executable, "service.py"], cwd=folder, stdout=subprocess.PIPE, env={**os.environ, **environ}
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


def test_a_running_service_is_asked(tmp_path: Path) -> None:
    """Nothing but the variables that it has set itself stays unknown."""
    with service(tmp_path) as pid:
        done = modelguard("doctor", "--pid", str(pid), "--inside", "--json")
    if refused(done):
        pytest.skip("no right to trace processes here")
    assert done.returncode in (0, 1), done.stderr
    assert ["which variables it has set for itself since it started, cannot be asked"] == json.loads(done.stdout)[
        "unknown"
    ]


def test_a_running_service_is_diagnosed(tmp_path: Path) -> None:
    """Its growth is per call on its guard, and Python's objects are named by type."""
    with service(tmp_path) as pid:
        done = modelguard("diagnose", "--pid", str(pid), "--time", "8s", "--json")
    if refused(done):
        pytest.skip("no right to trace processes here")
    assert 1 == done.returncode, done.stderr
    report = json.loads(done.stdout)
    assert ("calls", "python objects") == (report["measured"]["per"], report["causes"][0]["name"])
    assert "builtins.list" in report["causes"][0]["seen"]


def test_a_service_that_forbids_it(tmp_path: Path) -> None:
    """PYTHON_DISABLE_REMOTE_DEBUG is respected, and the error says so."""
    with service(tmp_path, PYTHON_DISABLE_REMOTE_DEBUG="1") as pid:
        done = modelguard("doctor", "--pid", str(pid), "--inside")
    assert (2, "") == (done.returncode, done.stdout)
    assert "its Python does not allow that" in done.stderr or refused(done)


def test_a_service_whose_main_thread_is_away(tmp_path: Path) -> None:
    """It sleeps in a library: after ten seconds the error says so."""
    with service(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(1000)") as pid:
        done = modelguard("doctor", "--pid", str(pid), "--inside")
    assert "has run no Python code in its main thread for 10 seconds" in done.stderr or refused(done)
