"""The lines that allocate what stays."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

PROGRAM = """
import ctypes, importlib.util, json, sys
if sys.argv[1] == "tracemalloc":
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name: None if name == "memray" else find(name)
from modelguard.diagnosis._counts import kept_by_line
kept = []
def run():
    for _ in range(200):
        kept.append([0] * 500)
    return 200
print(json.dumps(kept_by_line(run)))
"""


@pytest.mark.parametrize("tool", ["tracemalloc", "memray"])
def test_the_line_that_keeps_most_comes_first(tool: str) -> None:
    """With its bytes per call."""
    if tool == "memray":
        pytest.importorskip("memray", reason="memray is not installed")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tool], capture_output=True, text=True, check=False, timeout=100
    )
    found = json.loads(done.stdout)
    assert (tool, 200) == (found["traced_by"], found["traced_calls"])
    line, size = next(iter(found["traced"].items()))
    assert "<string>:10" == line
    assert 4000 < size < 5000


def test_a_folder_of_that_name(tmp_path: Path) -> None:
    """It is not memray, and tracemalloc is used."""
    (tmp_path / "memray").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ""], capture_output=True, text=True, check=False, timeout=100, cwd=tmp_path
    )
    if importlib.util.find_spec("memray") is None:
        assert "tracemalloc" == json.loads(done.stdout)["traced_by"]
