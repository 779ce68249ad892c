"""What becomes of a call whose worker ends before it has read it, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from modelguard import isolate
from modelguard.errors import WorkerCrashed
from modelguard.isolation._calls import _RESENDS, Caller, Limits
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation._worker import AnswerKind
from modelguard.isolation._worker_process import Worker


def function(text: str) -> str:
    """Be called."""
    return text


class Roster:
    """Hands out workers of which the first ones have ended."""

    def __init__(self, dead: int) -> None:
        self.dead = dead
        self.taken = self.lost = self.released = 0
        self.living: Channel

    def take(self, *_: float) -> Worker:
        """Take a worker; one that lives has its answer ready."""
        self.taken += 1
        ours, theirs = (Channel(end) for end in pair())
        worker = Worker(self.taken, ours)
        if self.taken <= self.dead:
            theirs.close()
        else:
            theirs.send((int(AnswerKind.RESULT), "answer", False))
        self.living = theirs
        return worker

    def lose(self, worker: Worker, cause: str, *, blame: bool = True) -> str:
        """A worker has ended; nobody is to blame for one that was idle."""
        assert (cause, blame) == ("crashed", False)
        worker.channel.close()
        self.lost += 1
        return "SIGKILL"

    def release(self, worker: Worker, *, worn: bool) -> None:
        """A worker has answered."""
        assert not worn
        worker.channel.close()
        self.living.close()
        self.released += 1


class Engine:
    """Counts leases."""

    def __init__(self, roster: Roster) -> None:
        self.generation = SimpleNamespace(model=SimpleNamespace(roster=roster))
        self.leases = 0

    def enter(self) -> Any:
        """Take one."""
        self.leases += 1
        return self.generation

    def leave(self, _generation: Any, *, failed: bool) -> None:
        """Return one."""
        assert not failed
        self.leases -= 1


def caller_of(dead: int) -> tuple[Caller, Roster, Engine]:
    """A caller whose first workers have ended."""
    options: IsolationOptions = isolate()(function)._options
    roster = Roster(dead)
    engine = Engine(roster)
    molds: Any = SimpleNamespace(guard=SimpleNamespace(engine=engine))
    return Caller(options, molds), roster, engine


def test_a_call_is_sent_until_a_worker_reads_it() -> None:
    """Without retry=True: nothing of it had begun."""
    caller, roster, engine = caller_of(_RESENDS)
    assert "answer" == caller.call((("x",), {}), Limits(0.0))
    assert (_RESENDS, 1, 0) == (roster.lost, roster.released, engine.leases)


def test_there_is_an_end_to_it() -> None:
    """Workers that end again and again before they read are named as what they are."""
    caller, roster, engine = caller_of(10**6)
    with pytest.raises(WorkerCrashed, match="SIGKILL"):
        caller.call((("x",), {}), Limits(0.0))
    assert (_RESENDS + 1, 0) == (roster.lost, engine.leases)
