"""What the exit of the process waits for."""

from __future__ import annotations

import atexit
import threading
from typing import TYPE_CHECKING, Any

from modelguard.runtime import fork_hooks

if TYPE_CHECKING:
    import pytest


def test_two_threads_that_come_first_register_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit waits for all work together, and not twice as long."""
    registered: list[Any] = []

    def register(wait: Any) -> None:
        registered.append(wait)
        if len(registered) == 1:  # the other thread comes in this very moment
            fork_hooks.before_exit("loads", waited.append)

    waited: list[float] = []
    monkeypatch.setattr(atexit, "register", register)
    monkeypatch.setattr(fork_hooks, "_waits", {})
    monkeypatch.setattr(fork_hooks, "_first", threading.Lock(), raising=False)
    fork_hooks.before_exit("batches", waited.append)
    assert 1 == len(registered)
    registered[0]()
    assert 2 == len(waited)
