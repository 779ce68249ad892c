"""The doctor at real services that run already: gunicorn and uvicorn, seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Server

from modelguard.diagnosis import Facts, examine, facts_of_process

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="running processes are read from /proc"),
]

SECRET = "hunter2-word"

#: An app that holds 200 MB of its own, as a model would be.
APP = """
import os
model = bytearray(os.urandom(1)) * 200_000_000
def app(environ, start_response):
    start_response("200 OK", [])
    return [b"ok"]
async def asgi(scope, receive, send):
    pass
"""


def found(facts: Facts) -> dict[str, Any]:
    return {finding.number: finding for finding in examine(facts).findings}


@contextmanager
def running(*words: str, cwd: Path, ready: Callable[[Facts], bool], **environ: str) -> Iterator[int]:
    """Start a server, wait until the facts are as expected, and end it."""
    with Server(cwd, "-m", *words, environment=environ) as server:
        pid = server.process.pid
        server.wait_until(lambda: ready(facts_of_process(pid)), "facts as expected", seconds=60)
        yield pid


def holding(role: str, count: int) -> Callable[[Facts], bool]:
    """Whether this many processes of a role hold the model."""
    return lambda facts: count == sum(1 for p in facts.processes if p.role == role and p.private > 190e6)


@pytest.fixture
def service(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def test_gunicorns_workers_hold_a_copy_each(service: Path) -> None:
    """The workers are found below the master, and measured."""
    pytest.importorskip("gunicorn")
    words = ("gunicorn", "-w", "2", "--bind", "127.0.0.1:0", "app:app")
    with running(*words, cwd=service, ready=holding("forked", 2)) as pid:
        facts = facts_of_process(pid)
    assert ("gunicorn", 2, None) == (facts.server.kind, facts.server.workers, facts.server.preload)
    assert 3 == len(found(facts)["MG402"].seen)
    assert facts.interpreter is not None
    assert sys.version_info[:2] == facts.interpreter.version


def test_gunicorns_preload_shares_the_copy(service: Path) -> None:
    """The master holds the model and the workers share it."""
    pytest.importorskip("gunicorn")
    words = ("gunicorn", "-w", "2", "--preload", "--bind", "127.0.0.1:0", "app:app")
    ready: Callable[[Facts], bool] = lambda facts: 2 == len(facts.running("forked"))  # noqa: E731
    with running(*words, cwd=service, ready=ready) as pid:
        assert "MG402" not in found(facts_of_process(pid))


def test_uvicorns_workers_hold_a_copy_each(service: Path) -> None:
    """They are started afresh by multiprocessing, and each holds a copy."""
    pytest.importorskip("uvicorn")
    words = ("uvicorn", "--workers", "2", "--port", "0", "--lifespan", "off", "app:asgi")
    with running(*words, cwd=service, ready=holding("spawned", 2)) as pid:
        finding = found(facts_of_process(pid))["MG404"]
    assert "uvicorn runs 2 workers, which it has not forked" == finding.seen[0]


def test_secrets_of_a_running_service(service: Path) -> None:
    """Neither its variables nor its arguments are shown."""
    pytest.importorskip("gunicorn")
    words = ("gunicorn", "--env", f"DB_PASSWORD={SECRET} more", "--bind", "127.0.0.1:0", "app:app")
    with running(*words, cwd=service, ready=lambda facts: True, API_KEY=SECRET) as pid:
        done = doctor("--pid", str(pid), "--json")
    assert json.loads(done.stdout)["subject"].startswith(f"process {pid}: ")
    assert SECRET not in done.stdout + done.stderr
    assert "more" not in json.loads(done.stdout)["subject"]


def test_a_process_of_someone_else() -> None:
    """The error says which user may look at it."""
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    script = """
import os
os.setuid(65534)
from modelguard.diagnosis._facts_process import facts_of_process
try:
    facts_of_process(os.getppid())
except ValueError as error:
    print(error)
"""
    # The path of this checkout need not be open to others, so all is imported before the change of user.
    imports = "import modelguard.diagnosis._facts_process, psutil\n"
    done = subprocess.run(
        [sys.executable, "-c", imports + script], capture_output=True, text=True, check=False, timeout=60
    )
    assert "as its owner, or as root" in done.stdout, done.stderr


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelguard", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_nothing_heavy_is_imported() -> None:
    """A plain report needs neither torch nor numpy."""
    script = """
import sys
from modelguard.cli import main
main(["doctor"])
print(sorted({"torch", "numpy", "gunicorn"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert "[]" == done.stdout.splitlines()[-1], done.stderr
