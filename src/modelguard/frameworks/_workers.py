"""The workers of a server: their parent prepares the models and loads new weights, and each worker ends when it is due.

This is for servers that replace a worker when it ends, and that run no code of ours in the parent. Workers and parent
send no messages: all they need to know about each other is in a few bytes of shared memory.
"""

from __future__ import annotations

import importlib
import mmap
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

from modelguard import _units, prefork
from modelguard.errors import ForkHazard, InvalidOption
from modelguard.isolation import status as _isolated
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.guard import guards as all_guards
from modelguard.lifecycle.pool import pools as all_pools
from modelguard.runtime import background, fork_hooks
from modelguard.runtime.background import start_thread
from modelguard.serving import _batcher
from modelguard.sharing import _prefork
from modelguard.sharing._prefork import OnHazard
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

# Options of ``prefork.prepare`` from environment variables, for servers whose configuration cannot contain them.


T = TypeVar("T")

_YES_OR_NO = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


class PreforkOptions(_prefork.PrepareOptions):
    """The options of :func:`~modelguard.prefork.prepare` by variables, which frameworks/gunicorn.py describes."""

    __slots__ = ()

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PreforkOptions:
        timeout: _units.Duration = (given := environ.get("MODELGUARD_WARM_TIMEOUT", "60"))
        with suppress(ValueError):  # a number without a unit is seconds, as everywhere
            timeout = float(given)
        return cls(
            freeze=_choice(environ, "MODELGUARD_FREEZE", "yes", _YES_OR_NO),
            immortalize=_choice(environ, "MODELGUARD_IMMORTALIZE", "auto", {"auto": "auto", **_YES_OR_NO}),
            on_hazard=_choice(environ, "MODELGUARD_ON_HAZARD", "fix", {one: one for one in get_args(OnHazard)}),
            warm_timeout=_units.seconds(timeout, "MODELGUARD_WARM_TIMEOUT"),
        )


def guards_to_share() -> tuple[ModelGuard[Any], ...]:
    """The guards whose models are shared: those made with ``prefork=True``, or all guards if there is none.

    None for an application that has batched or isolated functions, or pools, alone: their models are not the master's.
    """
    found = sorted(all_guards, key=lambda guard: guard.name)
    found = [guard for guard in found if guard.prefork] or found
    if not found and not (_batcher.batchers or _isolated.functions or all_pools):
        why = "must not be empty: the application made no guard while it was imported"
        raise InvalidOption("guards", (), why=why, fix="Make it at the top of a module: nlp = guard(load_model, ...).")
    return tuple(found)


class SharedModels:
    """The models that a process shares with those it forks, and which of their generations it has prepared."""

    def __init__(self, guards: tuple[ModelGuard[Any], ...], options: PreforkOptions) -> None:
        self.guards = guards
        self.prepared: tuple[int, ...] = ()
        self._options = options

    def prepare(self) -> prefork.ForkReport:
        report = self._options.prepare(self.guards)
        self.prepared = self._generations()
        return report

    def renew(self) -> prefork.ForkReport | None:
        """Prepare what was loaded since, once for each load, however it ends; None if there is nothing yet."""
        found = self._generations()
        if _prefork.loading() or found == self.prepared or not all(guard.ready for guard in self.guards):
            return None
        self.prepared = found
        with warnings.catch_warnings(action="ignore", category=ForkHazard):  # the report has them
            return self._options.prepare(self.guards)

    def _generations(self) -> tuple[int, ...]:
        return tuple(guard.status().generation for guard in self.guards)


def log_report(log: Any, report: prefork.ForkReport, on_hazard: str, workers: int | None = None) -> None:
    """Log what was prepared; a hazard that no child repairs is a warning."""
    for line in report.lines():
        log.info("modelguard: %s", line)
    for hazard in report.hazards:
        repaired = hazard.severity == "fixed" and on_hazard != "warn"
        here = f" Here: up to {workers + 1} copies." if workers and hazard.kind == "copies" else ""
        (log.info if repaired else log.warning)("modelguard: %s%s", hazard, here)


def _choice(environ: Mapping[str, str], name: str, default: str, choices: Mapping[str, T]) -> T:
    text = environ.get(name, default).strip().lower()
    _units.one_of(text, name, choices, what="choice")
    return choices[text]


#: Seconds between the parent's checks for new weights.
_CHECK_INTERVAL = 1.0

#: Seconds that the fork of a worker waits for running loads.
LOAD_TIMEOUT = 60.0

#: Seconds to wait for the replacement of a worker that has left: after that it has failed, or there is none.
_REPLACE_TIMEOUT = 60.0


