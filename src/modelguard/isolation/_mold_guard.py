"""The guard of an isolated function in its owner: its model is a mold.

So everything that :mod:`modelguard.lifecycle` promises of models holds for molds: one load at a time, a replacement
beside the old one, backoff after failures, draining, ``TTL``, ``Modified`` and ``Changed``, one replacement at a time
on the host.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from modelguard import telemetry
from modelguard.errors import GuardClosed, ModelRejected, NoPreviousModel, NotSupported, Reloading
from modelguard.facts import _proc
from modelguard.isolation import _supervisor, status
from modelguard.isolation._molds import Mold, MoldOptions, SpawnedWorkers, molds
from modelguard.isolation._supervisor import Files, Origin, supervisor
from modelguard.lifecycle import runtime
from modelguard.lifecycle._guard_options import GuardOptions, Loaded
from modelguard.lifecycle._reload import Rejected
from modelguard.lifecycle.guard import ModelGuard, hide
from modelguard.lifecycle.policies import subset
from modelguard.lifecycle.status import Postponed
from modelguard.runtime.waiting import Timeout
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.isolation._isolation_options import IsolationOptions

__all__ = ["MoldGuard", "end_all"]

#: Seconds. A mold that has lived this long was no part of a series of failures.
_SOUND = 60.0

#: Seconds after ``load_timeout`` at which the mold itself is ended; the guard reports the timeout before.
_MARGIN = 0.5

#: Seconds that the exit of this process waits for its molds to end, after they were killed.
_EXIT = 1.0

#: Seconds between two looks whether a worker has come up.
_POLL = 0.002

_exit_registered = False


class MoldGuard:
    def __init__(
        self,
        options: IsolationOptions,
        source: GuardOptions[Any],
        origin: Origin | None = None,
        *,
        key: Any = None,
        retries: bool = True,
        paused: bool = False,
    ) -> None:
        self._options = options
        self._source = source
        self._origin = origin
        self._key = key
        self.code: Files | None = None
        self._deaths = 0
        self._ending_workers = threading.Lock()
        self._current: Mold | None = None
        world = runtime.Runtime(
            private=lambda: sum(map(_share, self._pids())),
            headroom=self._headroom,
            trim=_nothing_to_trim,
            in_use=lambda: None,
            python_in_use=lambda: None,
            returning=nullcontext,
            ticks=retries,
        )
        self.guard: ModelGuard[Mold] = ModelGuard(self._made_of(source), world)
        self.guard.engine.state.set_paused(paused=paused)
        self.guard.engine.guard.shown_pause.show(paused=paused)
        hide(self.guard)

    def _made_of(self, source: GuardOptions[Any]) -> GuardOptions[Mold]:
        return replace(
            source,
            load=self._load,
            reload_on=subset(source.reload_on, renews=True, unloads=True),
            swap=replace(source.swap, mode="auto", defer=0),  # the load is in another process, and stalls no call
            warmup=None,
            validate=None,
            unload=self._end,
            prefork=False,
            name=self._options.name,
            workers=_Workers(self),
        )

    @property
    def current(self) -> Mold | None:
        generation = self.guard.engine.state.current
        mold: Mold | None = getattr(generation, "model", None)
        return mold

    def end_at_once(self) -> None:
        for mold in (self._current, self.previous):
            if mold is not None:
                mold.end_at_once()

    def abandon(self) -> None:
        """In a forked child: ask no policy. The parent's molds are closed by a hook of their own."""
        self.guard.engine.stop_checks()

    def end_workers(self, reasons: tuple[Reason, ...]) -> None:
        """End the workers until the next call, unless one has a call. Does not block."""
        if not self._ending_workers.acquire(blocking=False):
            return
        try:
            name = f"modelguard-idle-{self._options.name}"
            self.guard.engine.guard.runtime.start_thread(partial(self._end_workers, reasons), name)
        except RuntimeError:  # the system gives no thread; the next look tries again
            self._ending_workers.release()

    def _end_workers(self, reasons: tuple[Reason, ...]) -> None:
        try:
            mold, runtime = self.current, self.guard.engine.guard.runtime
            if mold is None:
                return
            started, before = time.monotonic(), runtime.private()
            number = self.guard.engine.state.generations
            ended = mold.end_workers()
            if not ended and mold.workers.presence == "present":  # a call has come
                return
            if self.previous is not None:
                ended += self.previous.end_workers()
            telemetry.emit(
                telemetry.WorkersReleased(
                    guard=self._options.name,
                    generation=number,
                    reasons=reasons,
                    workers=ended,
                    bytes_before=before,
                    bytes_after=runtime.private(),
                    seconds=time.monotonic() - started,
                )
            )
        finally:
            self._ending_workers.release()

    def call_back_workers(self, limit: Timeout) -> None:
        """Start the workers that have ended until the next call, and wait for the first. Blocks."""
        while (mold := self.current) is not None and mold.idle:
            mold.workers.call_back()
            if limit.left() == 0:
                raise Reloading(self._options.name, waited=limit.waited())
            del mold  # a drained mold is released, and must not be alive then
            time.sleep(_POLL)

    def set_paused(self, *, paused: bool) -> None:
        """Let no policy replace a mold or a worker, or let them again. Does not block."""
        self.guard.engine.set_paused(paused=paused)
        for mold in (self.current, self.previous):
            if mold is not None:
                mold.workers.settle()

    def follow_pause(self, *, paused: bool) -> None:
        """:meth:`set_paused` where the owner of several reports it. Does not block."""
        self.guard.engine.state.set_paused(paused=paused)
        if self.current is not None:
            self.current.workers.settle()

    @property
    def postponed(self) -> Postponed | None:
        """What policies ask for and must wait: a new mold, or new workers."""
        molds, mold = self.guard.status().postponed, self.current
        reasons = () if mold is None else mold.workers.postponed
        if not reasons:
            return molds
        more = () if molds is None else molds.reasons
        return Postponed(reasons=(*more, *reasons), cause="paused", seconds=None)

    @property
    def previous(self) -> Mold | None:
        mold: Mold | None = getattr(self.guard.engine.state.previous, "model", None)
        return mold

    def rollback(self) -> None:
        if self.previous is not None and self.previous.died is not None:
            fix = "Call reload() to load a model."
            raise NoPreviousModel(self._options.name, why="the processes of the one that was kept have ended", fix=fix)
        self.guard.rollback()
        self._current = self.current

    # What the guard calls

    def _load(self) -> Mold | Loaded[Mold]:
        global _exit_registered
        if not _exit_registered:
            atexit.register(end_all)
            atexit.register(status.refuse_calls)  # which comes first: the last one to be registered
            _exit_registered = True
        limit = self._source.load_timeout
        origin = Origin(_supervisor.preparation(), _supervisor.levels()) if self._origin is None else self._origin
        options = MoldOptions(
            instructions={
                "owner": os.getpid(),
                "preparation": origin.preparation,
                "function": self._options.function,
                "stub": self._options.stub,
                "key": self._key,
                "levels": origin.levels,
                "name": self._options.name,
                "max_bytes": self._options.max_transfer,
                "beside_calls": self.current is not None,
                "forks": self._options.start == "fork",
                "code": self.code,
                "shared": self._origin is not None,
            },
            workers=self._options.workers,
            max_queue=self._options.max_queue,
            breaker=self._options.breaker,
            backoff=self._source.backoff,
            load_timeout=None if limit is None else limit + _MARGIN,
        )
        number = self.guard.engine.state.generations + 1
        kind = Mold if self._options.start == "fork" else SpawnedWorkers
        mold = kind(
            options,
            generation=number,
            supervisor=supervisor(),
            on_death=self._died,
            is_paused=self._is_paused,
            follow=self._follow,
        )
        try:
            mold.load()
        except ModelRejected as error:
            raise Rejected(error.reason) from error.__cause__
        self._current = mold
        self.code = mold.code
        return mold if mold.version is None else Loaded(mold, version=mold.version)

    def _end(self, mold: Mold) -> None:
        if self._current is mold:
            self._current = None
        mold.end()

    def _headroom(self) -> int | None:
        mold = self.current
        if mold is not None and mold.died is not None:
            return -1  # it takes no calls, so nothing is lost if it goes first
        if self._source.swap.mode == "auto":
            return runtime.headroom()
        return None if self._source.swap.mode == "load_first" else -1

    def _pids(self) -> list[int]:
        return [
            pid for mold in molds() if mold.options.instructions["name"] == self._options.name for pid in mold.pids()
        ]

    # In the supervisor's thread

    def _follow(self, mold: Mold, source: GuardOptions[Any], files: Mapping[Path, Any]) -> None:
        """Go by the options of the guard that a mold has found where a stub has sent it."""
        self._source = source
        self.guard.engine.follow(self._made_of(source), files)
        if source.load_timeout is not None:
            loading = weakref.ref(mold)
            supervisor().later(source.load_timeout + _MARGIN, lambda: _end_late_load(loading))

    def _died(self, mold: Mold) -> None:
        lived = time.monotonic() - mold.born
        self._deaths = 1 if lived > _SOUND else self._deaths + 1
        wait = 0.0 if self._deaths == 1 else self._source.backoff.seconds(self._deaths - 1, 0.5)
        dead = weakref.ref(mold)
        supervisor().later(wait, lambda: self._replace(dead))

    def _replace(self, dead: weakref.ref[Mold]) -> None:
        mold, engine = self.current, self.guard.engine
        if mold is None or mold is not dead():
            return
        if engine.loading:
            # If that load fails, and the guard is paused, it does not try again: it takes the dead mold for one that
            # serves.
            supervisor().later(self._source.backoff.seconds(1, 0.5), lambda: self._replace(dead))
            return
        with suppress(GuardClosed):
            self.guard.reload(wait=False)

    def _is_paused(self) -> bool:
        return self.guard.engine.state.paused


