"""What a release says of itself is said in one place, and the places that repeat it agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


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
