"""A mold as its owner sees it: start it, have it fork workers, hear how they end, end it."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from modelguard._weak_registry import WeakRegistry
from modelguard.errors import RemoteError
from modelguard.isolation import _news, _processes
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._crew import Crew
from modelguard.isolation._instructions import Instructions
from modelguard.isolation._launch import Launched, launch
from modelguard.isolation._refork import FormerMold, Promotion
from modelguard.isolation._roster import Roster
from modelguard.isolation._supervisor import Supervisor
from modelguard.isolation._worker_process import Worker
from modelguard.lifecycle._options import GuardOptions
from modelguard.lifecycle.backoff import Backoff
from modelguard.serving.breaker import Breaker
from modelguard.telemetry import logger

__all__ = ["Mold", "MoldOptions", "RemoteTraceback", "molds", "with_remote_traceback"]

#: Seconds that a worker may take from its fork to its first call; the warm-up runs in it.
_START = 60.0

#: Seconds that a mold may take to end, its ``unload`` included, before it is killed.
_END = 5.0

#: Seconds between two looks whether the workers have ended.
_POLL = 0.01

_molds: WeakRegistry[Mold] = WeakRegistry()

#: Goes by the options of a guard that a mold has found.
Follow = Callable[["Mold", GuardOptions[Any], Mapping[Path, Any]], object]


@dataclass(frozen=True, kw_only=True)
class MoldOptions:
    """What a mold is made with. Times are seconds."""

    instructions: Instructions
    workers: int
    max_queue: int
    breaker: Breaker
    backoff: Backoff
    refork_after: int | None
    load_timeout: float | None


class Mold:
    """One mold and its workers.

    Args:
        options: What it is made with.
        generation: Its number.
        supervisor: Watches it.
        on_death: Called, in the supervisor's thread, if it ends without having been asked to, or gives no workers.
        is_paused: Whether its function is paused.
        follow: Called, in the supervisor's thread, with this, with the options of the guard that was found for a stub,
            and with what the guard's source was before the load.

    Attributes:
        options: What it was made with.
        roster: Its workers.
        died: When it ended by itself, on the monotonic clock; None while it lives.
        heir: The worker that has taken its place; None if none has.
        code: The files of its modules, if it was asked for them.
        version: The version of its model, as the loader gave it.
    """

    #: A fork of a mold costs little memory, and saves the time that a new worker needs.
    SPARE = 1

    def __init__(
        self,
        options: MoldOptions,
        *,
        generation: int,
        supervisor: Supervisor,
        on_death: Callable[[Mold], object],
        is_paused: Callable[[], bool],
        follow: Follow,
    ) -> None:
        self.born = time.monotonic()
        self.died: float | None = None
        self.code = options.instructions["code"]
        self.version: str | None = None
        self.options = options
        self._supervisor = supervisor
        self._on_death = on_death
        self._follow: Follow | None = follow
        self._loaded: Future[None] = Future()
        self._launched: Launched | None = None
        self._promotion: Promotion | None = None
        self._former: FormerMold | None = None
        self.heir: Worker | None = None
        self._ending = False
        self._ended = threading.Event()
        self._running: dict[int, Worker] = {}  # until the mold has reported their ends
        crew = Crew(
            options.workers,
            breaker=options.breaker,
            backoff=options.backoff,
            spare=self.SPARE,
            refork_after=options.refork_after,
            is_paused=is_paused,
        )
        name = options.instructions["name"]
        self.roster = Roster(name, crew, self, generation=generation, max_queue=options.max_queue)
        _molds.add(self)

    def load(self) -> None:
        """Start it, and wait until all of its workers take calls.

        Raises:
            Exception: What the loader, the validation, the warm-up or the fork gate raised in it, or how it ended.
            TimeoutError: ``load_timeout`` has passed.
        """
        self._supervisor.call(self._begin)
        try:
            self._loaded.result(self.options.load_timeout)
        except BaseException:
            self.end_at_once()
            raise

    def end(self) -> None:
        """End it and its workers: nicely, and after some seconds by force. Blocks."""
        if not self.belongs_here:
            return
        self._ending = True
        self.roster.close()
        self._supervisor.call(self._ask_to_end)
        if self.pids() and not self._ended.wait(_END):
            self._kill()
            self._ended.wait(_END)
        self.roster.detach()
        self._supervisor.flush(_END)

    @property
    def idle(self) -> bool:
        """Whether its workers have ended until the next call, or start for that call. A dead mold waits for none."""
        return self.died is None and self.roster.presence != "present"

    def end_workers(self) -> int:
        """End its workers until the next call, unless one has something to do. Blocks until they have; how many."""
        numbers = self.roster.end_until_next_call()
        until = time.monotonic() + _END
        while numbers and any(number in self._running for number in numbers) and time.monotonic() < until:
            time.sleep(_POLL)
        return len(numbers or ())

    def end_at_once(self) -> None:
        """Kill it and its workers. For the end of this process."""
        if not self.belongs_here:
            return
        self._ending = True
        self._kill()

    def wait_ended(self, seconds: float) -> None:
        """Wait until it has ended, at most so many seconds."""
        self._ended.wait(max(0.0, seconds))

    def abandon(self) -> None:
        """In a forked child of the owner: close the copies of the descriptors. Takes no lock."""
        if self._launched is not None:
            self._launched.abandon()
        if self._former is not None:
            self._former.control.close()
        for worker in self._running.values():
            worker.channel.close()

    def replay_news(self) -> None:
        """Replay what its processes have reported so far. In the supervisor's thread."""
        if self._launched is not None:
            _news.replay_all(self._launched.news)

    @property
    def belongs_here(self) -> bool:
        """Whether this process has started it, and not the one that forked this process."""
        return self.options.instructions["owner"] == os.getpid()

    @property
    def pid(self) -> int | None:
        """The id of the process that forks workers, None before it was started."""
        if self.heir is not None:
            return self.heir.pid
        return None if self._launched is None else self._launched.process.pid

    def pids(self) -> list[int]:
        """The processes of it and of its workers."""
        workers = [worker.pid for worker in list(self._running.values()) if worker.pid]
        return [] if self._launched is None or self._ended.is_set() else [self._launched.process.pid, *workers]

    # What the roster asks for

    def start_worker(self, number: int) -> None:
        """Have a worker forked."""
        self._supervisor.call(lambda: self._start(number))

    def promote_worker(self, worker: Worker) -> None:
        """Let an idle worker take the place of the mold."""
        on_ready = functools.partial(self._inherit, worker)
        on_refused = functools.partial(self._not_promoted, worker)
        self._promotion = Promotion(worker, self._supervisor, on_ready=on_ready, on_refused=on_refused)
        self._supervisor.call(self._promotion.begin)

    def give_up(self) -> None:
        """Workers of this mold do not come up."""
        how = "its workers end before they can take a call"
        self._supervisor.call(lambda: self._die(how))

    def settle_later(self, seconds: float) -> None:
        """Look again after a backoff."""
        self._supervisor.later(seconds, self.roster.settle)

    # In the supervisor's thread

    def _begin(self) -> None:
        try:
            self._launched = launch(self.options.instructions)
        except Exception as error:  # noqa: BLE001 - it is the load's failure
            self._loaded.set_exception(error)
            return
        control = self._launched.control
        self._supervisor.watch(control.fileno(), lambda: self._hear(control))
        self._supervisor.watch(self._launched.news.fileno(), self._read_news)

    def _ask_to_end(self) -> None:
        if self._launched is not None:
            with suppress(OSError):
                self._launched.control.send(("end", 0))

    def _start(self, number: int) -> None:
        launched = self._launched
        if launched is None or self._ending or self._ended.is_set():
            return
        try:
            ours, theirs = pair()
        except OSError as error:  # no descriptor is left
            self.roster.not_started(number, str(error))
            return
        # A call waits for the first worker, so that one does not stand back.
        awaited = self.roster.presence == "returning" and not any(map(self.roster.is_starting, self._running.values()))
        worker = self._running[number] = Worker(number, Channel(ours))
        self.roster.add(worker)
        self._supervisor.watch(ours.fileno(), lambda: self._hear_first(worker))
        with theirs, suppress(OSError):  # a mold that is gone is noticed by itself
            beside_calls = not awaited and (self._loaded.done() or self.options.instructions["beside_calls"])
            launched.control.send(("fork", number, beside_calls), [theirs.fileno()])
        self._supervisor.later(_START, functools.partial(_check_started, weakref.ref(worker), weakref.ref(self)))

    def _hear_first(self, worker: Worker) -> None:
        """A worker is ready; from now on its channel belongs to its callers. Or it has died."""
        self._supervisor.forget(worker.channel.fileno())
        try:
            worker.channel.receive()
        except (EOFError, OSError):  # the mold reports how it ended
            worker.channel.close()
            return
        self.roster.ready(worker)
        if self.roster.is_complete and not self._loaded.done():
            self._loaded.set_result(None)

    def _inherit(self, worker: Worker, control: Channel) -> None:
        """A worker has taken the place of the mold."""
        if self._launched is None or self._ended.is_set():
            control.close()
            return
        self.heir, self._promotion = worker, None
        self._former = FormerMold(self._launched.control, set(self._running) - {worker.number})
        self._launched = replace(self._launched, control=control)
        self._supervisor.watch(control.fileno(), lambda: self._hear(control))
        self.roster.has_become_mold(worker)

    def _not_promoted(self, worker: Worker, why: str) -> None:
        name = self.options.instructions["name"]
        logger.warning("%s: a worker cannot take the place of its mold, and workers share less: %s", name, why)
        self._promotion = None
        self.roster.cannot_become_mold(worker)

    def _hear(self, control: Channel) -> None:
        try:
            while True:
                self._heed(control, *control.receive())
                if not control.has_unread:
                    return
        except (EOFError, OSError):
            if self._former is None or control is not self._former.control or not self._former.may_close:
                self._gone()
                return
            self._supervisor.forget(control.fileno())
            control.close()

    def _heed(self, control: Channel, what: str, *details: Any) -> None:
        if what == "ready":
            _, self.code, self.version = details
            self.roster.settle()
        elif what == "found":
            self._found(*details)
        elif what == "failed":
            error, text = details
            self._fail(with_remote_traceback(error, text))
        else:
            self._heed_worker(control, what, *details)

    def _found(self, options: GuardOptions[Any], files: Mapping[Path, Any]) -> None:
        follow, self._follow = self._follow, None  # of spawned workers, the first of a load speaks for all
        if follow is not None and not self._loaded.done():
            follow(self, options, files)

    def end_late_load(self) -> None:
        """Its load takes too long."""
        if not self._loaded.done():
            self._fail(TimeoutError("the load did not end within load_timeout"))

    def _heed_worker(self, control: Channel, what: str, number: int, *details: Any) -> None:
        worker = self._running[number]
        if what == "born":
            worker.pid, has_pidfd = details
            if has_pidfd:
                worker.pidfd = control.take_fd()
            return
        del self._running[number]
        self._supervisor.forget(worker.channel.fileno())  # it is closed next, and may be watched still
        if what == "exit":
            self.roster.exited(worker, _processes.describe_exit(*details))
        else:
            self.roster.not_started(number, *details)
        if self._former is not None:
            self._former.worker_ended(number)

    def _read_news(self) -> None:
        assert self._launched is not None  # noqa: S101 - for the checkers
        if not _news.replay_next(self._launched.news):
            self._supervisor.forget(self._launched.news.fileno())

    def _gone(self) -> None:
        """The mold has closed its channel: it has ended, or is ending."""
        assert self._launched is not None  # noqa: S101 - for the checkers
        if self._ended.is_set():  # the other channel has ended too
            return
        process = self._launched.process
        self._supervisor.forget(self._launched.control.fileno())
        with suppress(TimeoutExpired):  # it may be on its way out, with an exit status that tells more
            process.wait(0.5 if self._ending else 0.1)
        _processes.kill_group(process.pid)
        how = f"its mold ended: {_processes.describe_exit(process.wait())}"
        self._ended.set()
        self._launched.control.close()
        if self._promotion is not None:
            self._promotion.cancel()
            self._promotion = None
        if self._former is not None:
            self._supervisor.forget(self._former.control.fileno())
            self._former.control.close()
        self._supervisor.forget(self._launched.news.fileno())
        self._launched.news.close()
        running, self._running = list(self._running.values()), {}
        for worker in running:
            worker.has_exited(how)
        self._supervisor.later(1.0, lambda: _processes.reap_group(process.pid))
        self._die(how)

    def end_late(self, worker: Worker) -> None:
        """End a worker that has not come up in time. If it was not even forked, the mold is what hangs."""
        if not self.roster.is_starting(worker):
            return
        if worker.pid:
            worker.kill()
        else:
            self._die(f"it has not forked a worker within {_START:.0f} s")

    def _die(self, how: str) -> None:
        self.roster.mold_ended(how)
        self._fail(RuntimeError(how))
        if not self._ending and self.died is None:
            self.died = time.monotonic()
            self._on_death(self)
        if not self._ended.is_set():
            self._kill()

    def _fail(self, error: BaseException) -> None:
        if not self._loaded.done():
            self._ending = True
            self._loaded.set_exception(error)

    def _kill(self) -> None:
        launched = self._launched
        if launched is not None and not self._ended.is_set():
            _processes.kill_group(launched.process.pid)


def _check_started(worker: weakref.ref[Worker], mold: weakref.ref[Mold]) -> None:
    one, its_mold = worker(), mold()
    if one is not None and its_mold is not None:
        its_mold.end_late(one)


class RemoteTraceback(Exception):
    """Where an error was raised in a worker. It is the ``__cause__`` of the error that the caller gets."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


def with_remote_traceback(error: BaseException, text: str | None) -> BaseException:
    """Give an error that came from another process the traceback that it had there."""
    if text is not None and (error.__cause__ is None or isinstance(error, RemoteError)):
        error.__cause__ = RemoteTraceback(text)
    return error


def _after_fork_in_child() -> None:
    for mold in _molds:
        mold.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def molds() -> list[Mold]:
    """The molds of this process that have not been dropped. Those of its parent, if it was forked, are not its own."""
    return [mold for mold in _molds if mold.belongs_here]
