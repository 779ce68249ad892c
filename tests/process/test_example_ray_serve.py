"""The example runs as its README says: its guarded replicas are replaced amid traffic, and an overload is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("ray", "spacy")

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        sys.version_info[:2] != (3, 11) or any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"the example needs {', '.join(NEEDED)}, and Ray is tested on Python 3.11, where it is installed",
    ),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Any]:
    """What the example's own driver saw of the guarded service."""
    folder = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))  # short: Ray's sockets lie in there
    (folder / "ray").mkdir()
    report = folder / "report.json"
    command = [sys.executable, "-m", "examples.ray_serve.drive", "--service", "guarded", "--json", str(report)]
    environment = os.environ | {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    if "PYTHONPATH" in environment:  # replicas run in another folder
        environment["PYTHONPATH"] = str(Path(environment["PYTHONPATH"]).resolve())
    try:
        done = subprocess.run(
            [*command, "--seconds", "30", "--uses", "60"],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=environment,
            timeout=160,
        )
        assert 0 == done.returncode, done.stderr[-3000:]
        yield json.loads(report.read_text(encoding="utf-8"))["guarded"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_replicas_that_have_grown_are_replaced_and_nobody_notices(guarded: Any) -> None:
    """No text of the steady traffic is lost, while at least one replica makes room for a fresh one."""
    told = guarded["steady"]
    assert told["replicas"] > 2, told
    assert 0 == told["lost"], told
    assert told["answered"] > 0.9 * (told["answered"] + told["refused"]), told


def test_a_burst_is_answered_or_refused(guarded: Any) -> None:
    """Under far too much load it answers a part, refuses the rest, and loses nothing."""
    told = guarded["burst"]
    assert told["answered"] > 0, told
    assert told["refused"] > 0, told
    assert 0 == told["lost"], told