class _Workers:
    """The workers of the current mold, as ``Idle`` ends them."""

    def __init__(self, molds: MoldGuard) -> None:
        self._molds = weakref.ref(molds)

    @property
    def ended(self) -> bool:
        molds = self._molds()
        mold = None if molds is None else molds.current
        return mold is None or mold.workers.presence != "present"

    def end(self, reasons: tuple[Reason, ...]) -> None:
        molds = self._molds()
        if molds is not None:
            molds.end_workers(reasons)


def _end_late_load(loading: weakref.ref[Mold]) -> None:
    mold = loading()
    if mold is not None:
        mold.end_late_load()


def _share(pid: int) -> int:
    try:
        sums: Mapping[str, int] = _proc.memory_sums(pid)
    except (OSError, ValueError):
        return 0
    # Shares of what a mold and its workers have in common add up to the whole, once.
    return sums.get("Pss_Dirty", sums.get("Pss", 0)) + sums.get("SwapPss", 0)


def _nothing_to_trim() -> NoReturn:
    raise NotSupported("trim", reason="a mold's memory comes back when its processes end")


def end_all() -> None:
    """At the exit of this process: leave no process behind."""
    running = [mold for mold in molds() if mold.pids()]
    for mold in running:
        mold.end_at_once()
    until = time.monotonic() + _EXIT
    for mold in running:
        mold.wait_ended(until - time.monotonic())
