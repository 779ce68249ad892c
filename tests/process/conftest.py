"""What several process tests need: the source archive and the wheel, built once; signals that reach nobody else."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def signals_to_one_process() -> Iterator[None]:
    """Fail a test that would signal its whole process group: a worker that is not forked yet has the number 0."""
    send = os.kill

    def kill(pid: int, number: int) -> None:
        assert pid > 0, "this would reach the test run, and whatever has started it"
        if (pid, number) == (os.getpid(), signal.SIGSEGV):
            faulthandler.disable()  # it is the test's intention, and no traceback is needed
        send(pid, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", kill)
        yield


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive from this tree, and the wheel from it, with the backend that is installed here."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, f"{command}\n{done.stdout}{done.stderr}"
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    """Give the wheel."""
    (built,) = dist.glob("*.whl")
    return built
