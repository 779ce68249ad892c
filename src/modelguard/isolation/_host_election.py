"""How a process finds the broker of an isolated function, or starts one: elected by a lock, found by a name."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from modelguard.errors import LoadFailed
from modelguard.isolation import _broker_launch, _code
from modelguard.isolation._channel import Channel
from modelguard.isolation._host_client import Membership
from modelguard.isolation._host_identity import NAME, identity_of, orders_for, prefix_of
from modelguard.isolation._options import IsolationOptions
from modelguard.isolation._rendezvous import Folder, ForeignPeer
from modelguard.lifecycle._host_lock import private_folder
from modelguard.lifecycle._options import GuardOptions
from modelguard.telemetry import logger

__all__ = ["join"]

#: Seconds in which a broker takes a client; it does nothing that takes long. The second: where an event loop may wait.
_ANSWER, _SOON = 5.0, 0.5

#: Seconds for finding or starting a broker: on a busy host, a fresh interpreter takes some.
_LONGEST = 30.0

#: Seconds between two attempts.
_POLL = 0.02


def join(
    options: IsolationOptions,
    source: GuardOptions[Any],
    *,
    elect: bool,
    paused: bool,
    on_pause: Callable[[bool], object],
    give_up: Callable[[], bool],
) -> Membership | None:
    """Become the client of a broker; start one if there is none and ``elect`` is true. Blocks.

    Args:
        options: Of the isolated function.
        source: Of the guard that lends the model in the molds.
        elect: Whether to start a broker. If not, None is returned where there is none.
        paused: Whether a broker that is started here is paused from the start.
        on_pause: Called with what the broker says of whether the function is paused.
        give_up: Asked while there is none yet; true ends the wait.

    Raises:
        NotSupported: The private folder cannot be used.
        LoadFailed: There is no broker, and none could be started.
    """
    until = time.monotonic() + _LONGEST
    election = _Election(options, source, _ANSWER if elect else _SOON, paused=paused, on_pause=on_pause)
    while True:
        found = election.attempt(elect, lambda: give_up() or time.monotonic() > until)
        if found is not None or not elect:
            return found
        if give_up() or time.monotonic() > until:
            raise LoadFailed(options.name, f"no broker serves in {private_folder()}: {election.obstacle}")
        time.sleep(_POLL)


class _Election:
    """Attempts to find a broker, or to start one.

    Args:
        options: Of the isolated function.
        source: Of the guard that lends the model in the molds.
        patience: Seconds in which a broker has to answer.
        paused: Whether a broker that is started here is paused.
        on_pause: Of the membership.

    Attributes:
        obstacle: Why the last attempt has found none.
    """

    def __init__(
        self,
        options: IsolationOptions,
        source: GuardOptions[Any],
        patience: float,
        *,
        paused: bool,
        on_pause: Callable[[bool], object],
    ) -> None:
        self.obstacle = "another process holds the lock"
        self._options = options
        self._source = source
        self._patience = patience
        self._paused = paused
        self._on_pause = on_pause
        self._identity = identity_of(options, source)
        self._prefix = prefix_of(self._identity)
        self._serving: set[str] = set()
        self._hung = False

    def attempt(self, elect: bool, give_up: Callable[[], bool]) -> Membership | None:  # noqa: FBT001
        """Find a broker; if there is none, start one, which the next attempt finds."""
        folder = found = None
        try:
            folder = Folder(private_folder())
            found = self._find(folder)
            if found is None and elect and not self._hung:
                with folder.locked(give_up) as lock:
                    if lock is not None:
                        found = self._find(folder)
                        if found is None and not self._hung:
                            self._start(folder, lock)
        except _broker_launch.NotStarted as error:
            raise LoadFailed(self._options.name, str(error)) from error
        except OSError as error:  # no process or no descriptor is left
            raise LoadFailed(self._options.name, f"its broker cannot be started or found: {error}") from error
        except ForeignPeer as error:
            raise LoadFailed(self._options.name, f"where its broker should listen there is {error}") from error
        finally:
            if found is None and folder is not None:
                folder.close()
        return found

    def _find(self, folder: Folder) -> Membership | None:
        """Ask all brokers of this name, until one takes this process."""
        self._serving.clear()
        self._hung = False
        for name in folder.names(self._prefix):
            found = self._ask(folder, name)
            if found is not None:
                return found
        return None

    def _ask(self, folder: Folder, name: str) -> Membership | None:
        connected = folder.connect(name, self._patience)
        if connected is None:
            return None
        channel = Channel(connected)
        token = secrets.token_bytes(16)
        reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found = None
        try:
            channel.set_timeout(self._patience)
            with theirs:
                channel.send(("join", token, self._identity, _code.imported), [theirs.fileno()])
            answer, *details = channel.receive()
            if answer == "welcome":
                found = Membership(folder, name, channel, reports, token=token, pid=details[0], on_pause=self._on_pause)
            else:
                self._refused(name, *details)
        except BlockingIOError:
            self._hung = True
            self.obstacle = f"the one that listens there does not answer within {self._patience:g} s"
        except (EOFError, OSError):  # it ends
            pass
        finally:
            if found is None:
                channel.close()
                reports.close()
        return found

    def _refused(self, name: str, why: str, text: str) -> None:
        self._serving.add(name)
        if why == "identity":
            raise LoadFailed(self._options.name, f"its broker serves another function of the same name; {text} differ")
        # After a deploy, while processes of the old code still serve: each code has a broker of its own.
        logger.warning(
            "%s: %s has changed since the mold of the other processes was loaded; this one gets another mold",
            self._options.name,
            text,
        )

    def _start(self, folder: Folder, lock: int) -> None:
        self._remove_remains(folder)
        number = next(n for n in range(1, len(self._serving) + 2) if f"{self._prefix}{n}" not in self._serving)
        socket_name = f"{self._prefix}{number}"
        orders = orders_for(folder.path, socket_name, self._identity, self._options, self._source, paused=self._paused)
        _broker_launch.start_broker(orders, lock, _LONGEST)

    def _remove_remains(self, folder: Folder) -> None:
        """Remove sockets whose brokers were killed."""
        for name in folder.names(""):
            if NAME.fullmatch(name) and name not in self._serving:
                connected = folder.connect(name, _ANSWER)
                if connected is None:
                    folder.remove(name)
                else:
                    connected.close()
