"""The tests keep the rules of CONTRIBUTING.md that can be read off their source."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))


def name_of(file: Path) -> str:
    """Give the file's path below tests/."""
    return file.relative_to(TESTS).as_posix()


def cases_in(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Find the test functions and test methods of a file."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [function for function in functions if function.name.startswith("test_")]


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_each_test_states_its_promise(file: Path) -> None:
    """Every test has a docstring of one line."""
    tests = cases_in(ast.parse(file.read_text(encoding="utf-8")))
    assert [] == [test.name for test in tests if len((ast.get_docstring(test) or "").splitlines()) != 1]


@pytest.mark.parametrize("file", [file for file in FILES if "unit" in file.parts], ids=name_of)
def test_unit_tests_do_not_sleep(file: Path) -> None:
    """A unit test hands in a clock of its own and waits for nothing."""
    source = file.read_text(encoding="utf-8")
    assert [] == [call for call in ("time.sleep", "asyncio.sleep", "import sleep") if call in source]


@pytest.mark.parametrize("file", [file for file in FILES if "process" in file.parts], ids=name_of)
def test_process_tests_end(file: Path) -> None:
    """What forks, execs or loads a real model says how long it may take."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    if any("mark.timeout" in mark for mark in marks):
        return  # for the whole file, by pytestmark
    unbounded = [test for test in cases_in(tree) if "mark.timeout" not in decorators_of(test)]
    assert [] == [test.name for test in unbounded]


def decorators_of(test: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Write out a test's decorators."""
    return " ".join(ast.unparse(decorator) for decorator in test.decorator_list)


def test_each_fault_has_the_tests_that_it_names() -> None:
    """Every file, class and test that regressions.md names exists."""
    faults = (TESTS / "regressions.md").read_text("utf-8")
    named = re.findall(r"`((?:unit|process|contract|diagnosis)/[\w/]+\.py)((?:::\w+)*)`", faults)
    assert len(named) > 100
    missing = [
        f"{path}{names}" for path, names in named for name in names.split("::")[1:] if name not in defined_in(path)
    ]
    assert [] == missing


@functools.cache
def defined_in(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}
