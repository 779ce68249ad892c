"""What the examples' drivers measure of a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from examples._driver import Server, ServerFailed

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="memory that is shared is read from /proc"),
]

#: Writes 100 MB, and has a child that shares them.
FAMILY = """
import os, time
written = bytearray(os.urandom(1000)) * 100_000
if os.fork() == 0:
    time.sleep(600)
print("forked", flush=True)
time.sleep(600)
"""


def test_what_a_family_shares_counts_once(tmp_path: Path) -> None:
    """A model that forked workers share is not counted once for each of them."""
    server = Server([sys.executable, "-c", FAMILY], folder=tmp_path)
    try:
        server.wait_until(lambda: "forked" in server.log, "the fork")
        assert 100e6 < server.private_bytes() < 150e6
    finally:
        server.kill()
    with pytest.raises(ServerFailed, match="died"):
        server.private_bytes()
