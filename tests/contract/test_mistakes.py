"""The tables of mistakes in docs/: each row gives the error and the message that it shows.

After a change of messages, let this test write them into the pages, and read the difference::

    REWRITE=1 make test ARGS=tests/contract/test_mistakes.py
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shlex
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.contract.test_docs import snippets

from modelguard import cli
from modelguard.errors import InvalidOption

ROOT = Path(__file__).parents[2]
HEADER = "| you write | you get | which says |"
RULER = "|---|---|---|"
IN_A_COROUTINE = "in a coroutine: "
FIXTURES = ("modelguard_clock", "modelguard_loader", "modelguard_env")
MARKER = "@pytest.mark."

#: A cell ends at a bar that is not escaped.
CELL = re.compile(r"(?<!\\)\|")
#: What differs from run to run or from machine to machine.
MASKS = (
    (re.compile(r"=<.*?>: (?=[a-z])"), "=...: "),  # the value of an argument, if it is shown as an object
    (re.compile(r"<[^<>]*(<[^<>]*>[^<>]*)*>"), "..."),
    (re.compile(r"(?<![\w./])/\S*/(?=\w)"), ".../"),
    (re.compile(r"\{('\w+'(, )?){2,}\}"), "{...}"),  # a set has no order
    (re.compile(r" (fixed|warning): [a-z ]+ of .*"), ""),  # hazards that depend on the machine or come from other tests
    (re.compile(r"\d+\.\d+ s\b"), "... s"),
    (re.compile(r"takes \d+ (M?B)"), r"takes ... \1"),
)


@dataclass(frozen=True)
class Row:
    """One mistake.

    Attributes:
        page: Where it stands.
        line: The number of its line, from 0.
        written: The first cell, as it stands there.
        error: The name of the error, or the exit status.
        says: The message.
    """

    page: Path
    line: int
    written: str
    error: str
    says: str

    @property
    def code(self) -> str:
        """The code of the first cell."""
        return "\n".join(re.findall(r"`([^`]+)`", self.written)).replace(r"\|", "|")

    @property
    def context(self) -> str:
        """The words before the code."""
        return self.written.partition("`")[0]


def rows(page: Path) -> list[Row]:
    """Find the rows of a page's tables of mistakes."""
    found = []
    inside = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines()):
        inside = line == HEADER or (inside and line.startswith("|"))
        if inside and line not in (HEADER, RULER):
            written, error, says = (cell.strip() for cell in CELL.split(line)[1:-1])
            found.append(Row(page, number, written, error.strip("`"), unquoted(says)))
    return found


def quoted(text: str) -> str:
    """A message as a cell: code, because it may hold anything that means something to Markdown."""
    ticks = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}".replace("|", r"\|")


def unquoted(cell: str) -> str:
    """The message in a cell."""
    return cell.strip("`").strip().replace(r"\|", "|")


PAGES = [page for page in sorted(ROOT.glob("docs/*.md")) if HEADER in page.read_text(encoding="utf-8")]
ROWS = [row for page in PAGES for row in rows(page)]


def masked(error: BaseException | str) -> str:
    """A message without what differs from run to run."""
    text = " ".join(str(error).split())
    for pattern, stand_in in MASKS:
        text = pattern.sub(stand_in, text)
    return text


def run(code: types.CodeType, names: dict[str, Any]) -> None:
    """Run code of a page, which is our own."""
    eval(code, names)


def evaluate(code: str, names: dict[str, Any]) -> None:
    """Run an expression, or statements."""
    kind = "exec"
    try:
        ast.parse(code, mode="eval")
        kind = "eval"
    except SyntaxError:
        pass
    run(compile(code, "mistake", kind, dont_inherit=True), names)


def raised_by(code: str, names: dict[str, Any], *, on_a_loop: bool) -> tuple[str, str]:
    """The name of the error that a mistake raises, and its message."""
    if on_a_loop:
        lines = "\n    ".join(code.splitlines())
        run(compile(f"async def main():\n    {lines}", "mistake", "exec", dont_inherit=True), names)
        code = "asyncio.run(main())"
    try:
        evaluate(code, {"asyncio": asyncio, **names})
    except Exception as error:  # noqa: BLE001 - which error it is, is the question
        return type(error).__name__, masked(error)
    pytest.fail(f"it raises nothing: {code}")


