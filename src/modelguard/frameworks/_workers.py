"""The workers of a server: their parent prepares the models and loads new weights, and each worker ends when it is due.

This is for servers that replace a worker when it ends, and that run no code of ours in the parent. Workers and parent
send no messages: all they need to know about each other is in a few bytes of shared memory.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from modelguard import _units, prefork
from modelguard.errors import ForkHazard
from modelguard.frameworks import _prefork_options
from modelguard.lifecycle import _ticker
from modelguard.sharing import _loads
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle.model_guard import ModelGuard

__all__ = ["SharedState", "Workers"]

#: Seconds between the parent's checks for new weights.
_CHECK_INTERVAL = 1.0

#: Seconds that the fork of a worker waits for running loads.
_LOAD_TIMEOUT = 60.0

#: Seconds to wait for the replacement of a worker that has left: after that it has failed, or there is none.
_REPLACE_TIMEOUT = 60.0


class Workers:
    """All workers, in the parent; the current worker, in a worker.

    Args:
        guards: The guards whose models are shared. Default: those made with ``prefork=True``, or all if there is none.
        options: The options of the preparation.
        min_lifetime: The minimum age at which a worker is replaced. Without it, a policy that is due when a worker
            starts, such as a limit that the shared model alone exceeds, would make the server fork all the time.
        clock: Monotonic seconds, the same in all processes.
    """

    def __init__(
        self,
        guards: tuple[ModelGuard[Any], ...],
        options: _prefork_options.PreforkOptions,
        min_lifetime: _units.Duration,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._guards = guards
        self._options = options
        self._min_lifetime = _units.seconds(min_lifetime, "min_lifetime", zero=True)
        self._clock = clock
        self._generations: tuple[int, ...] = ()
        self._forking = threading.RLock()
        self._started = clock()
        self._due = False
        self._left = False

    # In the parent

    def prepare(self) -> prefork.ForkReport:
        """Prepare this process; from now on its children end instead of reloading.

        If a policy can request new weights, a thread of this process loads and prepares them, and then all workers are
        replaced.
        """
        self._guards = self._guards or _prefork_options.guards_to_share()
        report = self._options.prepare(self._guards)
        _ticker.TICKER.stop()  # replaced by the thread below, which does not interfere with forks
        for guard in self._guards:
            guard.recycle_in_children(self._policy_due, takes_calls=False)
        self._generations = _prefork_options.generations(self._guards)
        self._shared = SharedState()
        self._weights_version = self._shared.weights_version
        if any(guard.engine.renews_weights for guard in self._guards):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
            )
            threading.Thread(target=self._renew_repeatedly, name="modelguard-renewal", daemon=True).start()
        return report

    def _renew_repeatedly(self) -> None:
        while True:
            time.sleep(_CHECK_INTERVAL)
            try:
                self._renew()
            except Exception:  # noqa: BLE001 - the next attempt may succeed
                logger.exception("modelguard could not share new weights; the workers keep the old ones")

    def _renew(self) -> None:
        for guard in self._guards:
            guard.check()
        with self._forking:  # no worker may be forked from a half-prepared parent
            found = _prefork_options.generations(self._guards)
            if _loads.loading() or found == self._generations or not all(g.ready for g in self._guards):
                return
            self._generations = found  # once for each load, however it ends
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ForkHazard)  # the report has them
                report = self._options.prepare(self._guards)
            self._weights_version += 1
            self._shared.weights_version = self._weights_version
        self.log(report)

    def log(self, report: prefork.ForkReport) -> None:
        """Log what was prepared."""
        _prefork_options.log_report(logger, report, self._options.on_hazard)

    def _before_fork(self) -> None:
        """Wait until no other thread loads a model: locks that it holds would stay locked in the worker."""
        if not threading.current_thread().name.startswith("modelguard-"):  # a loader may fork at any time
            _loads.wait_for_loads(_LOAD_TIMEOUT)
        self._forking.acquire()

    def _after_fork(self) -> None:
        self._forking.release()

    def _after_fork_in_child(self) -> None:
        self._forking = threading.RLock()

    # In a worker

    def begin(self) -> None:
        """Repair and warm up this worker after the fork, and allow the next worker to leave.

        Raises:
            Exception: The error of a guard's warm-up.
        """
        prefork.in_child()
        self._started = self._clock()
        self._shared.worker_started()

    def must_end(self) -> bool:
        """Whether this worker must end now, to be replaced by the server; True only once. Called between requests."""
        outdated = self._shared.weights_version != self._weights_version
        if self._left or not (outdated or self._is_due()):
            return False
        self._left = self._shared.try_leave(self._clock())
        return self._left

    def _is_due(self) -> bool:
        return self._due and self._clock() - self._started >= self._min_lifetime

    def _policy_due(self, reasons: tuple[Reason, ...]) -> None:  # noqa: ARG002 - the event reports them
        self._due = True


class SharedState:
    """State that a parent shares with its workers: the version of the weights, and whether a worker is leaving.

    Made in the parent; all processes forked from it share the same memory.
    """

    _VERSION = struct.Struct("=Q")
    _LEFT_AT = struct.Struct("=d")

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())  # open for as long as this process and its children live
        os.ftruncate(self._file, self._VERSION.size + self._LEFT_AT.size)
        self._bytes = mmap.mmap(self._file, 0)

    @property
    def weights_version(self) -> int:
        """How often the parent has prepared new weights."""
        number: int = self._VERSION.unpack_from(self._bytes)[0]
        return number

    @weights_version.setter
    def weights_version(self, number: int) -> None:
        self._VERSION.pack_into(self._bytes, 0, number)

    def try_leave(self, now: float) -> bool:
        """Whether the calling worker may leave: True for one worker at a time, until its replacement has started."""
        with self._locked():
            (left_at,) = self._LEFT_AT.unpack_from(self._bytes, self._VERSION.size)
            if left_at and now - left_at < _REPLACE_TIMEOUT:
                return False
            self._LEFT_AT.pack_into(self._bytes, self._VERSION.size, now)
            return True

    def worker_started(self) -> None:
        """Allow the next worker to leave."""
        with self._locked():
            self._LEFT_AT.pack_into(self._bytes, self._VERSION.size, 0.0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # imported here, because a program that only sends tasks may run on Windows

        fcntl.lockf(self._file, fcntl.LOCK_EX)  # the kernel releases it if the process dies
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
