"""Calls that ask for a worker, without processes: each ends once, and whoever gives up leaves no place behind."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from modelguard.errors import DeadlineExceeded, GuardClosed, QueueFull, Reloading
from modelguard.isolation._calls import Claim, Claims, Limits, ThreadClaim

PATIENCE = 10.0

#: On the monotonic clock: later than any test runs.
LATER = 1e9

UNBOUNDED = Limits(0.0)


class Worker:
    """Counts how often it was put back."""

    def __init__(self) -> None:
        self.put_back_times = 0

    def put_back(self) -> None:
        self.put_back_times += 1


class Line:
    """Where claims wait."""

    over = False

    def __init__(self, *, loading: bool = False) -> None:
        self.loading = loading
        self.left = 0

    def leave(self) -> bool:
        self.left += 1
        return True


def waiting(claims: Claims, ended: Any, *, limits: Limits = UNBOUNDED, loading: bool = False) -> Claim:
    """A claim that waits at most until then."""
    claim = Claim(limits, None, ended)
    claim.place = Line(loading=loading)
    claim.wait(claims, LATER, lambda: Reloading("f", waited=1.0))
    return claim


@pytest.fixture
def claims() -> Claims:
    """The claims of one function, of which two may wait for a load."""
    return Claims("f", most_loading=2)


class TestEnds:
    def test_a_claim_ends_once(self, claims: Claims) -> None:
        """However its caller, its worker and its time race: exactly one of them ends it."""
        for _ in range(300):
            ended: list[Claim] = []
            claim, worker, together = waiting(claims, ended.append), Worker(), threading.Barrier(3)
            granted: list[bool] = []
            withdrawn: list[bool] = []

            def race(act: Any, together: threading.Barrier = together) -> None:
                together.wait(PATIENCE)
                act()

            acts = (
                lambda: granted.append(claim.grant(worker)),  # type: ignore[arg-type]  # noqa: B023 - in this round
                lambda: withdrawn.append(claim.withdraw()),  # noqa: B023 - in this round
                lambda: claim.expire(math.inf),  # noqa: B023 - in this round
            )
            threads = [threading.Thread(target=race, args=(act,)) for act in acts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE)
            outcomes = [*granted, *withdrawn, claim.error is not None]
            assert (1, 0) == (outcomes.count(True), len(claims))
            assert ([] if withdrawn[0] else [claim]) == ended

    def test_one_that_is_withdrawn_leaves_its_place(self, claims: Claims) -> None:
        """At once, and nobody is told."""
        ended: list[Claim] = []
        claim = waiting(claims, ended.append)
        assert (True, False) == (claim.withdraw(), claim.withdraw())
        assert (1, 0, []) == (claim.place.left, len(claims), ended)  # type: ignore[union-attr]

    def test_one_that_has_ended_takes_no_place(self, claims: Claims) -> None:
        """A call that was cancelled while it moved from one line to the next one is in neither."""
        claim = waiting(claims, lambda _: None)
        assert claim.withdraw()
        claim.place = Line()
        claim.wait(claims, LATER, lambda: Reloading("f", waited=0.0))
        assert (1, 0) == (claim.place.left, len(claims))

    @pytest.mark.parametrize(
        ("until", "now", "error"),
        [
            (math.inf, LATER - 1, None),
            (math.inf, LATER, Reloading),
            (LATER / 2, LATER / 2 - 1, None),
            (LATER / 2, LATER / 2 + 1, DeadlineExceeded),
        ],
    )
    def test_its_time_ends_it(self, claims: Claims, until: float, now: float, error: type[Exception] | None) -> None:
        """With the line's error, or with that of the caller's own deadline, whichever comes first."""
        claim = waiting(claims, lambda _: None, limits=Limits(0.0, until))
        claim.expire(now)
        assert error is (None if claim.error is None else type(claim.error))
        assert (error is None) == (len(claims) == 1)

    @pytest.mark.parametrize(
        "end",
        [
            lambda claim: claim.grant(Worker()),
            lambda claim: claim.fail(Reloading("f", waited=1.0)),
            lambda claim: claim.refuse(GuardClosed("f")),
            lambda claim: claim.expire(math.inf),
            lambda claim: claim.withdraw(),
        ],
        ids=["grant", "fail", "refuse", "expire", "withdraw"],
    )
    def test_one_that_has_ended_keeps_nothing_of_its_call(self, claims: Claims, end: Callable[[Claim], object]) -> None:
        """However it ends: the call's future may refer to the claim for as long as somebody keeps it."""
        call = {"arguments"}
        claim, kept = waiting(claims, lambda _, call=call: call), weakref.ref(call)
        del call
        gc.disable()
        try:
            assert kept() is not None
            end(claim)
            assert kept() is None
        finally:
            gc.enable()


class TestWaiting:
    def test_a_thread_sleeps_until_its_claim_ends(self, claims: Claims) -> None:
        """With a worker, or with an error that is raised in it."""
        for error in (None, Reloading("f", waited=1.0)):
            claim, worker = ThreadClaim(Limits(0.0), None), Worker()
            claim.place = Line()
            claim.wait(claims, math.inf, lambda: Reloading("f", waited=0.0))
            act = claim.fail if error else claim.grant
            thread = threading.Thread(target=act, args=(error or worker,))  # type: ignore[arg-type]
            thread.start()
            if error is None:
                assert worker is claim.result()
            else:
                with pytest.raises(Reloading):
                    claim.result()
            thread.join(PATIENCE)
            assert 0 == len(claims)

    def test_an_interrupted_thread_keeps_no_worker(self, claims: Claims, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ctrl-C in the moment in which it gets one."""
        claim, worker = ThreadClaim(Limits(0.0), None), Worker()
        claim.place = Line()
        claim.wait(claims, math.inf, lambda: Reloading("f", waited=0.0))

        def interrupted(one: ThreadClaim) -> None:
            assert one.grant(worker)  # type: ignore[arg-type]
            raise KeyboardInterrupt

        monkeypatch.setattr(ThreadClaim, "_sleep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            claim.result()
        claim.abandon()
        assert (1, 0) == (worker.put_back_times, len(claims))

    def test_a_timer_ends_those_without_a_thread(self, claims: Claims) -> None:
        """Nobody else looks at their time."""
        over = threading.Event()
        claim = Claim(Limits(0.0), None, lambda _: over.set())
        claim.place = Line()
        claim.wait(claims, 0.0, lambda: Reloading("f", waited=0.0))  # long ago
        assert over.wait(PATIENCE)
        assert isinstance(claim.error, Reloading)

    def test_close_refuses_those_without_a_thread(self, claims: Claims) -> None:
        """With GuardClosed; a thread that blocks is served yet."""
        claim, blocking = waiting(claims, lambda _: None), ThreadClaim(Limits(0.0), None)
        blocking.place = Line()
        blocking.wait(claims, math.inf, lambda: Reloading("f", waited=0.0))
        claims.close()
        assert isinstance(claim.error, GuardClosed)
        assert [blocking] == list(claims)

    def test_so_many_may_wait_for_a_load(self, claims: Claims) -> None:
        """Those that wait for a worker do not count, which the line of their mold bounds."""

        def one() -> Claim:
            return Claim(UNBOUNDED, None, lambda _: None)

        for _ in range(5):
            waiting(claims, lambda _: None)
            claims.admit(one())
        admitted = one()
        claims.admit(admitted)
        loading = [waiting(claims, lambda _: None, loading=True) for _ in range(2)]
        claims.admit(admitted)  # once is enough
        with pytest.raises(QueueFull):
            claims.admit(one())
        assert loading[0].withdraw()
        claims.admit(one())
