"""``close()`` with ``scope="host"``, without processes: calls that it meets, and a broker that does not answer."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from modelguard import Isolated, guard, isolate
from modelguard.errors import GuardClosed
from modelguard.isolation import _host_scope
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._host import Folder, Joined
from modelguard.isolation._host_scope import ANSWER, Connection
from modelguard.isolation._mold_workers import CallTimes, Claim


@guard(dict, reload_on=None, name="model")
def guarded(_: object, text: str) -> str:
    """A function to isolate."""
    return text


class Membership:
    """A broker that grants a worker, and remembers how long it was given to answer."""

    pid, gone, ready, version = 1, False, False, None

    def __init__(self) -> None:
        self.patience = 0.0
        self.kept: list[Connection] = []

    def meet(self, worker: int) -> None:
        """Note nothing."""

    def keep(self, connection: Connection) -> None:
        """Remember it."""
        self.kept.append(connection)

    def leave(self, patience: float) -> None:
        """Let this client go."""
        self.gone, self.patience = True, patience


@pytest.fixture
def isolated() -> Isolated[Any, Any]:
    """A function of a host."""
    return isolate(scope="host")(guarded)


def granted_to(scope: Any) -> tuple[Any, Connection, Channel, Any, tuple[socket.socket, socket.socket]]:
    """A call that waits for its broker's answer, and has been granted a worker: its next step reads that."""
    ours, theirs = pair()
    membership: Any = Membership()
    connection, broker = Connection(ours, membership), Channel(theirs)
    steps = scope._until_answered(Claim(CallTimes(0.0), blocks=True), connection, admitted=False)
    next(steps)
    worker, other = socket.socketpair()
    broker.send(("granted", os.getpid()), [worker.fileno()])
    return membership, connection, broker, steps, (worker, other)


def test_a_call_that_is_granted_a_worker_as_the_function_closes_gives_it_back(isolated: Isolated[Any, Any]) -> None:
    """The process may have left, and the worker may end with that: the call hears that the function is closed."""
    scope: Any = isolated._scope
    membership, connection, broker, steps, sockets = granted_to(scope)
    scope.membership = membership
    isolated.close()  # there is no call that runs
    assert membership.gone
    with pytest.raises(GuardClosed):
        steps.send(None)
    assert [("take", False, False), ("release", (), False)] == [broker.receive(), broker.receive()]
    assert ([connection], []) == (membership.kept, list(scope.running))
    for one in (*sockets, connection, broker):
        one.close()


def test_a_call_that_was_interrupted_is_not_waited_for(isolated: Isolated[Any, Any]) -> None:
    """A signal's handler has raised between two steps of it: it has dropped its worker, and says nothing any more."""
    scope: Any = isolated._scope
    membership, connection, broker, steps, sockets = granted_to(scope)
    with pytest.raises(StopIteration) as granted:
        steps.send(None)
    assert [granted.value.value] == list(scope.running)
    granted.value.value.channel.close()
    del granted
    scope.membership = membership
    isolated.close("60s")
    assert membership.patience > 1.0
    for one in (*sockets, connection, broker):
        one.close()


@pytest.mark.parametrize(("timeout", "patience"), [("2s", (1.5, 2.0)), (0, (ANSWER, ANSWER)), (None, (15.0, 15.0))])
def test_a_broker_has_the_rest_of_the_time_to_answer(
    isolated: Isolated[Any, Any], timeout: Any, patience: tuple[float, float]
) -> None:
    """One that is stopped holds nobody up for longer than who closes wants to wait."""
    scope: Any = isolated._scope
    membership = scope.membership = Membership()
    isolated.close(timeout)
    assert patience[0] <= membership.patience <= patience[1]


def test_the_end_of_the_broker_is_awaited_no_longer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has answered, and is stopped before it ends."""
    awaited: list[float] = []
    monkeypatch.setattr(_host_scope.child_processes, "await_end", lambda _, seconds: awaited.append(seconds))
    (ours, theirs), (reports, broker) = pair(), pair()
    tmp_path.chmod(0o700)
    joined = Joined(Folder(tmp_path), "f.1", Channel(ours), reports, b"", os.getpid())
    membership = _host_scope.Membership(joined, lambda _: None, lambda: None)
    Channel(theirs).send(("done", True))
    membership.leave(2.0)
    assert 0.0 <= awaited[0] <= 2.0
    for one in (theirs, broker):
        one.close()
