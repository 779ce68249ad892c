"""What the unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from modelguard.lifecycle.system import System, use


def _without_memory() -> System:
    return System(
        private=lambda: 100_000_000,
        headroom=lambda: None,
        trim=lambda: "none",
        in_use=lambda: None,
        python_in_use=lambda: None,
        returning=nullcontext,
        held=lambda: None,
    )


@pytest.fixture(autouse=True)
def _memory_is_left_alone() -> Iterator[None]:
    """Keep guards and pools of the tests from reading and trimming the memory of this process.

    Beside torch and spaCy a reading takes 20 ms and a trim 200, and every load has several.
    """
    with use(_without_memory):
        yield
