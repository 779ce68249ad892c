"""Replace gunicorn's workers one at a time: the old worker ends when its replacement serves."""

from __future__ import annotations

import importlib
import math
import os
import signal
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

#: Seconds until a failed replacement is tried again: long enough to cause no load, and short enough to recover soon.
RETRY_AFTER = 60.0

#: Permissions of a temporary file as ``tempfile.mkstemp`` makes it.
_NEW_FILE = 0o600


class Arbiter(Protocol):
    """The parts of gunicorn's master that are used here."""

    WORKERS: dict[int, Any]
    num_workers: int
    log: Any

    def spawn_worker(self) -> int:
        """Fork a worker, and return its process id; never returns in the worker itself."""
        ...

    def kill_worker(self, pid: int, sig: int) -> None:
        """Send a signal to a worker."""
        ...

    def manage_workers(self) -> None:
        """Start missing workers, and end the oldest surplus ones; called at least once a second."""
        ...


class RollingReplacement:
    """Replaces one worker after the other. :meth:`step` is called from the master's main loop, and never waits.

    Args:
        arbiter: The master of the workers.
        timeout: Seconds that a new worker may take until it serves.
        clock: Monotonic seconds, as gunicorn's workers use for their heartbeats.
    """

    def __init__(self, arbiter: Arbiter, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
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

    def request(self, pid: int, why: str) -> None:
        """Replace a worker after those that were requested before."""
        self._due.setdefault(pid, why)

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
        self._arbiter.log.error("modelguard: %s; the old worker stays, next attempt in %g s", why, RETRY_AFTER)


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


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: Seconds between checks whether all connections are closed.
_POLL = 0.05

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
        self._deadline = 0.0
        self._load, worker.load_wsgi = worker.load_wsgi, self._load_app
        self._exit, worker.handle_exit_signal = worker.handle_exit_signal, self._begin

    def _load_app(self) -> None:
        self._load()
        self._app, self._worker.asgi = self._worker.asgi, self._serve

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
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
            self._deadline = self._worker.loop.time() + patience
            self._exit_when_closed()

    def _exit_when_closed(self) -> None:
        loop = self._worker.loop
        if self._worker.nr_conns == 0 or loop.time() >= self._deadline:
            self._exit()
        else:
            loop.call_later(_POLL, self._exit_when_closed)


# The files of prometheus_client's multiprocess mode, under a server that replaces its workers.
#
# Each process writes its counts into files of its own, and a scrape adds up all files that there are. The counts of a
# worker that has ended must stay in the sums, so its files cannot be deleted; but a file for each worker that ever
# lived makes scrapes slower and slower. So a new worker goes on with the files of one that has ended. That is one
# rename for each file, which a scrape sees before or after: no count is missing, or there twice.


_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
#: What is added up over all processes, dead ones included. Gauges are values of their own process.
_SUMMED = ("counter", "histogram", "summary")


class MetricFiles:
    """Which files are free to be taken over. Lives in the process that forks; a forked worker uses its copy once.

    Args:
        environment: Where the folder's variable is.

    Attributes:
        ended: The processes whose files may be free.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        folder = environment.get(_FOLDER)
        self._folder = None if folder is None else Path(folder)
        self.ended: list[int] = []

    def worker_ended(self, pid: int) -> None:
        """In the parent: a worker has ended. Its live gauges are removed, its counts go to a worker to come."""
        if self._folder is None or "prometheus_client" not in sys.modules:
            return
        importlib.import_module("prometheus_client.multiprocess").mark_process_dead(pid, str(self._folder))
        still_there = [each for each in self.ended if each != pid and any(map(Path.exists, self._files(each)))]
        self.ended = [*still_there, pid]

    def worker_started(self, pid: int) -> None:
        """In the parent: a process id is used again, and its files with it."""
        self.ended = [each for each in self.ended if each != pid]

    def take_over(self) -> None:
        """In a new worker, before its first metric: go on with the files of a worker that has ended.

        Another new worker may take the same one: only one of them can rename a file.
        """
        if self._folder is None:
            return
        own = self._files(os.getpid())
        if any(map(Path.exists, own)):  # this worker counts already, or had the same process id as one that has ended
            return
        for pid in self.ended:
            taken = [self._take(theirs, mine) for theirs, mine in zip(self._files(pid), own, strict=True)]
            if any(taken):
                return

    def _take(self, theirs: Path, mine: Path) -> bool:
        with suppress(OSError):  # there is none, or another worker was faster
            theirs.rename(mine)
            return True
        return False

    def _files(self, pid: int) -> list[Path]:
        folder = self._folder or Path()
        return [folder / f"{kind}_{pid}.db" for kind in _SUMMED]
