"""A broker's connections, with workers that are no processes: whatever comes in whatever order, nothing is kept."""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from modelguard import Backoff, Bounds, Breaker
from modelguard.isolation._broker_program import ClientConnection
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._mold_workers import Worker, Workers
from modelguard.isolation._scopes import MoldScope
from modelguard.telemetry import Reason

#: Workers that may have calls at a time, calls that may wait, connections.
SIZE, QUEUE, CLIENTS = 2, 3, 6


class Supervisor:
    """Does what it is given when it is told to."""

    def __init__(self) -> None:
        self.work: deque[Callable[[], object]] = deque()

    def call(self, work: Callable[[], object]) -> None:
        """Keep some work."""
        self.work.append(work)

    def later(self, _seconds: float, work: Callable[[], object]) -> None:
        """Keep some work."""
        self.work.append(work)

    def forget(self, _fd: int) -> None:
        """Watch nothing."""

    def run(self) -> None:
        """Do what there is now."""
        for _ in range(len(self.work)):
            self.work.popleft()()


class Mold:
    """Starts workers that are sockets."""

    def __init__(self) -> None:
        breaker, backoff = Breaker(failures=1000), Backoff(1e-9, 1e-9)
        options: Any = SimpleNamespace(name="f", workers=SIZE, bounds=Bounds(queue=QUEUE), breaker=breaker)
        self.workers = Workers(options, self, generation=1, backoff=backoff, spare=1)
        self.starting: list[Worker] = []
        self.ends: dict[int, socket.socket] = {}

    def start_worker(self, worker: Worker) -> None:
        """Start one."""
        ours, self.ends[worker.number] = pair()
        worker.channel = Channel(ours)
        self.starting.append(worker)

    def give_up(self) -> None:
        """Never asked: all of them come up."""
        raise AssertionError

    def look_again_later(self, seconds: float) -> None:
        """The next step settles."""

    def replay_news(self) -> None:
        """There is none."""

    def close(self) -> None:
        """Close all sockets."""
        self.workers.retire_all()
        for end in self.ends.values():
            end.close()
        for worker in self.starting:
            worker.channel.close()


