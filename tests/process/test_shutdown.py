"""A process may end while a model loads or a batch is computed: that is no reason for it to crash, nor to hang."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from modelguard import _shutdown

pytestmark = pytest.mark.timeout(90)

#: Whoever comes back from torch's C++ while the interpreter ends is ended by pthread_exit, which aborts the process.
RELOADS = """
    import threading, time, torch
    from modelguard import guard

    def load():
        if guarded.status().generation:
            loading.set()
            until = time.monotonic() + 1
            while time.monotonic() < until:
                torch.ones(300, 300) @ torch.ones(300, 300)
        return torch.nn.Linear(4, 4)

    loading = threading.Event()
    guarded = guard(load, reload_on=None, swap="load_first")
    guarded.load()
    guarded.reload(wait=False)
    assert loading.wait(20)
    print("the end")
"""
BATCHES = """
    import threading, time, torch
    from modelguard import batched

    @batched(max_size=1)
    def total(items):
        computing.set()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            torch.ones(300, 300) @ torch.ones(300, 300)
        return items

    computing = threading.Event()
    for n in range(3):
        total.submit(n).add_done_callback(lambda future: print(future.result(), flush=True))
    assert computing.wait(20)
"""
HANGS = """
    import threading
    from modelguard import batched, guard

    def load():
        if guarded.status().generation:
            loading.set()
            threading.Event().wait()
        return "model"

    @batched(max_size=1)
    def echo(items):
        computing.set()
        threading.Event().wait()

    loading, computing = threading.Event(), threading.Event()
    guarded = guard(load, reload_on=None, swap="load_first")
    guarded.load()
    guarded.reload(wait=False)
    waiting = [echo.submit(n) for n in range(2)]
    assert loading.wait(20) and computing.wait(20)
    waiting[1].add_done_callback(lambda future: print(type(future.exception()).__name__, flush=True))
"""


def ended(program: str) -> str:
    """What a program printed, which has come to a good end."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60 + _shutdown.GRACE,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout


def test_a_load_of_torch_may_be_under_way() -> None:
    """The end waits for a reload that computes in native code, and does not crash in it."""
    pytest.importorskip("torch")
    assert "the end\n" == ended(RELOADS)


def test_what_was_submitted_is_computed() -> None:
    """As with an executor: whatever waits for its batch at the end gets it."""
    pytest.importorskip("torch")
    assert ["0", "1", "2"] == ended(BATCHES).split()


def test_what_hangs_does_not_keep_the_interpreter() -> None:
    """A loader or a batch that never ends is left behind after a grace; who waits is refused."""
    assert "GuardClosed\n" == ended(HANGS)
