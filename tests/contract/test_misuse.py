"""The misuse table of docs/serving.md: each line gives the error that it promises."""

from __future__ import annotations

import asyncio
import builtins
import re
from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_docs import snippets

import modelguard
from modelguard import errors

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
ROW = re.compile(r"^\| `(?P<code>.+)` \| `(?P<error>\w+)` \| (?P<says>.+) \|$", re.MULTILINE)

ROWS = [found.groups() for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the snippets of the page define."""
    names: dict[str, Any] = {**vars(modelguard), "asyncio": asyncio, "__name__": "serving"}
    for snippet in snippets(PAGE.read_text(encoding="utf-8")):
        if snippet.reason is None:
            exec(compile("\n".join(snippet.code), str(PAGE), "exec"), names)  # the page is our own
    return names


def test_the_table_is_there() -> None:
    """Its rows are found: a table that nobody can read would promise nothing."""
    assert len(ROWS) > 20


@pytest.mark.parametrize(("code", "error", "says"), ROWS, ids=[row[0] for row in ROWS])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_each_misuse_gives_its_error(page: dict[str, Any], code: str, error: str, says: str) -> None:
    """By name, with what is wrong; and the next call of the same function works."""
    kind = getattr(errors, error, None) or getattr(builtins, error)
    with pytest.raises(kind, match=re.escape(says)):
        eval(code, page)
    assert "tea" == page["predict"]("tea")
