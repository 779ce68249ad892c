"""A gunicorn configuration: ``gunicorn -c python:modelguard.frameworks.gunicorn app:app``.

The master imports the application, loads the models of its guards and prepares them to be shared (see
:mod:`modelguard.prefork`); workers are warm before their first request. A worker whose policy is due
(``Uses``, ``Errors``, ``MemoryGrowth``, ``MemoryLimit``) is replaced by a fresh one, forked from the master's untouched
copy. ``TTL`` and ``Modified`` mean new weights: the master loads and prepares them, then all workers are replaced, one
at a time. A fresh worker serves before the old one is told to finish, so no request is lost and none waits.

Which guards: those made with ``prefork=True``, or all that the application made on import if none is marked.

PreforkOptions are environment variables: ``MODELGUARD_FREEZE``, ``MODELGUARD_IMMORTALIZE``, ``MODELGUARD_ON_HAZARD``,
``MODELGUARD_WARM_TIMEOUT``; see :class:`~modelguard.frameworks._prefork_options.PreforkOptions`.

In a configuration file of your own, import everything from here first. A hook of yours that has the name of one of
these calls it::

    from modelguard.frameworks import gunicorn as sharing
    from modelguard.frameworks.gunicorn import *

    workers = 8

    def post_fork(server, worker):
        sharing.post_fork(server, worker)
        connect_to_database()
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING, Any

from modelguard import prefork, telemetry
from modelguard.errors import ForkHazard, InvalidOption, ModelGuardError
from modelguard.frameworks._prefork_options import PreforkOptions, generations, guards_to_share, loading, wait_for_loads
from modelguard.frameworks._rolling import Rolling
from modelguard.lifecycle import _ticker
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard

__all__ = ["control_socket_disable", "on_starting", "post_fork", "preload_app"]

#: The master imports the application, or there is nothing to share.
preload_app = True

#: gunicorn's control server is a thread with an event loop in the master, which goes on forking: a lock that the
#: thread holds in that moment would stay locked in the worker.
control_socket_disable = True

#: What a pipe takes in one piece, by POSIX.
_MESSAGE = 512

_options = PreforkOptions.read(os.environ)
_master: _Master | None = None


def on_starting(server: Any) -> None:
    """Prepare the models, before gunicorn opens its port or says that it is ready."""
    global _master
    try:
        _master = _Master(server)
        _master.start()
    except ModelGuardError as error:
        server.log.critical("modelguard: %s", error)
        sys.exit(1)


def post_fork(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's signature
    """Refuse to serve if the worker is not whole; tell the master when it serves.

    gunicorn stops when a worker cannot start, which is right at the beginning. Later, a failed replacement must not
    end those that serve: it ends alone, and is tried again.
    """
    try:
        prefork.in_child()
    except Exception:
        worker.log.exception("modelguard: worker %s cannot start", worker.pid)
        if _master is not None and _master.rolling.spawning:
            sys.exit(1)
        raise
    if _master is not None:
        _master.hear_of(worker)


class _Master:
    """The process that loads, prepares and forks. All it does is done in gunicorn's main loop, between two forks."""

    def __init__(self, server: Any) -> None:
        if not server.cfg.preload_app:
            why = "without it each worker imports the application and loads a model of its own"
            raise InvalidOption("preload_app", False, why=why, fix="Leave it out, or set it to True.")  # noqa: FBT003
        # A fresh worker may take as long as its warm-up, and the application's own start as long again.
        self.rolling = Rolling(server, patience=2 * _options.warm_timeout)
        self._server = server
        self._guards = guards_to_share()
        self._prepared: tuple[int, ...] = ()
        self._inbox, self._outbox = os.pipe()
        self._pid = os.getpid()

    def start(self) -> None:
        """Prepare, and have gunicorn's main loop come by."""
        for end in (self._inbox, self._outbox):
            os.set_blocking(end, False)
        _ticker.TICKER.stop()
        telemetry.add_hook(self._log)
        for guard in self._guards:
            guard.recycle_in_children(self._ask, takes_calls=False)
        self._prepare()
        server = self._server
        # gunicorn has no hook that is called regularly, but calls this at least once a second.
        self._manage_workers, server.manage_workers = server.manage_workers, self._manage
        self._spawn_worker, server.spawn_worker = server.spawn_worker, self._spawn

    def _log(self, event: telemetry.Event) -> None:
        """A load that fails is told where gunicorn's own troubles are; the rest is for those who set logging up."""
        if isinstance(event, telemetry.LoadErrored):
            self._server.log.error("modelguard: %s: %s", event.guard, telemetry.describe(event))

    def _ask(self, reasons: tuple[Reason, ...]) -> None:
        """In a worker, from any thread: ask to be replaced."""
        text = f"{os.getpid()} {', '.join(map(str, reasons))}"[: _MESSAGE // 4]  # a character takes up to four bytes
        os.write(self._outbox, text.encode(errors="replace").replace(b"\n", b" ") + b"\n")
        self._wake()

    def _wake(self) -> None:
        """In a worker: have the master look now, and not at its next round within a second."""
        with contextlib.suppress(OSError):  # the worker runs as another user: the master looks by itself
            os.kill(self._pid, signal.SIGCHLD)  # which gunicorn takes as a wake-up

    def hear_of(self, worker: Any) -> None:
        """In a worker: wake the master at its first sign of life, upon which the one it replaces is told to end."""
        notify = worker.notify

        def first() -> None:
            worker.notify = notify
            notify()
            self._wake()

        worker.notify = first

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while words := os.read(self._inbox, _MESSAGE * 128):
                for line in words.decode().splitlines():
                    pid, why = line.split(" ", 1)
                    self.rolling.ask(int(pid), why)

    def _manage(self) -> None:
        self._listen()
        for guard in self._guards:
            self._check(guard)
        busy = loading(self._guards)
        if not busy:
            self._renew()
        self.rolling.step(may_fork=not busy)
        if not busy and not self.rolling.surplus:
            self._manage_workers()

    def _check(self, guard: ModelGuard[Any]) -> None:
        try:
            guard.check()
        except Exception:  # the master must live, whatever happens
            self._server.log.exception("modelguard: the policy of %r could not be asked", guard)

    def _spawn(self) -> int:
        """Fork, but not while another thread loads: whatever lock it holds would stay locked in the worker."""
        wait_for_loads(self._guards)
        self._renew()
        pid: int = self._spawn_worker()
        return pid

    def _renew(self) -> None:
        """Share the weights that were loaded since, and have every worker replaced."""
        if generations(self._guards) == self._prepared or not all(guard.ready for guard in self._guards):
            return
        stale = list(self._server.WORKERS)
        try:
            self._prepare()
        except ModelGuardError:
            self._prepared = generations(self._guards)  # once for each load
            self._server.log.exception("modelguard: the new weights cannot be shared; workers keep the old ones")
            return
        for pid in stale:
            self.rolling.ask(pid, "there are new weights")

    def _prepare(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForkHazard)  # the report has them
            report = _options.prepare(self._guards)
        self._prepared = generations(self._guards)
        for line in str(report).splitlines():
            self._server.log.info("modelguard: %s", line)
