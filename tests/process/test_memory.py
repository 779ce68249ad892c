"""Memory readings across processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from modelguard import memory

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="reads other processes through /proc"),
]

FORK = """
import os, sys
from modelguard import memory

ballast = bytearray(os.urandom(1)) * 100_000_000
parent = memory.private(fresh=True)
child = os.fork()
if child == 0:
    # The ballast is shared with the parent now. Asked for at once, not fresh: only a cached reading could count it.
    own = memory.private()
    print(parent, own, flush=True)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_a_child_never_gets_its_parents_reading() -> None:
    """Right after a fork the child's private memory is small: it shares the parent's data."""
    parent, own = map(int, run(FORK).split())
    assert 90_000_000 < parent - own


def test_another_process_is_read_until_it_is_gone() -> None:
    """A running process has figures; one that has exited is gone, waited for or not."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert 0 < memory.usage(other.pid).rss
        other.stdin.close()
        # Leaves it a zombie: it has exited, and nobody has taken its exit status.
        assert other.pid == waited_for(other.pid)
        with pytest.raises(ProcessLookupError, match=f"process {other.pid} does not exist"):
            memory.usage(other.pid)
        other.wait()
        with pytest.raises(ProcessLookupError, match=f"process {other.pid} does not exist"):
            memory.usage(other.pid)


def waited_for(pid: int) -> int | None:
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return found.si_pid if found else None


def test_psutil_is_not_imported_where_proc_tells() -> None:
    """Reading memory on Linux costs no import."""
    script = "import sys; from modelguard import memory; memory.private(); memory.usage(); "
    assert "False" == run(script + "print('psutil' in sys.modules)").strip()
