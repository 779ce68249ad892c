"""Start a broker: a fresh interpreter with a session of its own, which outlives the process that starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from multiprocessing import spawn
from pathlib import Path

from modelguard.isolation import _processes
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._host_messages import BrokerOrders

__all__ = ["NotStarted", "reap", "start_broker"]

#: Where this package is imported from.
_PACKAGES = str(Path(__file__).parents[2])

_PROGRAM = (
    "import sys; sys.path.insert(0, {packages!r}); "
    "from modelguard.isolation._broker import main; main({starter}, {lock})"
)

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
    """
    ours, theirs = pair()
    channel = Channel(ours)
    try:
        with theirs:
            program = _PROGRAM.format(packages=_PACKAGES, starter=theirs.fileno(), lock=lock)
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing
            executable = os.fsdecode(spawn.get_executable() or sys.executable)
            command = [executable, *flags, "-c", program, "broker", ".".join(orders.options.function)]
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), lock), start_new_session=True
            )
        _started[process.pid] = process
        channel.set_timeout(timeout)
        channel.send(orders)
        outcome, text = channel.receive()
    except BlockingIOError:
        process.kill()
        raise NotStarted(f"its broker does not come up within {timeout:.0f} s") from None
    except (EOFError, ConnectionError):
        raise NotStarted(f"its broker ended: {_processes.describe_exit(process.wait())}") from None
    except OSError as error:
        raise NotStarted(f"its broker cannot be started: {error}") from error
    finally:
        channel.close()
    if outcome != "listening":
        raise NotStarted(f"its broker could not start:\n{text}")


def reap() -> None:
    """Collect the brokers that have ended. Those of a parent are not children of this process."""
    for pid, process in list(_started.items()):
        with suppress(OSError):
            if process.poll() is not None:
                _started.pop(pid, None)


def _after_fork_in_child() -> None:
    for process in _started.values():
        process.returncode = 0  # it is no child of this process, and must not warn when it is dropped
    _started.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
