"""``frameworks.grpc`` on real servers, in a process of its own: gRPC's threads do not survive a fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("grpc_cases.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_errors_deadlines_and_cancellations_become_status_codes() -> None:
    """Under servers with threads and asynchronous ones, for single answers and streams: all of grpc_cases.py."""
    pytest.importorskip("grpc", reason="needs grpcio")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert 0 == done.returncode, done.stdout + done.stderr
