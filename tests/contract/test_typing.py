"""What type checkers make of the public API: the right types, and the mistakes found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="the checkers are installed beside the main interpreter only")
pytest.importorskip("pyright", reason="the checkers are installed beside the main interpreter only")

ROOT = Path(__file__).parents[2]
API = Path("tests/typing/api.py")
MISUSE = Path("tests/typing/misuse.py")

pytestmark = pytest.mark.timeout(300)  # mypy without its cache reads all of torch


def mypy(file: Path) -> dict[int, str]:
    """Check one file with the project's settings: the first error of each line."""
    found: dict[int, str] = {}
    # A silenced note on some library leaves an empty line.
    # A cache of its own: that of `make check`, which may run beside the tests, is of other options.
    options = ("--cache-dir", ".mypy_cache/tests", "--follow-imports", "silent", "--output", "json")
    for line in filter(None, _run("mypy", *options, file).splitlines()):
        error = json.loads(line)
        if error["severity"] == "error":
            assert file == Path(error["file"]), error
            found.setdefault(error["line"], error["message"])
    return found


def pyright(file: Path) -> dict[int, str]:
    """Check one file with the project's settings: the first error of each line."""
    found: dict[int, str] = {}
    for error in json.loads(_run("pyright", "--outputjson", "--pythonpath", sys.executable, file))[
        "generalDiagnostics"
    ]:
        if error["severity"] == "error":
            found.setdefault(error["range"]["start"]["line"] + 1, error["message"])
    return found


def _run(module: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode in {0, 1}, done.stdout + done.stderr  # 2 and more: the checker itself failed
    return done.stdout


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_the_types_that_users_see(checker: Callable[[Path], dict[int, str]]) -> None:
    """A decorated function has its written signature without the model, of every kind of function."""
    assert {} == checker(API)


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_mistakes_are_found_while_typing(checker: Callable[[Path], dict[int, str]]) -> None:
    """Each line marked WRONG is an error, and no other line is."""
    lines = (ROOT / MISUSE).read_text(encoding="utf-8").splitlines()
    wrong = {number for number, line in enumerate(lines, start=1) if line.endswith("# WRONG")}
    assert wrong == set(checker(MISUSE))