def command_says(code: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The exit status of a command that fails, and its one line."""
    status = cli.main(shlex.split(code)[1:])
    captured = capsys.readouterr()
    assert "" == captured.out
    return f"exit {status}", masked(captured.err)


def marker_says(code: str, pytester: pytest.Pytester) -> tuple[str, str]:
    """The usage error of pytest for a test with this marker."""
    pytester.makepyfile(test_service=f"import pytest\n\n{code}\ndef test_it(): pass")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    (line,) = [line for line in result.errlines if "modelguard_memory" in line]
    return f"exit {int(result.ret)}", masked(line)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder in which pages may write files."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("mistakes"))
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def pages(places: None) -> Mapping[Path, dict[str, Any]]:
    """What the snippets of each page define."""
    found = {}
    for page in PAGES:
        names: dict[str, Any] = {"__name__": page.stem}
        for snippet in snippets(page.read_text(encoding="utf-8")):
            if snippet.reason is None:
                run(compile("\n".join(snippet.code), str(page), "exec", dont_inherit=True), names)
        found[page] = names
    return found


@pytest.fixture(autouse=True)
def no_program_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose command works after all must not turn this process into it."""

    def refuse(*args: object) -> NoReturn:
        raise AssertionError(args)

    monkeypatch.setattr(os, "execve", refuse)


def observed(row: Row, pages: Mapping[Path, dict[str, Any]], request: pytest.FixtureRequest) -> tuple[str, str]:
    """What a row really gives."""
    if row.code.startswith("modelguard "):
        return command_says(row.code, request.getfixturevalue("capsys"))
    if row.code.startswith(MARKER):
        return marker_says(row.code, request.getfixturevalue("pytester"))
    names = {name: request.getfixturevalue(name) for name in FIXTURES if name in row.code}
    return raised_by(row.code, {**pages[row.page], **names}, on_a_loop=row.context == IN_A_COROUTINE)


def rewrite(row: Row, error: str, says: str) -> None:
    """Write what a row really gives into its page."""
    lines = row.page.read_text(encoding="utf-8").splitlines()
    kind = error if error.startswith("exit") else f"`{error}`"
    lines[row.line] = f"| {row.written} | {kind} | {quoted(says)} |"
    row.page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_the_tables_are_there() -> None:
    """The rows are found: a table that no test can read would promise nothing."""
    assert len(ROWS) > 200
    assert [] == [row for row in ROWS if not row.code or row.context not in ("", IN_A_COROUTINE)]


@pytest.mark.parametrize("row", ROWS, ids=[f"{number}: {row.code.splitlines()[-1]}" for number, row in enumerate(ROWS)])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_each_mistake_gives_its_message(
    row: Row, pages: Mapping[Path, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    """A reader who searches the page for a message finds the mistake; and the next correct call works."""
    error, says = observed(row, pages, request)
    if error == "NotSupported" and "is not installed; pip install" in says and row.error != error:
        pytest.skip(says)
    if os.environ.get("REWRITE"):
        rewrite(row, error, says)
        return
    assert (row.error, row.says) == (error, says)
    names = pages[row.page]
    assert ("tea", "TEA", "Anna: tea") == (names["predict"]("tea"), names["shout"]("tea"), names["say"]("Anna"))


def test_messages_are_masked() -> None:
    """Addresses, paths and times are left out; names and values stay."""
    error = InvalidOption("load", masked, why="is called", fix="Write load=lambda: make(path).")
    assert "load=...: is called. Write load=lambda: make(path)." == masked(error)
    assert "swap='x': must be <" == masked("swap='x': must be <")
    assert "it took ... s" == masked("it took 0.25 s")
    assert ".../lookup: gone" == masked("/tmp/pytest-1/lookup: gone")


def test_a_message_survives_its_cell() -> None:
    """Bars and backticks in a message are written so that the table stays a table."""
    for text in ("a | b", "write `or`", "plain"):
        assert text == unquoted(CELL.split(f"| {quoted(text)} |")[1].strip())
