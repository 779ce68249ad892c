"""New weights under older gunicorns: each version is installed beside the environment, once, into build/gunicorn."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.process.gunicorn_server import running
from tests.process.harness import Clients, wait_until

pytest.importorskip("gunicorn")
pytestmark = pytest.mark.timeout(150)

INSTALLED = Path(__file__).parents[2] / "build" / "gunicorn"
#: Up to 23 its handler of SIGCHLD waits for all children; up to 21.2 it has another heartbeat than 22.
VERSIONS = ("20.0.4", "20.1.0", "21.2.0", "22.0.0", "23.0.0", "24.1.1", "25.3.0")
POLICY = "Modified(WEIGHTS, atomic=True)"


def installed(version: str) -> Path:
    """The folder with this gunicorn alone, which is kept between runs; skips where pip cannot install it.

    gunicorn 20 imports ``pkg_resources``, which setuptools had up to its version 81.
    """
    folder = INSTALLED / version
    if not folder.exists():
        INSTALLED.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=INSTALLED) as fresh:
            target = Path(fresh) / version
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--timeout", "15"]
            wanted = [f"gunicorn=={version}", *(["setuptools<81"] if version.startswith("20") else [])]
            command = [*pip, "install", "--no-deps", "--target", str(target), *wanted]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
                why = done.stderr.strip().splitlines()[-1:] if done.returncode else None
            except subprocess.TimeoutExpired:
                why = ["pip took longer than a minute"]
            if why is not None:
                pytest.skip(f"pip cannot install gunicorn {version} here: {' '.join(why)}")
            if not folder.exists():  # another run may have installed it meanwhile
                target.rename(folder)
    return folder


@pytest.mark.timeout(30)
def test_the_newest_version_is_the_one_of_the_other_tests() -> None:
    """The versions here and the installed one are those that the documentation states: 20.0 to 27."""
    page = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text(encoding="utf-8")
    newest = importlib.metadata.version("gunicorn").split(".")[0]
    older = [version.split(".")[: 2 if version < "22" else 1] for version in VERSIONS]
    assert f"Tested with gunicorn {', '.join(map('.'.join, older))} and {newest}" in page


@pytest.mark.parametrize("version", VERSIONS)
def test_new_weights_are_rolled_out_under_every_version(version: str, tmp_path: Path) -> None:
    """The master survives the trial of new weights, replaces all workers, loses no request, and ends at once."""
    with running(tmp_path, "-w", "2", policy=POLICY, PYTHONPATH=str(installed(version))) as server:
        assert f"Starting gunicorn {version}" in server.log
        old = server.children()
        with Clients(server, count=2) as clients:
            server.replace_file("weights", "2")
            wait_until(lambda: not old & server.children() and 2 == len(server.children()), what="all are replaced")
        assert (clients.sent, []) == (clients.answered, clients.failures), f"{clients}\n{server.log}"
        assert (2, ["2", "True", "True"]) == (server.replaced(), server.words()[1:])
        assert "cannot be shared" not in server.log
        server.process.terminate()
        assert 0 == server.process.wait(25)
