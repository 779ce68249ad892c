"""What a release says of itself is said in one place, and the places that repeat it agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def test_the_version_is_written_in_one_file() -> None:
    """Raising the version is one change: no source file and no page repeats it."""
    version = re.compile(rf"""__version__ *=|version *[:=] *["']{re.escape(PROJECT["version"])}["']""")
    files = [*ROOT.glob("src/**/*.py"), ROOT / "docs" / "conf.py", ROOT / "Makefile"]
    assert [] == [path.name for path in files if version.search(path.read_text(encoding="utf-8"))]


def test_the_changelog_knows_the_version() -> None:
    """The version that would be released now has its entry: under its own heading, or announced as unreleased."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert "Unreleased" == headings[0]
    unreleased = text.partition("## [Unreleased]")[2].partition("\n## ")[0]
    assert PROJECT["version"] in headings or f", {PROJECT['version']}," in unreleased


def test_every_python_that_is_declared_is_tested() -> None:
    """The interpreters that the package claims are those that .ci/run looks for."""
    declared = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: Python :: 3\.\d+$", name)]
    tested = re.findall(r"for version in (3[\d. ]+); do", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert declared == " ".join(tested).split()
    assert f">={declared[0]}" == PROJECT["requires-python"]


def test_the_extra_all_is_every_other_extra() -> None:
    """`modelguard-lifecycle[all]` leaves nothing out."""
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    assert sorted(set(extras) - {"all"}) == sorted(everything.partition("[")[2].rstrip("]").split(","))


def test_every_dependency_has_a_lower_bound_and_no_upper_one() -> None:
    """Users see the oldest version that was tested, and can use newer ones."""
    asked = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    foreign = [line for line in asked if not line.startswith(f"{PROJECT['name']}[")]
    assert [] == [line for line in foreign if not re.fullmatch(r"[a-z-]+(\[[a-z]+\])?>=[\d.]+", line)]


@pytest.fixture
def recipe() -> dict[str, Any]:
    """The recipe with its own variables filled in."""
    text = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    for name, value in yaml.safe_load(text)["context"].items():
        text = text.replace(f"${{{{ {name} }}}}", value)
    return dict(yaml.safe_load(text))


class TestCondaRecipe:
    """The recipe for conda-forge installs what the wheel installs."""

    def test_it_is_of_this_version(self, recipe: dict[str, Any]) -> None:
        """Name and version are those of the project, and the source is its archive."""
        name, version = PROJECT["name"], PROJECT["version"]
        assert {"name": name, "version": version} == recipe["package"]
        assert recipe["source"]["url"].endswith(f"{name.replace('-', '_')}-{version}.tar.gz")
        assert re.fullmatch(r"[0-9a-f]{64}", recipe["source"]["sha256"])

    def test_it_asks_for_the_same_packages(self, recipe: dict[str, Any]) -> None:
        """Dependencies and their lower bounds, the build backend and the interpreter are those of pyproject.toml."""
        run, host = ([line.replace(" ", "") for line in recipe["requirements"][part]] for part in ("run", "host"))
        assert [f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]] == run
        assert {"pip", *PYPROJECT["build-system"]["requires"]} < set(host)
        assert f">={recipe['context']['python_min']}" == PROJECT["requires-python"]

    def test_it_has_the_same_commands_and_licence(self, recipe: dict[str, Any]) -> None:
        """The command line exists there too, and the licence goes with it."""
        commands = [f"{name} = {where}" for name, where in PROJECT["scripts"].items()]
        assert commands == recipe["build"]["python"]["entry_points"]
        about = recipe["about"]
        assert [PROJECT["description"], PROJECT["license"]] == [about["summary"], about["license"]]
        assert [about["license_file"]] == PROJECT["license-files"]
        assert (ROOT / about["license_file"]).exists()

    def test_nothing_is_left_to_fill_in(self, recipe: dict[str, Any]) -> None:
        """The recipe uses no variable that it does not set, save the interpreter, which the build sets."""
        assert {"PYTHON"} == set(re.findall(r"\$\{\{ (\w+) \}\}", str(recipe)))
