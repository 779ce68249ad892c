"""What the tests of the fixtures share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _collections_are_short() -> Iterator[None]:
    """What other tests have imported is left out: torch alone makes each of some hundred collections take 0.2 s."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
