"""Commands for isolated functions of real processes: ``modelguard ctl``, SIGHUP and the admin route."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process import isolated_servers
from tests.process.harness import wait_until
from tests.process.host_callers import end_all, molds
from tests.process.isolated_servers import UVICORN, started

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the socket is Linux's"),
    pytest.mark.timeout(240),
]

#: The scope is that of the test. It takes commands, forks if it is told to, and waits.
PROGRAM = r"""
    import os, signal, sys
    from modelguard import control, guard, isolate

    nlp = guard(dict, reload_on=None, name="nlp")

    @isolate(workers=1, timeout="60s", scope=SCOPE, name="lemmas")
    @guard(dict, reload_on=None)
    def lemmas(model):
        return os.getpid()

    if __name__ == "__main__":
        control.listen(sighup=True)
        child = os.fork() if "fork" in sys.argv else 1
        if child == 0:
            import ctypes
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent
        lemmas.load()
        os.write(1, b"ready\n")  # at once, beside the other process
        while True:
            signal.pause()
"""


@contextmanager
def program(folder: Path, *words: str, scope: str = "process") -> Iterator[int]:
    """Start it; the process id of the first process, when all of them have a mold."""
    (folder / "service.py").write_text(textwrap.dedent(PROGRAM).replace("SCOPE", repr(scope)))
    environment = {**os.environ, "MODELGUARD_RUNTIME_DIR": str(folder / "run")}
    command = [sys.executable, "service.py", *words]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for _ in range(1 + len(words)):
            assert "ready\n" == process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if scope == "host":
            end_all(folder)


def ctl(*words: object) -> tuple[int, str]:
    """The command's exit status, and all that it prints."""
    command = [sys.executable, "-m", "modelguard", "ctl", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def statuses(pid: int) -> dict[int, dict[str, Any]]:
    """The status of ``lemmas`` in each process below ``pid`` that takes commands."""
    code, text = ctl(pid, "status", "lemmas", "--json")
    assert 0 == code, text
    return {line["pid"]: line["guards"][0]["status"] for line in map(json.loads, text.splitlines())}


class TestCtl:
    def test_each_command(self, tmp_path: Path) -> None:
        """It is listed beside the guards, and obeys as they do: reload is a new mold, unload the end of one."""
        with program(tmp_path) as pid:
            code, text = ctl(pid, "status")
            assert (0, True, True) == (code, "  lemmas  ready; generation 1" in text, "  nlp     new" in text)
            first = statuses(pid)[pid]["mold"]
            assert 0 == ctl(pid, "reload")[0]
            second = statuses(pid)[pid]
            assert (2, True) == (second["generation"], second["mold"] != first)
            assert 0 == ctl(pid, "pause", "lemmas")[0]
            assert statuses(pid)[pid]["paused"]
            assert 0 == ctl(pid, "resume")[0]
            assert not statuses(pid)[pid]["paused"]
            assert 0 == ctl(pid, "unload")[0]
            assert ("idle", None, []) == tuple(statuses(pid)[pid][name] for name in ("state", "mold", "workers"))

    def test_an_unknown_name(self, tmp_path: Path) -> None:
        """The error names the isolated functions too."""
        with program(tmp_path) as pid:
            code, text = ctl(pid, "reload", "asr")
            assert (1, True) == (code, "There are: 'lemmas', 'nlp'" in text)

    def test_sighup(self, tmp_path: Path) -> None:
        """A new mold, as a guard gets a new model."""
        with program(tmp_path) as pid:
            os.kill(pid, signal.SIGHUP)
            wait_until(lambda: statuses(pid)[pid]["generation"] == 2, "the next mold")


class TestHost:
    def test_a_command_to_all_processes_concerns_the_one_mold(self, tmp_path: Path) -> None:
        """It is replaced once, paused and resumed by any of them, and each shows it."""
        with program(tmp_path, "fork", scope="host") as pid:
            code, text = ctl(pid, "reload", "--all")
            assert 0 == code, text
            found = wait_for(pid, "generation", 2)
            assert 1 == len({status["broker"] for status in found.values()})
            assert 1 == len(molds(tmp_path))
            (child,) = set(found) - {pid}
            assert 0 == ctl(child, "pause")[0]
            wait_for(pid, "paused", True)  # noqa: FBT003 - the value
            assert 0 == ctl(pid, "resume", "--all")[0]
            wait_for(pid, "paused", False)  # noqa: FBT003 - the value
            assert 0 == ctl(child, "unload")[0]
            wait_for(pid, "state", "idle")
            assert [] == molds(tmp_path)


def wait_for(pid: int, name: str, value: object) -> dict[int, dict[str, Any]]:
    """Wait until both processes show a value: a broker that is busy is shown as it was last seen."""
    found: dict[int, dict[str, Any]] = {}

    def shown() -> bool:
        found.update(statuses(pid))
        return [value, value] == [status[name] for status in found.values()]

    wait_until(shown, f"{name} is {value}")
    return found


SECRET = "0123456789abcdef"
APP = """
    import os
    from modelguard import guard, isolate
    from modelguard.frameworks.admin import Admin

    @isolate(workers=1, timeout="60s", name="lemmas")
    @guard(dict, reload_on=None)
    def predict(model):
        return os.getpid()

    AT_STARTUP = True

    def content(answer):
        return str(answer).encode()
""" + isolated_servers.ASGI.replace(
    "ModelGuardMiddleware(answer)", f"ModelGuardMiddleware(answer, admin=Admin({SECRET!r}))"
)


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="needs uvicorn")
def test_the_admin_route(tmp_path: Path) -> None:
    """Each command, beside a server's requests: the answer has the figures that it left."""
    with started(tmp_path, APP, *UVICORN) as server:

        def admin(command: str, method: str = "POST") -> tuple[int, dict[str, Any]]:
            headers = {"Authorization": f"Bearer {SECRET}"}
            answer = server.ask(f"/modelguard/{command}", method=method, headers=headers, timeout=120)
            (entry,) = json.loads(answer.text)["guards"]
            assert ("lemmas", "isolated function", None) == (entry["name"], entry["kind"], entry["error"])
            return answer.status, entry["status"]

        first = admin("status", "GET")[1]
        code, second = admin("reload?name=lemmas")
        assert (200, 2, True) == (code, second["generation"], second["mold"] != first["mold"])
        assert (True, False) == (admin("pause")[1]["paused"], admin("resume")[1]["paused"])
        assert "idle" == admin("unload")[1]["state"]
        assert 200 == server.ask("/").status
        assert 3 == admin("status", "GET")[1]["generation"]
