"""What becomes of a call whose worker ends before it has read it, without processes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from modelguard import isolate
from modelguard.errors import WorkerCrashed
from modelguard.isolation._calls import _RESENDS, Caller
from modelguard.isolation._channel import AnswerKind, Channel, pair
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation._mold_workers import CallTimes
from modelguard.telemetry import Reason


def function(text: str) -> str:
    """Be called."""
    return text


class Taken:
    """A worker that has ended, or has its answer ready."""

    pid = 1

    def __init__(self, scope: Scope, *, dead: bool) -> None:
        self._scope = scope
        ours, self._theirs = (Channel(end) for end in pair())
        self.channel = ours
        if dead:
            self._theirs.close()
        else:
            self._theirs.send((int(AnswerKind.RESULT), "answer", ()))

    def end_worker(self, cause: str, *, blame: bool = True) -> str:
        """It has ended; nobody is to blame for a worker that was idle."""
        assert (cause, blame) == ("crashed", False)
        self._scope.lost += 1
        self._end()
        return "SIGKILL"

    def release(self, *, worn: tuple[Reason, ...]) -> None:
        """It has answered."""
        assert not worn
        self._scope.released += 1
        self._end()

    def _end(self) -> None:
        self._scope.leases -= 1
        self.channel.close()
        self._theirs.close()


class Scope:
    """Hands out workers of which the first ones have ended."""

    def __init__(self, dead: int) -> None:
        self.dead = dead
        self.taken = self.lost = self.released = self.leases = 0

    def take(self, _: CallTimes, key: object = None, *, admitted: bool = False) -> Taken:
        """Take a worker."""
        assert (key, admitted) == (None, self.taken > 0)
        self.taken += 1
        self.leases += 1
        return Taken(self, dead=self.taken <= self.dead)


def caller_of(dead: int) -> tuple[Caller, Scope]:
    """A caller whose first workers have ended."""
    options: IsolationOptions = isolate()(function)._options
    scope = Scope(dead)
    return Caller(options, cast("Any", scope)), scope


def test_a_call_is_sent_until_a_worker_reads_it() -> None:
    """Without retry=True: nothing of it had begun."""
    caller, scope = caller_of(_RESENDS)
    assert "answer" == caller.call((("x",), {}), CallTimes(0.0))
    assert (_RESENDS, 1, 0) == (scope.lost, scope.released, scope.leases)


def test_there_is_an_end_to_it() -> None:
    """Workers that end again and again before they read are named as what they are."""
    caller, scope = caller_of(10**6)
    with pytest.raises(WorkerCrashed, match="SIGKILL"):
        caller.call((("x",), {}), CallTimes(0.0))
    assert (_RESENDS + 1, 0) == (scope.lost, scope.leases)
