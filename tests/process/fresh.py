"""Programs in an interpreter of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any


def fresh_process(program: str, seconds: float, **environ: str) -> Any:
    """Run ``program`` in an interpreter of its own; returns what it printed last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
