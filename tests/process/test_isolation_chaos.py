"""Chaos of bounded length: every call gets exactly one answer or one named error, and everything comes back."""

from __future__ import annotations

import os

import pytest
from tests.process.isolation_chaos import CALLERS, LONGEST, storm

pytestmark = pytest.mark.timeout(300)

SECONDS = float(os.environ.get("CHAOS_SECONDS", "12"))
#: Bytes that the owner may have grown by: allocators keep free what the longest queues took.
GROWTH = 20e6


def test_every_call_is_answered_or_named() -> None:
    """Workers crash, hang, grow and are stopped; workers, molds and owners are killed, with eight callers."""
    tally = storm(SECONDS, owners=True)
    print(tally)  # noqa: T201 - with -s
    assert [] == tally.wrong
    assert tally.calls["answered"] > CALLERS
    assert tally.longest < LONGEST
    assert tally.blows["kill owner"]
    assert [] == tally.left
    assert tally.descriptors[1] <= tally.descriptors[0]
    assert tally.memory[1] - tally.memory[0] < GROWTH
