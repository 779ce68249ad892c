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
kept, text = [], "x" * 300_000
def run():
    global text
    for _ in range(200):
        kept.append([0] * 500)
        text = text + "xxxx"
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
    assert "<string>:11" == line
    assert 4000 < size < 5000
    assert 0 == found["traced"]["<string>:12"], "of what was only made longer it is not known by how much"
    assert 4000 < found["large"] < 5000


@pytest.mark.parametrize("frames", [1, 3, 25])
def test_a_program_that_traces_already(frames: int) -> None:
    """The line is that of the allocation, and what is there before and the look at it are not what stays."""
    done = subprocess.run(
        [sys.executable, "-X", f"tracemalloc={frames}", "-c", PROGRAM, "tracemalloc"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    (line, size), *others = json.loads(done.stdout)["traced"].items()
    assert "<string>:11" == line
    assert 4000 < size < 5000
    assert all(of_another < size / 10 for _, of_another in others)


def test_a_folder_of_that_name(tmp_path: Path) -> None:
    """It is not memray, and tracemalloc is used."""
    (tmp_path / "memray").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ""], capture_output=True, text=True, check=False, timeout=100, cwd=tmp_path
    )
    if importlib.util.find_spec("memray") is None:
        assert "tracemalloc" == json.loads(done.stdout)["traced_by"]
