"""The thread that supervises molds: a descriptor's number may come back for another one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from modelguard.isolation._supervisor import Supervisor

PATIENCE = 10.0


def watch(supervisor: Supervisor, end: socket.socket, work: Callable[[], object]) -> None:
    supervisor.call(lambda: supervisor.watch(end.fileno(), work))
    supervisor.flush(PATIENCE)


def test_a_descriptor_that_was_closed_while_it_was_watched() -> None:
    """The next one with its number is watched as if there had been none."""
    supervisor = Supervisor()
    first, other = socket.socketpair()
    number = first.fileno()
    watch(supervisor, first, lambda: None)
    first.close()
    second = socket.socket(fileno=other.detach())
    third, fourth = socket.socketpair()
    ends = [end for end in (second, third, fourth) if end.fileno() == number]
    assert ends  # the system gives the lowest free number
    heard = threading.Event()
    peer = fourth if ends[0] is third else third
    watch(supervisor, ends[0], lambda: (ends[0].recv(1), heard.set()))
    peer.send(b"!")
    assert heard.wait(PATIENCE)
    for end in (second, third, fourth):
        supervisor.call(lambda end=end: supervisor.forget(end.fileno()))  # type: ignore[misc]
        supervisor.flush(PATIENCE)
        end.close()


def test_work_that_raises_stops_nothing(caplog: object) -> None:
    """The fault of one mold does not end the supervision of the others."""
    supervisor = Supervisor()
    supervisor.call(lambda: 1 / 0)
    done = threading.Event()
    supervisor.call(done.set)
    assert done.wait(PATIENCE)


def test_timers_run_in_their_order() -> None:
    """A later timer does not hold up an earlier one."""
    supervisor = Supervisor()
    order: list[str] = []
    done = threading.Event()
    supervisor.later(0.02, lambda: (order.append("second"), done.set()))
    supervisor.later(0.0, lambda: order.append("first"))
    assert done.wait(PATIENCE)
    assert ["first", "second"] == order