class Workers:
    """All workers, in the parent; the current worker, in a worker."""

    def __init__(
        self,
        guards: tuple[ModelGuard[Any], ...],
        options: PreforkOptions,
        min_lifetime: _units.Duration,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _prefork.check_guards(guards)
        self._guards = guards
        self._options = options
        self._min_lifetime = _units.seconds(min_lifetime, "min_lifetime", zero=True)
        self._clock = clock
        self._forking = threading.RLock()
        self._started = clock()
        self._due = False
        self._left = False

    # In the parent

    def prepare(self) -> prefork.ForkReport:
        """Prepare this process, whose children end instead of reloading: new weights are loaded here, by a thread."""
        self._guards = self._guards or guards_to_share()
        self._models = SharedModels(self._guards, self._options)
        report = self._models.prepare()
        background.TICKER.stop()  # replaced by the thread below, which does not interfere with forks
        for guard in self._guards:
            guard.recycle_in_children(self._policy_due, takes_calls=False)
        self._shared = SharedState()
        self._weights_version = self._shared.weights_version
        if any(guard.engine.renews_weights for guard in self._guards):
            release = self._forking.release
            fork_hooks.at_fork(fork_hooks.Rank.RENEWAL, before=self._before_fork, in_parent=release, in_child=release)
            start_thread(self._renew_repeatedly, "modelguard-renewal")
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
        with self._forking:  # no worker may be forked from a half-prepared parent, nor before all of its log is written
            report = self._models.renew()
            if report is None:
                return
            self._weights_version += 1
            self._shared.weights_version = self._weights_version
            self.log(report)

    def log(self, report: prefork.ForkReport) -> None:
        log_report(logger, report, self._options.on_hazard)

    def _before_fork(self) -> None:
        """Wait until no other thread loads a model: locks that it holds would stay locked in the worker."""
        if not threading.current_thread().name.startswith("modelguard-"):  # a loader may fork at any time
            _prefork.wait_for_loads(LOAD_TIMEOUT)
        self._forking.acquire()

    # In a worker

    def begin(self) -> None:
        prefork.in_child()
        self._started = self._clock()
        self._shared.worker_started()

    def must_end(self) -> bool:
        """Whether this worker must end now, to be replaced by the server; True only once. Called between requests."""
        now = self._clock()
        due = self._due and now - self._started >= self._min_lifetime
        if self._left or not (due or self._shared.weights_version != self._weights_version):
            return False
        self._left = self._shared.try_leave(now)
        return self._left

    def _policy_due(self, reasons: tuple[Reason, ...]) -> None:  # noqa: ARG002 - the event reports them
        self._due = True


class SharedState:
    """State that a parent shares with its workers: the version of the weights, and whether a worker is leaving.

    Made in the parent; all processes forked from it share the same memory.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())  # to lock, for as long as this process and its children live
        shared = memoryview(mmap.mmap(-1, 16))
        self._version, self._left_at = shared[:8].cast("Q"), shared[8:].cast("d")

    @property
    def weights_version(self) -> int:
        return self._version[0]

    @weights_version.setter
    def weights_version(self, number: int) -> None:
        self._version[0] = number

    def try_leave(self, now: float) -> bool:
        """Whether the calling worker may leave: True for one worker at a time, until its replacement has started."""
        import fcntl  # imported here, because a program that only sends tasks may run on Windows

        fcntl.lockf(self._file, fcntl.LOCK_EX)  # the kernel releases it if the process dies
        try:
            if self._left_at[0] and now - self._left_at[0] < _REPLACE_TIMEOUT:
                return False
            self._left_at[0] = now
            return True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def worker_started(self) -> None:
        self._left_at[0] = 0.0  # one step, as if before or after that of a worker that leaves


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
    """Which files are free to be taken over. Lives in the process that forks; a forked worker uses its copy once."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = environment.get(_FOLDER)
        self.ended: list[int] = []  # none without a folder

    def worker_ended(self, pid: int) -> None:
        """In the parent: a worker or mold has ended. Its live gauges are removed, its counts go to a worker to come."""
        if self._folder is None or "prometheus_client" not in sys.modules:
            return
        importlib.import_module("prometheus_client.multiprocess").mark_process_dead(pid, self._folder)
        still_there = [each for each in self.ended if each != pid and any(map(Path.exists, self._files(each)))]
        self.ended = [*still_there, pid]

    def worker_started(self, pid: int) -> None:
        """In the parent: a process id is used again, and its files with it."""
        self.ended = [each for each in self.ended if each != pid]

    def take_over(self) -> None:
        """In a new worker, before its first metric: go on with the files of a worker that has ended.

        Another new worker may take the same one: only one of them can rename a file.
        """
        own = self._files(os.getpid())
        for pid in self.ended:
            if any(map(Path.exists, own)):  # taken, or it counts already, or one that ended had the same process id
                return
            for theirs, mine in zip(self._files(pid), own, strict=True):
                with suppress(OSError):  # there is none, or another worker was faster
                    theirs.rename(mine)

    def _files(self, pid: int) -> list[Path]:
        return [Path(self._folder or "") / f"{kind}_{pid}.db" for kind in _SUMMED]
