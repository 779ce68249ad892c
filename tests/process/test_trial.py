"""A throw-away child does the work of a worker, so that what goes wrong there is known before the first worker."""

from __future__ import annotations

import os
import signal
import time

import pytest

from modelguard.sharing import _trial


@pytest.mark.timeout(60)
def test_work_that_ends_is_fine() -> None:
    """Work that ends is ok, and its changes stay in the child."""
    changed: list[int] = []
    verdict = _trial.run(lambda: changed.append(1), timeout=30)
    assert (True, False, "") == (verdict.ok, verdict.hung, verdict.report)
    assert [] == changed


@pytest.mark.timeout(60)
def test_work_that_raises_is_told_with_its_traceback() -> None:
    """The child's traceback comes back."""

    def work() -> None:
        raise OSError("no dictionary")

    verdict = _trial.run(work, timeout=30)
    assert (False, False) == (verdict.ok, verdict.hung)
    assert "OSError: no dictionary" in verdict.report
    assert "in work" in verdict.report


def _wait_for_ever() -> None:
    time.sleep(600)


@pytest.mark.timeout(60)
def test_work_that_hangs_is_told_with_its_stack_and_ended() -> None:
    """A child that does not end is killed, and its stacks show where it was."""
    verdict = _trial.run(_wait_for_ever, timeout=1.0)
    assert (False, True) == (verdict.ok, verdict.hung)
    assert "_wait_for_ever" in verdict.report
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # nobody is left behind


@pytest.mark.timeout(60)
def test_work_that_kills_its_process_is_told() -> None:
    """A crash in native code leaves no traceback; the signal is named."""
    verdict = _trial.run(lambda: os.kill(os.getpid(), signal.SIGSEGV), timeout=30)
    assert (False, False) == (verdict.ok, verdict.hung)
    assert "SIGSEGV" in verdict.report


@pytest.mark.timeout(60)
def test_work_that_exits_is_no_success() -> None:
    """A child that exits by itself has not done its work."""
    assert not _trial.run(lambda: os._exit(0), timeout=30).ok
