"""Start a broker: a fresh interpreter with a session of its own, which outlives the process that starts it.

It keeps nothing of that process open. Whoever reads the output of a server would wait for the broker's end.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

from modelguard.isolation import _processes
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._host_messages import BrokerOrders
from modelguard.isolation._launch import start_interpreter

__all__ = ["NotStarted", "reap", "start_broker"]

#: Seconds for a broker that has hung up to end.
_EXIT = 1.0

#: Brokers that this process has started, until they have been waited for.
_started: dict[int, subprocess.Popen[bytes]] = {}


class NotStarted(Exception):
    """A broker has ended before it served, or does not come up."""


def start_broker(orders: BrokerOrders, lock: int, timeout: float) -> None:
    """Start a broker and wait until it listens.

    Args:
        orders: What it is told.
        lock: Holds the lock on the folder, and is passed on: the broker releases it.
        timeout: Seconds to wait at most.

    Raises:
        NotStarted: It does not listen.
        OSError: No process or no descriptor is left.
    """
    ours, theirs = pair()
    channel = Channel(ours)
    try:
        with theirs:
            words = "broker", ".".join(orders.options.function)
            process = start_interpreter(
                "_broker", (theirs.fileno(), lock), *words, prints=False, start_new_session=True
            )
            _started[process.pid] = process
    except BaseException:
        channel.close()
        raise
    try:
        channel.set_timeout(timeout)
        channel.send(orders)
        outcome, text = channel.receive()
    except BlockingIOError:
        process.kill()
        raise NotStarted(f"its broker does not come up within {timeout:.0f} s") from None
    except (EOFError, OSError):
        raise NotStarted(f"its broker ended: {_exit_of(process)}") from None
    finally:
        channel.close()
    if outcome != "listening":
        raise NotStarted(f"its broker could not start:\n{text}")


def _exit_of(process: subprocess.Popen[bytes]) -> str:
    with suppress(subprocess.TimeoutExpired):
        return _processes.describe_exit(process.wait(_EXIT))
    process.kill()
    return "it hung up"


def reap() -> None:
    """Collect the brokers that have ended. Those of a parent are not children of this process."""
    for pid, process in _started.copy().items():
        with suppress(OSError):
            if process.poll() is not None:
                _started.pop(pid, None)


def _after_fork_in_child() -> None:
    for process in _started.values():
        process.returncode = 0  # it is no child of this process, and must not warn when it is dropped
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
