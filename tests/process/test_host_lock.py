"""The host-wide lock between processes: the kernel gives it back, and children do not inherit it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from modelguard.runtime.host_lock import HostLock

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform == "win32", reason="there are no record locks"),
]

TIMEOUT = 30.0

HOLD = """
import sys, time
from pathlib import Path
from modelguard.runtime.host_lock import HostLock

def wait(seconds):
    print("waiting", flush=True)
    time.sleep(seconds)

with HostLock(lambda: Path(sys.argv[1])).held(sleep=wait, clock=time.monotonic, cancelled=lambda: False) as how:
    print(how, flush=True)
    sys.stdin.read()
"""

# Forks while it holds the lock. The child outlives the block and lets its parent know; then it waits to be told.
FORK = """
import os, sys, time
from pathlib import Path
from modelguard.runtime.host_lock import HostLock

lock = HostLock(lambda: Path(sys.argv[1]))
with lock.held(sleep=time.sleep, clock=time.monotonic, cancelled=lambda: False) as how:
    child = os.fork()
    if child == 0:
        sys.stdin.read()
        os._exit(0)
print(how, flush=True)
os.waitpid(child, 0)
"""

IN_CHILD = """
import os, sys, time
from pathlib import Path
from modelguard.runtime.host_lock import HostLock

lock = HostLock(lambda: Path(sys.argv[1]))
with lock.held(sleep=time.sleep, clock=time.monotonic, cancelled=lambda: False):
    child = os.fork()
    if child == 0:
        lock.after_fork_in_child()  # as _fork.py does for the one that guards use
        with lock.held(sleep=lambda _: None, clock=time.monotonic, cancelled=lambda: True) as how:
            print(how, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@contextmanager
def running(script: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a script until the end of the block; it prints a line when it has reached a certain point."""
    command = [sys.executable, "-c", script, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tried(folder: Path, *, cancelled: Callable[[], bool]) -> str:
    """How this process gets the lock."""
    with HostLock(lambda: folder).held(sleep=time.sleep, clock=time.monotonic, cancelled=cancelled) as how:
        return how


def until_late() -> Callable[[], bool]:
    deadline = time.monotonic() + TIMEOUT
    return lambda: time.monotonic() > deadline


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "modelguard"


def test_one_process_at_a_time_has_it(folder: Path) -> None:
    """While another process holds the lock it cannot be acquired; after its release it can."""
    with running(HOLD, folder) as holder:
        assert "host" == said(holder)
        assert "cancelled" == tried(folder, cancelled=lambda: True)
        assert holder.stdin is not None
        holder.stdin.close()
        assert 0 == holder.wait(TIMEOUT)
        assert "host" == tried(folder, cancelled=lambda: True)


def test_a_killed_holder_frees_it(folder: Path) -> None:
    """A holder that is killed cannot give the lock back itself: the kernel does."""
    with running(HOLD, folder) as holder:
        assert "host" == said(holder)
        holder.kill()
        holder.wait(TIMEOUT)
        assert "host" == tried(folder, cancelled=until_late())


def test_who_waits_gets_it_when_its_holder_is_killed(folder: Path) -> None:
    """A process that waits for the lock goes on when the holder dies."""
    with running(HOLD, folder) as holder:
        assert "host" == said(holder)
        with running(HOLD, folder) as waiter:
            assert "waiting" == said(waiter)
            holder.kill()
            assert "host" in iter(lambda: said(waiter), "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_keep_it(folder: Path) -> None:
    """A child that was forked during a reload does not hold the lock after its parent has let it go."""
    with running(FORK, folder) as parent:
        assert "host" == said(parent)
        assert "host" == tried(folder, cancelled=lambda: True)
        assert parent.stdin is not None
        parent.stdin.close()
        assert 0 == parent.wait(TIMEOUT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_does_not_have_it(folder: Path) -> None:
    """A child of the holder has to wait for the lock like every other process."""
    with running(IN_CHILD, folder) as parent:
        assert "cancelled" == said(parent)
        assert 0 == parent.wait(TIMEOUT)
