"""The doctor at real services: gunicorn and uvicorn, their configurations, their processes."""

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

from modelguard.diagnosis import Facts, examine, facts_of_gunicorn, facts_of_process
from modelguard.errors import InvalidOption

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
    assert facts.server is not None
    assert ("gunicorn", 2, False) == (facts.server.kind, facts.server.workers, facts.server.preload)
    assert 3 == len(found(facts)["MG402"].seen)
    assert facts.interpreter is not None
    assert sys.version_info[:2] == facts.interpreter.version


def test_gunicorns_preload_without_freezing(service: Path) -> None:
    """The master holds the model, the workers share it, and nothing has frozen it."""
    pytest.importorskip("gunicorn")
    words = ("gunicorn", "-w", "2", "--preload", "--bind", "127.0.0.1:0", "app:app")
    ready: Callable[[Facts], bool] = lambda facts: 2 == len(facts.running("forked"))  # noqa: E731
    with running(*words, cwd=service, ready=ready) as pid:
        numbers = found(facts_of_process(pid)).keys()
    assert "MG401" in numbers
    assert "MG402" not in numbers


def test_uvicorns_workers_hold_a_copy_each(service: Path) -> None:
    """They are started afresh by multiprocessing, and each holds a copy."""
    pytest.importorskip("uvicorn")
    words = ("uvicorn", "--workers", "2", "--port", "0", "--lifespan", "off", "app:asgi")
    with running(*words, cwd=service, ready=holding("spawned", 2)) as pid:
        finding = found(facts_of_process(pid))["MG404"]
    assert "uvicorn runs 2 workers (the running processes), and each loads the app itself" == finding.seen[0]


def test_a_placebo_in_a_running_service(service: Path) -> None:
    """raw_env has it, and no process has the library."""
    pytest.importorskip("gunicorn")
    (service / "conf.py").write_text("raw_env = ['LD_PRELOAD=/usr/lib/libjemalloc.so.2']\n")
    words = ("gunicorn", "-c", "conf.py", "--bind", "127.0.0.1:0", "app:app")
    with running(*words, cwd=service, ready=lambda facts: True, API_KEY=SECRET) as pid:
        done = doctor("--pid", str(pid), "--json")
    assert 1 == done.returncode
    assert "MG101" in [finding["number"] for finding in json.loads(done.stdout)["findings"]]
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize(("cap", "late"), [("set by the app after its first use", True), ("set at the start", False)])
def test_caps_that_came_too_late_show_from_outside(tmp_path: Path, cap: str, late: bool) -> None:  # noqa: FBT001
    """Compiled code accumulates in spite of them, and /proc shows how much."""
    pytest.importorskip("torch")
    caps = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "LRU_CACHE_CAPACITY": "8"}
    (tmp_path / "net.py").write_text(
        f"""
import os, time, torch
def cap():
    os.environ.update({caps!r})
net = torch.nn.Sequential(torch.nn.Conv1d(128, 192, 5), torch.nn.Conv1d(192, 192, 3))
with torch.inference_mode():
    for length in range(300, 380):
        net(torch.randn(1, 128, length))
        cap()
open("done", "w").close()
time.sleep(100)
"""
    )
    ready: Callable[[Facts], bool] = lambda _: (tmp_path / "done").exists()  # noqa: E731
    with running("net", cwd=tmp_path, ready=ready, **({} if late else caps)) as pid:
        facts = facts_of_process(pid)
    if late and facts.processes[0].compiled < 1e6:
        pytest.skip("torch compiles no code for shapes on this machine")
    assert late is ("MG202" in found(facts)), cap


def test_a_configuration_is_run(tmp_path: Path) -> None:
    """Computed values are known then, and its own output is discarded."""
    (tmp_path / "conf.py").write_text(
        "import os\nworkers = 1 + 2\npreload_app = bool(workers)\nprint('noise')\n"
        "os.environ['LD_PRELOAD'] = '/' + 'x.so'\nos.environ['API_KEY'] = 'x'\n"
    )
    facts = facts_of_gunicorn("conf.py", {}, cwd=tmp_path)
    assert facts.server is not None
    assert (3, True, "workers in conf.py") == (facts.server.workers, facts.server.preload, facts.server.workers_by)
    assert "MG101" in found(facts)


def test_a_configuration_that_is_a_module(tmp_path: Path) -> None:
    """The form python:package.module works as for gunicorn."""
    (tmp_path / "settings.py").write_text("workers = 5\nwsgi_app = 'app:app'\n")
    (tmp_path / "app.py").write_text("import torch\n")
    facts = facts_of_gunicorn("python:settings", {}, cwd=tmp_path)
    assert facts.server is not None
    assert 5 == facts.server.workers
    assert "MG402" in found(facts)


def test_what_is_set_outside_the_configuration_wins(tmp_path: Path) -> None:
    """GUNICORN_CMD_ARGS over the file, the file over WEB_CONCURRENCY."""
    (tmp_path / "conf.py").write_text("workers = 2\n")
    environ = {"GUNICORN_CMD_ARGS": "--max-requests 9", "WEB_CONCURRENCY": "7"}
    server = facts_of_gunicorn("conf.py", environ, cwd=tmp_path).server
    assert server is not None
    assert (2, 9) == (server.workers, server.max_requests)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nraise ValueError('" + SECRET + "')\n", "in line 2 with ValueError. gunicorn --check-config"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("workers = \n", "in line 1 with SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", "SystemExit"),
        ("import os\nos._exit(3)\n", "the end of the process"),
        ("workers = 'many'\n", "its workers is not a whole number"),
        ("while True: pass\n", "more than 2 seconds"),
    ],
)
def test_a_configuration_that_cannot_be_loaded(tmp_path: Path, text: str, says: str) -> None:
    """One line says where and why, without messages that may hold a secret."""
    (tmp_path / "conf.py").write_text(text)
    with pytest.raises(InvalidOption) as caught:
        facts_of_gunicorn("conf.py", {}, cwd=tmp_path, timeout=2)
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)


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


def test_a_command_is_never_run(tmp_path: Path) -> None:
    """Looking at a command executes and imports nothing of it."""
    (tmp_path / "app.py").write_text("open('imported', 'w')\n")
    command = [sys.executable, "-m", "modelguard", "doctor", "--", sys.executable, "app.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert 0 == done.returncode, done.stderr
    assert ["app.py"] == [file.name for file in tmp_path.iterdir()]


def test_nothing_heavy_is_imported() -> None:
    """A plain report needs neither torch nor rich."""
    script = """
import sys
from modelguard.cli import main
main(["doctor"])
print(sorted({"rich", "torch", "numpy", "gunicorn"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert "[]" == done.stdout.splitlines()[-1], done.stderr
