"""What the exit of the process waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

from modelguard.runtime import fork_hooks

if TYPE_CHECKING:
    import pytest


def test_work_of_several_kinds_has_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit waits for all work together, and not as long for each kind."""
    now = 100.0

    def batches(seconds: float) -> None:
        nonlocal now
        given.append(seconds)
        now += 3.0

    given: list[float] = []
    monkeypatch.setattr(fork_hooks, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(fork_hooks, "_waits", {})
    fork_hooks.before_exit("loads", given.append)
    fork_hooks.before_exit("batches", batches)
    fork_hooks._wait()
    assert [fork_hooks.GRACE, fork_hooks.GRACE - 3.0] == given