class Loan:
    """A lease on the mold, which counts itself."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.generation = SimpleNamespace(retired=False)
        self.model = scope.mold

    def end(self, *, failed: bool) -> None:
        """Give it back."""
        assert not failed
        self.scope.leases -= 1


class Scope(MoldScope):
    """Lends the mold."""

    closed = False

    def __init__(self, mold: Mold) -> None:
        options: Any = SimpleNamespace(name="f", timeout=None, bounds=Bounds(queue=QUEUE), workers=SIZE)
        super().__init__(options, lambda: 1e9)
        self.mold = mold
        self.leases = 0

    def _until_lent(self, _claim: Any) -> Any:
        self.leases += 1
        yield from ()
        return Loan(self)


class Broker:
    """Has one mold."""

    name = "f"

    def __init__(self) -> None:
        self.mold = Mold()
        self.scope = Scope(self.mold)
        self.supervisor = Supervisor()
        self.has_ended = 0

    def admit(self, _token: bytes) -> None:
        """Take everybody."""

    def granted(self, _connection: ClientConnection, _worker: int) -> None:
        """Note nothing."""

    def ended(self, _connection: ClientConnection) -> None:
        """Count."""
        self.has_ended += 1


class Client:
    """One connection, as its client sees it."""

    def __init__(self, broker: Broker, token: bytes) -> None:
        ours, theirs = pair()
        self.channel = Channel(ours)
        self.connection = ClientConnection(Channel(theirs), broker, os.getpid())  # type: ignore[arg-type]
        self.state = "idle"
        self.say("call", token)

    def say(self, *message: Any) -> None:
        """Send a message, and have it read."""
        self.channel.send(message)
        self.connection.heed()

    def listen(self) -> None:
        """Read all answers."""
        while select.select([self.channel.fileno()], [], [], 0)[0] or self.channel.has_unread:
            kind, *_ = self.channel.receive()
            if kind == "granted":
                os.close(self.channel.take_fd())
                self.state = "holding"
            elif kind not in {"loading", "waiting"}:
                self.state = "idle"


class Connections(RuleBasedStateMachine):
    """Clients take, wait, release, lose and die; workers end; the promise holds after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = Broker()
        self.broker.mold.workers.look_again()
        self.clients = [Client(self.broker, bytes([number % 3])) for number in range(CLIENTS)]
        self.come_up()

    def holder(self, number: int, state: str) -> Client | None:
        """One of the clients in a state."""
        found = [client for client in self.clients if client.state == state]
        return found[number % len(found)] if found else None

    @rule(number=st.integers(0, 9))
    def take(self, number: int) -> None:
        """A call."""
        if (client := self.holder(number, "idle")) is not None:
            client.state = "waiting"
            client.say("take", number % 2 == 1, False)  # noqa: FBT003 - as it is sent

    @rule(number=st.integers(0, 9), worn=st.booleans())
    def release(self, number: int, worn: bool) -> None:  # noqa: FBT001 - Hypothesis passes it
        """A call that has ended."""
        if (client := self.holder(number, "holding")) is not None:
            client.state = "idle"
            client.say("release", (Reason("uses", "Uses(5)"),) if worn else (), True)  # noqa: FBT003 - as it is sent

    @rule(number=st.integers(0, 9), cause=st.sampled_from(["timeout", "cancelled"]))
    def lose(self, number: int, cause: str) -> None:
        """A call that took too long."""
        if (client := self.holder(number, "holding")) is not None:
            client.say("end", cause, True)  # noqa: FBT003 - as it is sent

    @rule(number=st.integers(0, CLIENTS - 1))
    def die(self, number: int) -> None:
        """A client that is killed, whatever it does; another one comes."""
        self.clients[number].channel.close()
        self.clients[number].connection.heed()
        self.clients[number] = Client(self.broker, bytes([number % 3]))

    @rule(number=st.integers(0, 9))
    def end_worker(self, number: int) -> None:
        """An idle worker that is killed."""
        idle = [worker for worker, state, *_ in self.broker.mold.workers.listed() if state == "idle"]
        if idle:
            self.broker.mold.workers.exited(idle[number % len(idle)], "SIGKILL")

    @rule()
    def come_up(self) -> None:
        """Workers that were started take calls."""
        starting, self.broker.mold.starting = self.broker.mold.starting, []
        for worker in starting:
            self.broker.mold.workers.ready(worker)

    @invariant()
    def nothing_is_kept(self) -> None:
        """Leases, workers and places in the queue belong to calls under way, and no call waits for an idle worker."""
        self.broker.supervisor.run()
        self.broker.mold.workers.look_again()
        for client in self.clients:
            client.listen()
        states = [client.state for client in self.clients]
        members = [worker for worker, *_ in self.broker.mold.workers.listed()]
        busy = sum(member.state in {"busy", "retiring"} for member in members)
        assert states.count("holding") == busy <= SIZE
        assert states.count("waiting") + states.count("holding") == self.broker.scope.leases
        assert states.count("waiting") <= QUEUE
        if busy < SIZE and any(member.state == "idle" for member in members):
            assert "waiting" not in states

    def teardown(self) -> None:
        """Close all sockets."""
        for client in self.clients:
            client.channel.close()
            client.connection.heed()
        assert 0 == self.broker.scope.leases
        self.broker.mold.close()


def test_a_connection_of_no_client_gets_no_worker() -> None:
    """Whoever does not say whose it is, or says nonsense, is hung up on, and nobody else notices."""
    for message in (("take", False, False), ("leave",), ("release", (), True), ("nonsense",), (), 5):
        broker = Broker()
        broker.mold.workers.look_again()
        ours, theirs = pair()
        channel, connection = Channel(ours), ClientConnection(Channel(theirs), broker, os.getpid())  # type: ignore[arg-type]
        channel.send(message)
        connection.heed()
        with pytest.raises(EOFError):
            channel.receive()
        channel.close()
        assert (0, 1) == (broker.scope.leases, broker.has_ended)
        broker.mold.close()


@pytest.mark.parametrize("first", ["granted", "gone"])
def test_a_worker_that_is_granted_to_a_call_that_has_gone_goes_back(first: str) -> None:
    """Its client hangs up before it has read that: nothing has begun, and no worker ends for it."""
    broker = Broker()
    broker.mold.workers.look_again()
    for worker in broker.mold.starting:
        broker.mold.workers.ready(worker)
    clients = [Client(broker, b"a") for _ in range(SIZE + 1)]
    for client in clients:
        client.say("take", False, False)  # noqa: FBT003 - as it is sent
        client.listen()
    holding, late = clients[0], clients[SIZE]
    assert "holding" == holding.state
    if first == "gone":
        late.channel.close()
    holding.say("release", (), True)  # noqa: FBT003 - as it is sent
    late.channel.close()
    late.connection.heed()
    broker.supervisor.run()
    assert (1, 0) == (broker.scope.leases, broker.mold.workers.counts["cancelled"])
    for client in clients[:SIZE]:
        client.channel.close()
        client.connection.heed()
    broker.mold.close()


TestConnections = Connections.TestCase
TestConnections.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
