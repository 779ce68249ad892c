"""The wheel that users install works: built, installed alone, used outside the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="needs the package build")
pytest.importorskip("hatchling", reason="needs the build backend")

ROOT = Path(__file__).parents[2]

USER = """
import modelguard
from modelguard import Uses, guard

class Model:
    def __call__(self, text):
        return text.upper()

model = guard(Model, reload_on=Uses(1_000))

@model
def shout(model, text: str) -> str:
    return model(text)

print(modelguard.__file__)
print(shout("before"), model.status().generation)
model.reload()
print(shout("after"), model.status().generation)
model.close()
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the source tree and give what it printed; its errors are part of the failure."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def user(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a clean environment with the wheel and what it asks for, and nothing else."""
    home = tmp_path_factory.mktemp("user")
    # pip comes from this environment: installing one more pip would take longer than all the rest.
    venv.create(home / "venv", symlinks=True, with_pip=False)
    run(sys.executable, "-m", "pip", "--python", home / "venv/bin/python", "install", "--quiet", wheel, cwd=home)
    return home


@pytest.mark.timeout(120)
def test_the_wheel_carries_the_types_and_the_licence_and_nothing_foreign(wheel: Path) -> None:
    """The wheel contains `py.typed`, the licence, the package and its metadata, and nothing else."""
    files = zipfile.ZipFile(wheel).namelist()
    assert "modelguard/py.typed" in files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)
    assert {"modelguard", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"} == {name.split("/")[0] for name in files}


@pytest.mark.timeout(120)
def test_the_source_archive_is_the_whole_project(dist: Path) -> None:
    """The source archive has tests, documentation and examples for packagers, and no build results."""
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        files = {Path(*Path(name).parts[1:]) for name in opened.getnames()}
    tops = {path.parts[0] for path in files if path.parts}
    assert {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"} <= tops
    assert {"benchmarks", "docs", "examples", "src", "tests"} <= tops
    assert set() == {path for path in files if path.suffix == ".pyc" or path.parts[:1] in {("build",), ("dist",)}}


@pytest.mark.timeout(120)
def test_what_the_archives_say_of_themselves_is_well_formed(dist: Path) -> None:
    """An index accepts both, and can show the README."""
    pytest.importorskip("twine", reason="needs the package twine")
    checked = run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir(), cwd=dist)
    assert 2 == checked.count("PASSED")


@pytest.mark.timeout(300)
def test_a_guard_runs_from_the_installed_wheel(user: Path) -> None:
    """With nothing but the wheel and its dependencies, a guarded function answers before and after a reload."""
    where, *answers = run(user / "venv/bin/python", "-W", "error", "-c", USER, cwd=user).splitlines()
    assert Path(where).is_relative_to(user)
    assert ["BEFORE 1", "AFTER 2"] == answers


@pytest.mark.timeout(120)
def test_the_wheel_carries_every_page_of_the_documentation(wheel: Path) -> None:
    """What errors and the doctor refer to is installed, and the API reference and pictures are not."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if name.startswith("modelguard/docs/")}
    assert {f"modelguard/docs/{page.name}": page.read_bytes() for page in (ROOT / "docs").glob("*.md")} == found


@pytest.mark.timeout(300)
def test_the_documentation_can_be_read_from_the_wheel(user: Path) -> None:
    """`modelguard docs` lists the pages, and prints the section that a finding of the doctor names."""
    command = user / "venv/bin/modelguard"
    assert "doctor" in [line.split()[0] for line in run(command, "docs", cwd=user).splitlines() if line]
    assert run(command, "docs", "doctor#mg101", cwd=user).startswith("### MG101\n")


@pytest.mark.timeout(300)
def test_the_command_is_installed(user: Path, wheel: Path) -> None:
    """The wheel brings the command `modelguard`, which works without any extra."""
    _, version, *_ = wheel.name.split("-")
    assert f"modelguard {version}" == run(user / "venv/bin/modelguard", "--version", cwd=user).strip()
