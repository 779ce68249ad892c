"""What is left of a mold whose worker has taken its place: a small program that gives back the mold's memory.

The new mold is its child and the owner's grandchild, so it stays as long as that one. It ends as the new mold ends, so
that its parent learns how, and ends its process group if its parent dies.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["become"]

#: Without modelguard, whose import would cost ten times the memory.
_PROGRAM = """ # modelguard.isolation: what is left of a mold
import os, signal, sys
heir, owner = int(sys.argv[1]), int(sys.argv[2])
def end_if_orphan(*_):
    if os.getppid() != owner:
        os.killpg(0, signal.SIGKILL)
signal.signal(signal.SIGTERM, end_if_orphan)
signal.signal(signal.SIGINT, lambda *_: None)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
end_if_orphan()
pid = 0
while pid != heir:
    pid, status = os.waitpid(-1, 0)
code = os.waitstatus_to_exitcode(status)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code if code >= 0 else 1)
"""


def become(heir: int, *, owner: int, name: str) -> None:
    """Replace this process by the small program. Its number, its parent, its children and its group stay.

    Args:
        heir: The process id of the new mold, a child of this process.
        owner: This process's parent.
        name: The isolated function's, for lists of processes.

    Raises:
        OSError: It cannot be started. Nothing has changed then.
    """
    # Until the program has handlers of its own, a SIGTERM would end it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    command = [sys.executable or "python3", "-I", "-S", "-c", _PROGRAM, str(heir), str(owner), "mold", name]
    try:
        os.execv(command[0], command)  # noqa: S606 - this interpreter
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
