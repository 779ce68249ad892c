"""The workers of a server, seen from both sides: their parent prepares and renews, each of them asks to be replaced.

This is for servers that replace a worker when it ends, and run no code of ours in the parent. Nobody is told anything
over a wire: what a worker has to know of its parent and of the others stands in a few bytes of memory that all share.
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
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard

__all__ = ["Board", "Workers"]

#: The parent asks for new weights so often, in seconds.
_PACE = 1.0

#: Seconds after which a worker that has left is no longer waited for: its replacement has failed, or nobody comes.
_PATIENCE = 60.0


class Workers:
    """All workers in the parent; this worker in a worker.

    Args:
        guards: Whose models to share. Default: those made with ``prefork=True``, or all if none is.
        options: How to prepare.
        min_lifetime: A worker is not replaced before: else a policy that is due at a worker's birth, such as a limit
            that the shared model alone exceeds, would have the server do nothing but fork.
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
        self._least = _units.seconds(min_lifetime, "min_lifetime", zero=True)
        self._clock = clock
        self._generations: tuple[int, ...] = ()
        self._forking = threading.RLock()
        self._born = clock()
        self._asked = False
        self._left = False

    # In the parent

    def prepare(self) -> prefork.ForkReport:
        """Prepare this process; from now on its children ask here instead of reloading.

        If a policy can ask for new weights, a thread of this process loads and prepares them, and then has all workers
        replaced.
        """
        self._guards = self._guards or _prefork_options.guards_to_share()
        report = self._options.prepare(self._guards)
        _ticker.TICKER.stop()  # its place is taken by the thread below, which knows when not to be in the way
        for guard in self._guards:
            guard.recycle_in_children(self._ask, takes_calls=False)
        self._generations = _prefork_options.generations(self._guards)
        self._board = Board()
        self._edition = self._board.edition
        if any(guard.engine.renews_weights for guard in self._guards):
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
            )
            threading.Thread(target=self._renew_for_ever, name="modelguard-renewal", daemon=True).start()
        return report

    def _renew_for_ever(self) -> None:
        while True:
            time.sleep(_PACE)
            try:
                self._renew()
            except Exception:  # noqa: BLE001 - what cannot be renewed now may be the next time
                logger.exception("modelguard could not share new weights; the workers keep the old ones")

    def _renew(self) -> None:
        for guard in self._guards:
            guard.check()
        with self._forking:  # no worker may be forked from something half prepared
            found = _prefork_options.generations(self._guards)
            if (
                _prefork_options.loading(self._guards)
                or found == self._generations
                or not all(g.ready for g in self._guards)
            ):
                return
            self._generations = found  # once for each load, however it ends
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ForkHazard)  # the report has them
                report = self._options.prepare(self._guards)
            self._edition += 1
            self._board.edition = self._edition
        logger.info("modelguard %s", report)

    def _before_fork(self) -> None:
        """Fork, but not while another thread loads: whatever lock it holds would stay locked in the worker."""
        if not threading.current_thread().name.startswith("modelguard-"):  # a loader may fork as it likes
            _prefork_options.wait_for_loads(self._guards)
        self._forking.acquire()

    def _after_fork(self) -> None:
        self._forking.release()

    def _after_fork_in_child(self) -> None:
        self._forking = threading.RLock()

    # In a worker

    def begin(self) -> None:
        """Make this worker whole and warm, and let the next one leave that has to.

        Raises:
            Exception: What a guard's warm-up raised.
        """
        prefork.in_child()
        self._born = self._clock()
        self._board.arrive()

    def leaves(self) -> bool:
        """Whether this worker must end now, for the server to fork another one; true once. Asked between requests."""
        if self._left or not (self._over() or self._board.edition != self._edition):
            return False
        self._left = self._board.leave(self._clock())
        return self._left

    def _over(self) -> bool:
        return self._asked and self._clock() - self._born >= self._least

    def _ask(self, reasons: tuple[Reason, ...]) -> None:  # noqa: ARG002 - the event reports them
        self._asked = True


class Board:
    """What a parent and its workers know of each other: which weights are the latest, and who is leaving.

    Made in the parent; every process forked from it has the same one.
    """

    _EDITION = struct.Struct("=Q")
    _LEFT_AT = struct.Struct("=d")

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())  # open for as long as this process and its children live
        os.ftruncate(self._file, self._EDITION.size + self._LEFT_AT.size)
        self._bytes = mmap.mmap(self._file, 0)

    @property
    def edition(self) -> int:
        """How often the parent has prepared new weights."""
        number: int = self._EDITION.unpack_from(self._bytes)[0]
        return number

    @edition.setter
    def edition(self, number: int) -> None:
        self._EDITION.pack_into(self._bytes, 0, number)

    def leave(self, now: float) -> bool:
        """Take the turn to leave: true for one worker at a time, until its replacement has arrived."""
        with self._locked():
            (left_at,) = self._LEFT_AT.unpack_from(self._bytes, self._EDITION.size)
            if left_at and now - left_at < _PATIENCE:
                return False
            self._LEFT_AT.pack_into(self._bytes, self._EDITION.size, now)
            return True

    def arrive(self) -> None:
        """Give the turn to the next."""
        with self._locked():
            self._LEFT_AT.pack_into(self._bytes, self._EDITION.size, 0.0)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # not everywhere; a program that only sends tasks may run on Windows

        fcntl.lockf(self._file, fcntl.LOCK_EX)  # of the process: one that dies in here leaves no lock behind
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
