"""A user's project with the wheel installed: its suite passes, and finds a leak."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytest.importorskip("build", reason="needs the package build")
pytest.importorskip("hatchling", reason="needs the build backend")

SAMPLE = Path(__file__).parents[1] / "downstream"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sample's suite forks and reads /proc"),
]


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a fresh environment with the wheel, and a copy of the project.

    Without a network: pytest and what the wheel depends on come from this environment, modelguard from the wheel.
    """
    home = tmp_path_factory.mktemp("downstream") / "project"
    shutil.copytree(SAMPLE, home, ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(home / ".venv", symlinks=True, with_pip=False)
    (site,) = (home / ".venv/lib").glob("python*/site-packages")
    # As lines and not as site folders of their own, so that nothing installed there in editable mode comes along.
    here = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
    site.joinpath("here.pth").write_text("\n".join(here) + "\n", encoding="utf-8")
    python = home / ".venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", wheel], check=True, cwd=home)
    return home


def suite(project: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Run the project's suite as its author would."""
    foreign = ("PYTHONPATH", "PYTEST_PLUGINS", "PYTEST_ADDOPTS")
    clean = {name: value for name, value in os.environ.items() if name not in foreign} | environ
    command = [project / ".venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=project, env=clean, capture_output=True, text=True, check=False, timeout=240)
    return done.returncode, done.stdout + done.stderr


def test_modelguard_comes_from_the_wheel(project: Path) -> None:
    """The project's environment has the wheel's modelguard, and pytest finds the plugin by itself."""
    where = "import modelguard.testing.plugin as it; print(it.__file__)"
    command = [project / ".venv/bin/python", "-I", "-c", where]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(project / ".venv")
    _, told = suite(project, "--fixtures")
    assert "modelguard_clock" in told


def test_the_projects_suite_passes(project: Path) -> None:
    """Every fixture, both assertions and the marker do their work in a project that knows the wheel alone."""
    code, told = suite(project)
    assert 0 == code, told
    assert "7 passed" in told


def test_a_seeded_leak_fails_the_suite(project: Path) -> None:
    """The same suite with a leak in the service fails at the one test that is for it, which names what grew."""
    code, told = suite(project, SAMPLE_LEAK="1")
    assert 1 == code, told
    assert "1 failed, 6 passed" in told
    assert "FAILED tests/test_sample_service.py::test_a_request_leaves_nothing" in told
    assert "count() grows with its calls" in told
    assert "sample_service.py:33" in told


def test_the_suite_passes_under_xdist(project: Path) -> None:
    """Spread over two worker processes, the suite passes as well."""
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    code, told = suite(project, "-n", "2")
    assert 0 == code, told
    assert "7 passed" in told
