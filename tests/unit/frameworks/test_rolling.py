"""Which worker is replaced next, with a fake master and a fake clock."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from modelguard.frameworks.gunicorn import RETRY_AFTER, RollingReplacement, serves

TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Worker:
    """As gunicorn's: a temporary file whose time is a sign of life."""

    def __init__(self, stack: ExitStack) -> None:
        self.tmp = tempfile.TemporaryFile()  # noqa: SIM115 - one test closes it
        stack.callback(self.tmp.close)

    def lives(self, now: float = 0.0) -> None:
        os.utime(self.tmp.fileno(), (now, now))


class Master:
    """Workers by process id, and what was sent to them."""

    def __init__(self, stack: ExitStack) -> None:
        self.WORKERS: dict[int, Any] = {}
        self.num_workers = 2
        self.log = logging.getLogger("test")
        self.sent: list[tuple[int, int]] = []
        self.fails = False
        self._stack = stack
        self._last = 0
        for _ in range(self.num_workers):
            self.spawn_worker()
            self.WORKERS[self._last].lives()

    def spawn_worker(self) -> int:
        if self.fails:
            raise BlockingIOError("no more processes")
        self._last += 1
        self.WORKERS[self._last] = Worker(self._stack)
        return self._last

    def kill_worker(self, pid: int, sig: int) -> None:
        self.sent.append((pid, sig))

    def manage_workers(self) -> None:
        raise AssertionError("it is not RollingReplacement's to call")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def master() -> Iterator[Master]:
    with ExitStack() as stack:
        yield Master(stack)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rolling(master: Master, clock: Clock) -> RollingReplacement:
    return RollingReplacement(master, timeout=10, clock=clock)


def test_nothing_is_done_unasked(master: Master, rolling: RollingReplacement) -> None:
    """Without a request no worker is started or ended."""
    rolling.step()
    assert ([1, 2], [], False) == (list(master.WORKERS), master.sent, rolling.surplus)


def test_the_old_one_is_ended_only_when_the_fresh_one_serves(master: Master, rolling: RollingReplacement) -> None:
    """First a fork, then its first sign of life, then the signal, once; one too many is right meanwhile."""
    rolling.request(1, "Uses(5)")
    rolling.step()
    rolling.step()
    assert ([1, 2, 3], [], True) == (list(master.WORKERS), master.sent, rolling.surplus)
    master.WORKERS[3].lives()
    rolling.step()
    rolling.step()
    assert ([(1, TERM)], True) == (master.sent, rolling.surplus)
    del master.WORKERS[1]
    rolling.step()
    assert ([2, 3], False) == (list(master.WORKERS), rolling.surplus)


def test_one_at_a_time_in_order(master: Master, rolling: RollingReplacement) -> None:
    """The second waits for the end of the first, and each is replaced once however often it asks."""
    for pid in (2, 1, 2):
        rolling.request(pid, "new weights")
    for old, fresh in ((2, 3), (1, 4)):
        rolling.step()
        assert 3 == len(master.WORKERS)
        master.WORKERS[fresh].lives()
        rolling.step()
        assert (old, TERM) == master.sent[-1]
        del master.WORKERS[old]
    rolling.step()
    assert [3, 4] == list(master.WORKERS)


def test_who_ended_by_itself_needs_no_replacement(master: Master, rolling: RollingReplacement) -> None:
    """Gunicorn starts another for it; a process that it does not know is not one of its workers."""
    rolling.request(1, "Uses(5)")
    rolling.request(99, "a worker's own child")
    del master.WORKERS[1]
    rolling.step()
    assert [2] == list(master.WORKERS)


def test_no_fork_while_there_is_none_to_be(master: Master, rolling: RollingReplacement) -> None:
    """During a load the turn waits."""
    rolling.request(1, "Uses(5)")
    rolling.step(may_fork=False)
    assert [1, 2] == list(master.WORKERS)
    rolling.step()
    assert [1, 2, 3] == list(master.WORKERS)


def test_a_fresh_one_that_dies_leaves_the_old_one_serving(
    master: Master, rolling: RollingReplacement, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, no worker is ended, and the replacement is tried again after a pause."""
    rolling.request(1, "Uses(5)")
    rolling.step()
    del master.WORKERS[3]
    rolling.step()
    rolling.step()
    assert ([1, 2], [], False) == (list(master.WORKERS), master.sent, rolling.surplus)
    assert "the new worker 3 ended before it could take over" in caplog.text
    clock.now += RETRY_AFTER
    rolling.step()
    assert [1, 2, 4] == list(master.WORKERS)


def test_a_fresh_one_that_hangs_is_killed(
    master: Master, rolling: RollingReplacement, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """After the timeout the old one still serves."""
    rolling.request(1, "Uses(5)")
    rolling.step()
    clock.now += 11
    rolling.step()
    assert [(3, KILL)] == master.sent
    assert "did not serve after 10 s" in caplog.text


def test_a_system_without_processes_harms_nobody(
    master: Master, rolling: RollingReplacement, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork that fails is logged, and tried again later."""
    master.fails = True
    rolling.request(1, "Uses(5)")
    rolling.step()
    assert ([1, 2], False, False) == (list(master.WORKERS), rolling.surplus, rolling.spawning)
    assert "no more processes" in caplog.text


def test_a_mold_that_gives_no_worker_is_told_as_such(
    master: Master, rolling: RollingReplacement, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names no worker 0; the old one serves, and the next attempt comes later."""
    rolling.request(1, "Uses(5)")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(master, "spawn_worker", lambda: 0)
        rolling.step()
        rolling.step()
    told = "modelguard: no process could be started; the old worker stays; next attempt in 60 s, or with new weights"
    assert ([told], False) == (caplog.messages, rolling.surplus)
    clock.now += RETRY_AFTER
    rolling.step()
    assert [1, 2, 3] == list(master.WORKERS)


def test_new_weights_are_tried_at_once(master: Master, rolling: RollingReplacement) -> None:
    """Whatever has failed before: the mold that was to fork a worker had died, and there is a new one."""
    master.fails = True
    rolling.request(1, "Uses(5)")
    rolling.step()
    master.fails = False
    rolling.step()
    assert [1, 2] == list(master.WORKERS)
    rolling.request(1, "there are new weights", at_once=True)
    rolling.step()
    assert [1, 2, 3] == list(master.WORKERS)


def test_a_lost_signal_to_end_is_sent_again(master: Master, rolling: RollingReplacement, clock: Clock) -> None:
    """A worker that is still starting loses the signal."""
    rolling.request(1, "new weights")
    rolling.step()
    master.WORKERS[3].lives()
    rolling.step()
    clock.now += 11
    rolling.step()
    assert [(1, TERM)] * 2 == master.sent


def test_a_worker_serves_from_its_first_sign_of_life(master: Master) -> None:
    """A file as it was made says nothing yet; one that is closed belongs to a worker that has ended."""
    now = time.monotonic()
    worker = master.WORKERS[master.spawn_worker()]
    assert not serves(worker, now)
    worker.lives(now)
    assert serves(worker, now)
    worker.tmp.close()
    assert not serves(worker, now)
