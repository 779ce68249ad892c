"""A gunicorn configuration: ``gunicorn -c python:modelguard.frameworks.gunicorn app:app``.

The master imports the application, loads the models of its guards and prepares them to be shared (see
:mod:`modelguard.prefork`); workers are warm before their first request. If a policy of a worker is due (``Uses``,
``Errors``, ``MemoryGrowth``, ``MemoryLimit``), the worker is replaced by a new one, forked from the master's unused
copy of the model. A new worker serves before the old one ends, so no request is lost and none waits.

``TTL``, ``Modified`` and ``Changed`` mean new weights. If a shared guard has one of them, the master loads no model:
on Linux it forks a process that does, a mold, from which workers are forked. New weights, or ``reload()`` in any of
these processes, make a new mold, then all workers are replaced, one at a time, and the old mold ends with its memory.

This applies to the guards made with ``prefork=True``; if there is none, to all guards that the application makes on
import. An application that has batched or isolated functions or pools alone is only prepared to be forked.

Environment variables set the options, each with its default first: ``MODELGUARD_FREEZE`` (``yes`` or ``no``),
``MODELGUARD_IMMORTALIZE`` (``auto``, ``yes`` or ``no``), ``MODELGUARD_ON_HAZARD`` (``fix``, ``refuse`` or ``warn``) and
``MODELGUARD_WARM_TIMEOUT`` (``60s``, or another duration). ``modelguard docs sharing`` explains them.

In your own configuration file, first import everything from this module. If you define a hook of the same name as a
hook here, call this one from yours::

    from modelguard.frameworks import gunicorn as sharing
    from modelguard.frameworks.gunicorn import *

    workers = 8

    def post_fork(server, worker):
        sharing.post_fork(server, worker)
        connect_to_database()
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import random
import signal
import socket
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from modelguard import _units, prefork, telemetry
from modelguard.errors import ForkHazard, GuardClosed, InvalidOption, ModelGuardError
from modelguard.frameworks._gunicorn_molds import Molds, needed
from modelguard.frameworks._workers import (
    LOAD_TIMEOUT,
    MetricFiles,
    PreforkOptions,
    SharedModels,
    guards_to_share,
    log_report,
)
from modelguard.runtime import background, child_processes, fork_hooks
from modelguard.runtime.background import green_threads
from modelguard.sharing import _prefork
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.frameworks.asgi import Message, Receive, Scope, Send

__all__ = ["child_exit", "control_socket_disable", "on_starting", "post_fork", "preload_app"]

#: The master must import the application; otherwise there is nothing to share.
preload_app = True

#: gunicorn's control server is a thread with an event loop in the master, which forks all the time: a lock that the
#: thread holds during a fork would stay locked in the worker.
control_socket_disable = True

#: The number of bytes that POSIX guarantees a pipe writes at once.
_MESSAGE = 512

#: gunicorn's own worker classes without ASGI.
_WSGI_ONLY = ("sync", "gthread", "gevent", "eventlet", "tornado")

_options = PreforkOptions.read(os.environ)

_master: _Master | None = None


def on_starting(server: Any) -> None:
    """Prepare the models, before gunicorn opens its port or reports that it is ready."""
    global _master
    try:
        _master = _Master(server)
        _master.start()
    except ModelGuardError as error:
        server.log.critical("modelguard: %s", error)
        sys.exit(1)


def post_fork(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's signature
    """Repair and warm up the worker, and notify the master when it serves; a worker that cannot be repaired ends.

    gunicorn stops if a worker cannot start, which is right at the beginning. Later, a failed replacement must not stop
    the workers that serve: only the new worker ends, and the replacement is tried again.
    """
    try:
        prefork.in_child()
    except Exception:
        worker.log.exception("modelguard: worker %s cannot start", worker.pid)
        if _master is not None and _master.replacement.spawning:
            sys.exit(1)
        raise
    leave_politely(worker)
    if _master is not None:
        _master.wake_when_serving(worker)


def child_exit(server: Any, worker: Any) -> None:  # noqa: ARG001 - gunicorn's signature
    """Hand the metric files of a worker that has ended to a worker to come (``PROMETHEUS_MULTIPROC_DIR``)."""
    if _master is not None:
        _master.metric_files.worker_ended(worker.pid)


def _is_asgi(app: Any) -> bool:
    return inspect.iscoroutinefunction(app) or inspect.iscoroutinefunction(type(app).__call__)


def _rehearse(configuration: Any) -> None:
    """Answer a request here as workers do, since what each of them does first costs it memory of its own.

    That is an import, also one that finds nothing, and code that the interpreter rewrites when it runs.
    """
    from gunicorn.http import RequestParser, wsgi  # type: ignore[import-untyped]

    random.Random("")  # noqa: S311 - gunicorn seeds it with a text
    address = ("127.0.0.1", 0)
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.suppress(Exception):  # of a version that has changed, or a configuration
        request = next(RequestParser(configuration, [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"], address))
        response, _ = wsgi.create(request, ours, address, address, configuration)
        response.start_response("200 OK", [("Content-Length", "2")])
        response.write(b"ok")
        response.close()


class _Master:
    def __init__(self, server: Any) -> None:
        if not server.cfg.preload_app:
            why = "must be True: otherwise each worker imports the application and loads its own model"
            raise InvalidOption("preload_app", False, why=why, fix="Leave it out, or set it to True.")  # noqa: FBT003
        kind = server.cfg.worker_class_str
        if kind in _WSGI_ONLY and _is_asgi(server.app.wsgi()):
            why = "speaks WSGI only, and the application is an ASGI application: every request would fail"
            raise InvalidOption("worker_class", kind, why=why, fix='Use "asgi", or "uvicorn_worker.UvicornWorker".')
        if kind.startswith(("gevent", "eventlet")) and green_threads() is None:
            why = "patches threads in each worker, after the application's import: calls would wait for ever"
            fix = 'Patch them first in your own configuration, by gevent.monkey.patch_all(), or use "gthread".'
            raise InvalidOption("worker_class", kind, why=why, fix=fix)
        # The warm-up and the application's own start may each take this long.
        self.replacement = RollingReplacement(server, timeout=2 * _options.warm_timeout)
        self._server = server
        self._guards = guards_to_share()
        self._models = SharedModels(self._guards, _options)
        self._forks_worker = False
        self._requests, self._send_requests = os.pipe()
        self._pid = os.getpid()
        self.metric_files = MetricFiles(os.environ)
        self._molds: Molds | None = None

    def start(self) -> None:
        """Prepare the models, and hook into gunicorn's main loop."""
        for end in (self._requests, self._send_requests):
            os.set_blocking(end, False)
        fork_hooks.at_fork(fork_hooks.Rank.SERVER, in_child=self._after_fork)
        background.TICKER.stop()
        _rehearse(self._server.cfg)
        telemetry.add_hook(self._log)
        server, with_molds = self._server, needed(self._guards)
        for number, guard in enumerate(self._guards):
            renew = functools.partial(self._request, 0, str(number)) if with_molds else None
            guard.engine.checks.recycle_in_children(self._request_replacement, takes_calls=False, renew=renew)
        # gunicorn has no hook that is called regularly, but calls this at least once a second.
        self._manage_workers, server.manage_workers = server.manage_workers, self._manage
        self._spawn_worker, server.spawn_worker = server.spawn_worker, self._spawn
        if not with_molds:
            with warnings.catch_warnings(action="ignore", category=ForkHazard):  # the report has them
                self._log_report(self._models.prepare())
            return
        self._molds = Molds(
            server,
            self._guards,
            _options,
            self.metric_files,
            make_worker=self._spawn_worker,
            before_worker=self._before_worker,
        )
        self._molds.start()

    def _log(self, event: telemetry.Event) -> None:
        """Write failed loads to gunicorn's error log; other events are logged by the usual logger."""
        if isinstance(event, telemetry.LoadErrored):
            kept = "" if event.current is None else "; workers keep the old ones"
            self._server.log.error("modelguard: %s: %s%s", event.guard, telemetry.describe(event), kept)

    def _request_replacement(self, reasons: tuple[Reason, ...]) -> None:
        """In a worker, from any thread: request its replacement."""
        self._request(os.getpid(), ", ".join(map(str, reasons)))

    def _request(self, pid: int, why: str) -> None:
        """In a worker: request the replacement of this process or, with 0, new weights for the guard of this number."""
        text = f"{pid} {_units.printable(why)}"[: _MESSAGE // 4]  # a line; a character takes up to four bytes
        os.write(self._send_requests, text.encode(errors="replace") + b"\n")
        self._wake()

    def _wake(self) -> None:
        """In a worker: wake the master now, instead of at its next round within a second."""
        with contextlib.suppress(OSError):  # if the worker runs as another user, the master wakes by itself
            os.kill(self._pid, signal.SIGCHLD)  # wakes gunicorn's main loop

    def wake_when_serving(self, worker: Any) -> None:
        """In a worker: wake the master at the first heartbeat, so that it can end the worker that this one replaces."""
        notify = worker.notify

        def first() -> None:
            worker.notify = notify
            notify()
            self._wake()

        worker.notify = first

    def _read_requests(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while words := os.read(self._requests, _MESSAGE * 128):
                for line in words.decode().splitlines():
                    pid, why = line.split(" ", 1)
                    if int(pid):
                        self.replacement.request(int(pid), why)
                    else:
                        with contextlib.suppress(GuardClosed):
                            self._guards[int(why)].reload(wait=False)

    def _manage(self) -> None:
        self._read_requests()
        for guard in self._guards:
            with self._logging_errors("modelguard: the policies of %r could not be evaluated", guard):
                guard.check()
        self._renew()
        may_fork = _prefork.loading() is None if self._molds is None else self._molds.may_fork
        self.replacement.step(may_fork=may_fork)
        if may_fork and not self.replacement.surplus:
            self._manage_workers()

    @contextlib.contextmanager
    def _logging_errors(self, text: str, *details: object) -> Iterator[None]:
        try:
            yield
        except Exception:  # the master must not end
            self._server.log.exception(text, *details)

    def _spawn(self) -> int:
        """Fork, but not while another thread loads: locks that it holds would stay locked in the worker."""
        if self._molds is not None:
            pid = self._molds.spawn()
        else:
            _prefork.wait_for_loads(LOAD_TIMEOUT)
            self._renew()
            self._before_worker()
            try:
                pid = int(self._spawn_worker())
            finally:
                self._forks_worker = False
        self.metric_files.worker_started(pid)
        return pid

    def _before_worker(self) -> None:
        self._forks_worker = True

    def _after_fork(self) -> None:
        """In a worker: let a signal end it, until gunicorn installs the handlers of workers.

        The master's handlers note the signal for a main loop that the worker does not run. And take metric files over:
        the warm-up, which follows, may count already.
        """
        if self._forks_worker:
            self._forks_worker = False  # for what the worker forks
            self.metric_files.take_over()
            for number in (*child_processes.ENDING, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)

    def _renew(self) -> None:
        """Share the weights that were loaded since the last preparation, and replace all workers."""
        for pid in self._prepared_anew() if self._molds is None else self._molds.step():
            self.replacement.request(pid, "there are new weights", at_once=True)

    def _prepared_anew(self) -> list[int]:
        """Prepare the weights that were loaded here; the workers that do not have them."""
        stale, report = list(self._server.WORKERS), None
        with self._logging_errors("modelguard: the new weights cannot be shared; workers keep the old ones"):
            report = self._models.renew()
        if report is None:
            return []
        self._log_report(report)
        return stale

    def _log_report(self, report: prefork.ForkReport) -> None:
        log_report(self._server.log, report, _options.on_hazard, self._server.num_workers)


#: Seconds until a failed replacement is tried again: long enough to cause no load, and short enough to recover soon.
RETRY_AFTER = 60.0

#: Permissions of a temporary file as ``tempfile.mkstemp`` makes it.
_NEW_FILE = 0o600


class RollingReplacement:
    """Replaces one worker after the other. :meth:`step` is called from the master's main loop, and never waits."""

    def __init__(self, arbiter: Any, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.spawning = False
        self._arbiter = arbiter
        self._timeout = timeout
        self._clock = clock
        self._due: dict[int, str] = {}
        self._old = 0
        self._new = 0
        self._started = 0.0
        self._signalled = -math.inf
        self._not_before = 0.0

    def request(self, pid: int, why: str, *, at_once: bool = False) -> None:
        """Replace a worker after those that were requested before; ``at_once``: whatever has failed before."""
        self._due.setdefault(pid, why)
        if at_once:
            self._not_before = 0.0

    @property
    def surplus(self) -> bool:
        """Whether there is one worker too many because a replacement is in progress."""
        return bool(self._old) and len(self._arbiter.WORKERS) == self._arbiter.num_workers + 1

    def step(self, *, may_fork: bool = True) -> None:
        """Continue the replacement in progress, and begin the next one if there is none."""
        self._due = {pid: why for pid, why in self._due.items() if pid in self._arbiter.WORKERS}
        if self._old:
            self._continue()
        if not self._old and self._due and may_fork and self._clock() >= self._not_before:
            self._begin()

    def _begin(self) -> None:
        old, why = next(iter(self._due.items()))
        self._arbiter.log.info("modelguard: worker %s is being replaced: %s", old, why)
        self.spawning = True
        try:
            new = self._arbiter.spawn_worker()  # does not return in the worker
        except OSError as error:
            self._give_up(f"no process could be started: {error}")
            return
        finally:
            # This also runs in the worker when it ends, without any effect.
            self.spawning = False
        if not new:  # a mold gave none, and the log has why
            self._give_up("no process could be started")
            return
        self._old, self._new, self._started, self._signalled = old, new, self._clock(), -math.inf

    def _continue(self) -> None:
        # Up to gunicorn 23 a signal handler removes workers, so it may do so between any two steps here.
        old, new, now = self._arbiter.WORKERS.get(self._old), self._arbiter.WORKERS.get(self._new), self._clock()
        if old is None:
            self._old = 0
        elif new is None:
            self._give_up(f"the new worker {self._new} ended before it could take over")
        elif serves(new, now):
            self._end_old(now)
        elif now - self._started > self._timeout:
            self._arbiter.kill_worker(self._new, signal.SIGKILL)
            self._give_up(f"the new worker {self._new} did not serve after {self._timeout:g} s")

    def _end_old(self, now: float) -> None:
        """End the old worker after its requests. The signal is repeated, because a starting worker would miss it."""
        if now - self._signalled >= self._timeout:
            self._signalled = now
            self._arbiter.kill_worker(self._old, signal.SIGTERM)

    def _give_up(self, why: str) -> None:
        self._old = 0
        self._not_before = self._clock() + RETRY_AFTER
        self._arbiter.log.error(
            "modelguard: %s; the old worker stays; next attempt in %g s, or with new weights", why, RETRY_AFTER
        )


def serves(worker: Any, now: float) -> bool:
    """Whether a worker has finished starting, including the application's own start, and reached its main loop.

    It then sends a first heartbeat by its file: from gunicorn 22 on it sets the file's time to monotonic seconds, where
    until then the file has the time at which it was made, in seconds since 1970. Earlier versions change the file's
    permissions.
    """
    try:
        file = os.fstat(worker.tmp.fileno())
    except (OSError, ValueError):  # it has ended, and its file is closed
        return False
    return file.st_mtime <= now or stat.S_IMODE(file.st_mode) != _NEW_FILE


# gunicorn's ASGI workers: a worker that leaves says so before it closes a connection that was kept alive.
#
# When such a worker is told to end, it closes each connection whose response has just been sent, although that response
# promised to keep the connection alive: in gunicorn 27, 94 of 21,738 requests of eight busy clients met a closed
# connection while 21 workers were replaced. Clients repeat a GET then, but must not repeat a POST.


#: Seconds between checks whether all connections are closed.
_CLOSING_POLL = 0.05

#: Seconds for a connection's last response, beyond gunicorn's own timeout of an idle connection.
_MARGIN = 0.2


def leave_politely(worker: Any) -> None:
    """Have an ASGI worker announce the end of its connections before it stops; other workers are left as they are."""
    module = sys.modules.get("gunicorn.workers.gasgi")
    if module is not None and isinstance(worker, module.ASGIWorker):
        _LeavingWorker(worker)


class _LeavingWorker:
    """Delays the end of a worker until each connection has had a response with ``Connection: close``, or was idle.

    gunicorn closes an idle connection after ``keepalive`` seconds, so the delay is a little longer, but not longer than
    half of ``graceful_timeout``. Without open connections there is none.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._leaving = False
        self._load, worker.load_wsgi = worker.load_wsgi, self._load_app
        self._exit, worker.handle_exit_signal = worker.handle_exit_signal, self._begin

    def _load_app(self) -> None:
        self._load()
        self._app, self._worker.asgi = self._worker.asgi, self._serve

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        # In HTTP/2 this header is not allowed, and gunicorn announces the end of a connection by itself.
        has_header = scope["type"] == "http" and scope["http_version"].startswith("1")
        await self._app(scope, receive, self._announcing(send) if has_header else send)

    def _announcing(self, send: Send) -> Send:
        async def announce(message: Message) -> None:
            if self._leaving and message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"connection"]
                message = {**message, "headers": [*kept, (b"connection", b"close")]}
            await send(message)

        return announce

    def _begin(self) -> None:
        """Run on the worker's event loop when SIGTERM arrives; gunicorn may repeat the signal every second."""
        if not self._leaving:
            self._leaving = True
            settings = self._worker.cfg
            patience = min(settings.keepalive + _MARGIN, settings.graceful_timeout / 2)
            self._exit_when_closed(self._worker.loop.time() + patience)

    def _exit_when_closed(self, deadline: float) -> None:
        loop = self._worker.loop
        if self._worker.nr_conns == 0 or loop.time() >= deadline:
            self._exit()
        else:
            loop.call_later(_CLOSING_POLL, self._exit_when_closed, deadline)
