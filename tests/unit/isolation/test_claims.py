"""Calls that ask for a worker, without processes: each ends once, and whoever gives up leaves no place behind."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from modelguard import Bounds
from modelguard.errors import DeadlineExceeded, GuardClosed, QueueFull, Reloading
from modelguard.isolation._mold_workers import CallTimes, Claim, Waiter
from modelguard.isolation._scopes import Followed, MoldScope, WorkerScope
from modelguard.runtime.waiting import Steps, Wait, promise

PATIENCE = 10.0

UNBOUNDED = CallTimes(0.0)


class Scope(MoldScope):
    """Has a line in which all calls wait, or a load."""

    closed = False

    def __init__(self) -> None:
        options: Any = SimpleNamespace(name="f", timeout=60.0, bounds=Bounds(queue=1), workers=1)
        super().__init__(options, lambda: 60.0)
        self.line: list[Waiter] = []
        self.load: Future[None] | None = None  # type: ignore[assignment]
        self.seconds = math.inf
        self.leases = 0
        self.put_back = 0
        self.model = SimpleNamespace(workers=self)
        self.generation = SimpleNamespace(retired=False)
        self.gone = False
        self.channel = None

    def _lend(self, _key: Any) -> Any:
        return None

    def _until_lent(self, claim: Claim) -> Steps[Any]:
        if self.load is not None:
            self._admit(claim)
            yield from self._await(claim, self.load, self.seconds, lambda: Reloading("f", waited=1.0), loading=True)
        self.leases += 1
        return self

    def end(self, *, failed: bool) -> None:
        """The lease."""
        assert not failed
        self.leases -= 1

    # As the workers of the mold

    def request(self, waiter: Waiter) -> None:
        self.line.append(waiter)

    def withdraw(self, waiter: Waiter) -> bool:
        if waiter not in self.line:
            return False
        self.line.remove(waiter)
        return True

    def release(self, _worker: object, *, worn: object, counts: bool) -> None:
        assert (worn, counts) == ((), False)
        self.put_back += 1

    def grant(self) -> None:
        """Give the first in line a worker."""
        waiter: Any = self.line.pop(0)
        waiter.holder.worker, waiter.holder.held = self, True
        waiter.set_result(self)


@pytest.fixture
def scope() -> Scope:
    return Scope()


def followed(scope: Scope, ended: list[Any], limits: CallTimes = UNBOUNDED) -> Followed:
    """A call that waits without a thread; with what it has ended."""
    one = Followed(scope, Claim(limits), lambda taken, error: ended.append(taken or error))
    one.begin()
    return one


def until(condition: Callable[[], object]) -> None:
    end, pause = time.monotonic() + PATIENCE, threading.Event()
    while not condition():
        assert time.monotonic() < end
        pause.wait(0.001)


class TestEnds:
    def test_a_claim_ends_once(self) -> None:
        """However its caller, its worker and its time race: exactly one of them ends it, and nothing is kept."""
        for _ in range(300):
            scope, ended, together = Scope(), [], threading.Barrier(3)
            one = followed(scope, ended)
            acts = (scope.grant, one.withdraw, lambda one=one: setattr(one, "until", 0.0) or one.expire(math.inf))

            def race(act: Any, together: threading.Barrier = together) -> None:
                together.wait(PATIENCE)
                with suppress(IndexError):  # it has left the line already
                    act()

            threads = [threading.Thread(target=race, args=(act,)) for act in acts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            until(lambda: len(ended) == 1)  # noqa: B023 - in this round
            (how,) = ended
            if not isinstance(how, Exception):
                how.put_back()
            until(lambda: scope.leases == 0)  # noqa: B023 - in this round
            assert (0, [], 0) == (scope.queued, scope.line, len(scope.followed()))

    def test_one_that_is_withdrawn_leaves_its_place(self, scope: Scope) -> None:
        """At once."""
        ended: list[Any] = []
        one = followed(scope, ended)
        assert (1, 1, 1) == (scope.queued, len(scope.line), scope.leases)
        one.withdraw()
        one.withdraw()
        assert (0, 0, 0, [CancelledError]) == (
            scope.queued,
            len(scope.line),
            scope.leases,
            [type(how) for how in ended],
        )

    def test_one_that_has_ended_takes_no_place(self, scope: Scope) -> None:
        """A call that was cancelled while it moved from one line to the next one is in neither."""
        ended: list[Any] = []
        scope.load = promise()
        one = followed(scope, ended)
        moves = threading.Event()
        scope._until_granted = self.held_up(scope._until_granted, moves, one)  # type: ignore[method-assign]
        scope.load.set_result(None)
        assert moves.wait(PATIENCE)
        until(lambda: ended)
        assert (0, [], 0, [CancelledError]) == (scope.queued, scope.line, scope.leases, [type(how) for how in ended])

    @staticmethod
    def held_up(steps: Any, moves: threading.Event, one: Followed) -> Any:
        def instead(*args: Any) -> Any:
            one.withdraw()
            moves.set()
            return steps(*args)

        return instead

    def test_its_time_ends_it(self, scope: Scope) -> None:
        """With the error of what it waits for, or with that of its caller's own deadline, whichever comes first."""
        scope.load, scope.seconds = promise(), 0.05
        late: list[Any] = []
        followed(scope, late)
        followed(scope, late, CallTimes(time.monotonic(), time.monotonic() + 0.001))
        until(lambda: len(late) == 2)
        assert [DeadlineExceeded, Reloading] == [type(how) for how in late]
        assert (0, 0) == (scope.queued, len(scope.followed()))

    @pytest.mark.parametrize(
        "end",
        [
            lambda scope, _: scope.grant(),
            lambda scope, _: scope.line.pop().set_exception(Reloading("f", waited=1.0)),
            lambda _, one: one.refuse(GuardClosed("f")),
            lambda _, one: setattr(one, "until", 0.0) or one.expire(math.inf),
            lambda _, one: one.withdraw(),
        ],
        ids=["grant", "fail", "refuse", "expire", "withdraw"],
    )
    def test_one_that_has_ended_keeps_nothing_of_its_call(self, scope: Scope, end: Callable[..., object]) -> None:
        """However it ends: the call's future may refer to the claim for as long as somebody keeps it."""
        call = {"arguments"}
        one = Followed(scope, Claim(UNBOUNDED), lambda *_, call=call: call)
        one.begin()
        kept = weakref.ref(call)
        del call
        gc.disable()
        try:
            assert kept() is not None
            end(scope, one)
            until(lambda: kept() is None)
        finally:
            gc.enable()


