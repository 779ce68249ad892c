"""A trial child does the work of a worker, so that its errors are known before the first worker."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.harness import wait_until

from modelguard.runtime.child_processes import run_trial

pytestmark = pytest.mark.timeout(60)


def test_work_that_ends_is_fine() -> None:
    """Work that ends is ok, and its changes stay in the child."""
    changed: list[int] = []
    verdict = run_trial(lambda: changed.append(1), timeout=30)
    assert (True, False, "") == (verdict.ok, verdict.hung, verdict.report)
    assert [] == changed


def test_work_that_raises_is_told_with_its_traceback() -> None:
    """The child's traceback comes back."""

    def work() -> None:
        raise OSError("no dictionary")

    verdict = run_trial(work, timeout=30)
    assert (False, False) == (verdict.ok, verdict.hung)
    assert "OSError: no dictionary" in verdict.report
    assert "in work" in verdict.report


def _wait_for_ever() -> None:
    time.sleep(600)


def test_work_that_hangs_is_told_with_its_stack_and_ended() -> None:
    """A child that does not end is killed, and its stacks show where it was."""
    verdict = run_trial(_wait_for_ever, timeout=1.0)
    assert (False, True) == (verdict.ok, verdict.hung)
    assert "_wait_for_ever" in verdict.report
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # nobody is left behind


def test_a_child_that_holds_the_interpreter_s_lock_shows_its_stack() -> None:
    """Native code that hangs and lets no thread of Python run is found with the line that called it."""

    def deadlock() -> None:
        lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        lock(mutex)

    verdict = run_trial(deadlock, timeout=1.0)
    assert (False, True) == (verdict.ok, verdict.hung)
    assert "in deadlock" in verdict.report


def test_a_parent_that_watches_itself_is_tried_as_any_other() -> None:
    """``faulthandler.dump_traceback_later`` in the parent, as pytest's timeout sets it, makes no child hang."""
    faulthandler.dump_traceback_later(50)
    try:
        assert run_trial(lambda: None, timeout=10).ok
        assert "_wait_for_ever" in run_trial(_wait_for_ever, timeout=1.0).report
    finally:
        faulthandler.cancel_dump_traceback_later()


def test_work_that_kills_its_process_is_told() -> None:
    """A crash in native code leaves no traceback; the signal is named."""
    verdict = run_trial(lambda: os.kill(os.getpid(), signal.SIGSEGV), timeout=30)
    assert (False, False) == (verdict.ok, verdict.hung)
    assert "SIGSEGV" in verdict.report


def test_work_that_exits_is_no_success() -> None:
    """A child that exits by itself has not done its work."""
    assert not run_trial(lambda: os._exit(0), timeout=30).ok


def _reap_all(_number: int, _frame: object) -> None:
    """Do as gunicorn's handler of SIGCHLD does up to version 23."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.fixture(params=[_reap_all, signal.SIG_IGN], ids=["a handler waits for all", "SIGCHLD is ignored"])
def _foreign_reaper(request: pytest.FixtureRequest) -> Iterator[None]:
    earlier = signal.signal(signal.SIGCHLD, request.param)
    yield
    signal.signal(signal.SIGCHLD, earlier)


@pytest.mark.usefixtures("_foreign_reaper")
def test_a_child_whose_exit_status_somebody_else_takes_is_judged_all_the_same() -> None:
    """The child's own words count; only how it died cannot be known."""
    assert run_trial(lambda: None, timeout=30).ok
    assert "ZeroDivisionError" in run_trial(lambda: 1 // 0, timeout=30).report
    assert run_trial(_wait_for_ever, timeout=1.0).hung
    crash = run_trial(lambda: os.kill(os.getpid(), signal.SIGSEGV), timeout=30)
    assert not crash.ok
    # A handler may come too late to take it.
    assert "has taken its exit status" in crash.report or "was killed by SIGSEGV" in crash.report


def test_the_parents_handlers_do_not_run_in_the_child() -> None:
    """A signal that asks to end ends the child, though the parent only notes it; and the parent's handler stays."""
    noted: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, _frame: noted.append(number))
    try:
        result = run_trial(lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(20), timeout=30)
        assert "was killed by SIGTERM" in result.report
        assert [] == noted
        os.kill(os.getpid(), signal.SIGTERM)
        assert [signal.SIGTERM] == noted
    finally:
        signal.signal(signal.SIGTERM, earlier)


def _leave_a_process_behind(where: Path) -> None:
    if (pid := os.fork()) == 0:
        time.sleep(600)
    where.write_text(str(pid))


@pytest.mark.parametrize("hangs", [False, True])
def test_work_that_forks_is_judged_by_its_own_end_and_leaves_nothing(hangs: bool, tmp_path: Path) -> None:  # noqa: FBT001 - pytest's
    """A process that the work leaves holds the pipe open: that is no hang, and it is killed with the child."""

    def work() -> None:
        _leave_a_process_behind(tmp_path / "pid")
        if hangs:
            _wait_for_ever()

    result = run_trial(work, timeout=3.0)
    assert (not hangs, hangs) == (result.ok, result.hung)
    left = int((tmp_path / "pid").read_text())
    wait_until(lambda: not _runs(left), what="the process is gone", seconds=10)


@pytest.mark.timeout(60)
def test_work_that_returns_twice_is_done_once() -> None:
    """A process that the work has forked, and that returns, says nothing in the child's name."""
    result = run_trial(lambda: os.fork() and None, timeout=10)
    assert (True, False) == (result.ok, result.hung)


def test_a_child_that_hangs_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    """A server that is killed during the trial leaves no process that holds its port."""
    program = f"""
        import os, time
        from pathlib import Path
        from modelguard.runtime.child_processes import run_trial
        def work():
            Path({str(tmp_path / "new")!r}).write_text(str(os.getpid()))
            os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "pid")!r})
            time.sleep(600)
        run_trial(work, timeout=300)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    wait_until((tmp_path / "pid").exists, what="the trial runs")
    child = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    wait_until(lambda: not _runs(child), what="the child is gone", seconds=10)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
