"""The real system, and what a guard does on platforms that cannot report memory."""

from __future__ import annotations

import sys
import sysconfig
import threading

import pytest
from tests.unit.lifecycle.world import TIMEOUT

from modelguard.environment import _allocator
from modelguard.errors import NotSupported
from modelguard.facts import _memory
from modelguard.lifecycle import system
from modelguard.lifecycle.system import System


def untold(*_args: object, **_options: object) -> None:
    raise NotSupported("this", reason="there is no /proc")


def test_readings_are_this_process_s() -> None:
    """Memory, headroom, limit and trim are those of the process, if the platform can report them."""
    world = System()
    assert 1_000_000 < world.private()
    headroom, limit = world.headroom(), world.limit()
    assert headroom is None or 0 <= headroom
    assert _memory.memory_limit().bytes == limit
    assert world.trim()


def test_what_is_not_told_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a platform cannot report it, memory counts as 0 and headroom as unknown; time and use still count."""
    monkeypatch.setattr(_memory, "private", untold)
    monkeypatch.setattr(_memory, "usage", untold)
    assert (0, None) == (system.private(), system.headroom())


def test_an_allocator_that_cannot_trim_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release goes on, and its event says why nothing was trimmed."""
    monkeypatch.setattr(_allocator, "trim", untold)
    assert (None, "there is no /proc") == System(trim=system.trim).try_trim()


def test_background_work_keeps_no_process_from_ending() -> None:
    """Work runs in a daemon thread whose name shows its owner."""
    seen: list[tuple[str, bool]] = []
    done = threading.Event()

    def work() -> None:
        seen.append((threading.current_thread().name, threading.current_thread().daemon))
        done.set()

    System().start_thread(work, "modelguard-load-nlp")
    assert done.wait(TIMEOUT)
    assert [("modelguard-load-nlp", True)] == seen


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or sys.platform != "linux", reason="asks CPython and its C library"
)
def test_what_python_s_allocator_has_handed_out() -> None:
    """Objects that fill free memory do not make the process grow, and are counted all the same."""
    if not sys.getallocatedblocks():
        pytest.skip("pymalloc does not serve objects here")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("mimalloc serves objects here")
    before = system.python_in_use()
    objects = [object() for _ in range(1_000_000)]  # of 16 bytes each
    after = system.python_in_use()
    assert before is not None
    assert after is not None
    assert 16_000_000 == pytest.approx(after - before, abs=2_000_000)
    assert 1_000_000 == len(objects)