class TestWaiting:
    def test_a_thread_sleeps_until_its_claim_ends(self, scope: Scope) -> None:
        """With a worker, or with an error that is raised in it."""
        threading.Timer(0.01, lambda: until(lambda: scope.line) or scope.grant()).start()
        assert scope is scope.take(UNBOUNDED).worker  # type: ignore[attr-defined]
        answer = Reloading("f", waited=1.0)
        threading.Timer(0.01, lambda: until(lambda: scope.line) or scope.line.pop().set_exception(answer)).start()
        with pytest.raises(Reloading):
            scope.take(UNBOUNDED)
        assert (0, 1) == (scope.queued, scope.leases)

    def test_an_interrupted_thread_keeps_no_worker(self, scope: Scope, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C in the moment in which it gets one."""

        def interrupted(_wait: Wait) -> None:
            scope.grant()
            raise KeyboardInterrupt

        monkeypatch.setattr(Wait, "block", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scope.take(UNBOUNDED)
        until(lambda: scope.leases == 0)
        assert (1, 0) == (scope.put_back, scope.queued)

    def test_close_refuses_those_without_a_thread(self, scope: Scope) -> None:
        """With GuardClosed; a thread that blocks is served yet."""
        ended: list[Any] = []
        followed(scope, ended)
        blocking = threading.Thread(target=scope.take, args=(UNBOUNDED,))
        blocking.start()
        until(lambda: len(scope.line) == 2)
        scope._refuse_waiting()
        assert [GuardClosed] == [type(how) for how in ended]
        assert 1 == scope.queued
        scope.grant()
        blocking.join(PATIENCE)
        assert not blocking.is_alive()

    def test_so_many_may_wait_for_a_load(self, scope: Scope) -> None:
        """Those that wait for a worker do not count, which the line of their mold bounds."""
        ended: list[Any] = []
        for _ in range(5):
            followed(scope, ended)
        scope.load = promise()
        loading = [followed(scope, ended) for _ in range(2)]
        assert [] == ended
        followed(scope, ended)
        assert [QueueFull] == [type(how) for how in ended]
        loading[0].withdraw()
        followed(scope, ended)
        assert [QueueFull, CancelledError] == [type(how) for how in ended]
        admitted = Claim(UNBOUNDED, admitted=True)  # once is enough
        WorkerScope._admit(scope, admitted)

    def test_so_many_may_wait_for_the_next_mold(self, scope: Scope) -> None:
        """As for a load: also while one that has died again and again is not made anew yet."""
        ended: list[Any] = []
        scope.gone = True
        waiting = [followed(scope, ended) for _ in range(2)]
        assert ([], [True, True]) == (ended, [claim.loading for claim in scope._waiting])
        followed(scope, ended)
        assert [QueueFull] == [type(how) for how in ended]
        for one in waiting:
            one.withdraw()
        assert (0, [], 0) == (scope.leases, scope.line, scope.queued)
