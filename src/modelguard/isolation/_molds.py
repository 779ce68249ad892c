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
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from modelguard.isolation import _processes, _supervisor
from modelguard.isolation._channel import Channel, pair, with_remote_traceback
from modelguard.isolation._mold_workers import MoldOrders, Worker, WorkerPlan, Workers
from modelguard.isolation._supervisor import Instructions, Launched, Supervisor, launch
from modelguard.lifecycle._guard_options import GuardOptions
from modelguard.lifecycle.policies import Backoff
from modelguard.runtime import fork
from modelguard.runtime.fork import WeakRegistry
from modelguard.serving.breaker import Breaker
from modelguard.telemetry import logger

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
    load_timeout: float | None


class Mold(MoldOrders):
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
        workers: Its workers.
        died: When it ended by itself, on the monotonic clock; None while it lives.
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
        self._ending = False
        self._ended = threading.Event()
        self._running: dict[int, Worker] = {}  # until the mold has reported their ends
        plan = WorkerPlan(
            options.workers,
            breaker=options.breaker,
            backoff=options.backoff,
            spare=self.SPARE,
            is_paused=is_paused,
        )
        name = options.instructions["name"]
        self.workers = Workers(name, plan, self, generation=generation, max_queue=options.max_queue)
        _molds.add(self)

    def load(self) -> None:
        """Start it, and wait until all of its workers take calls."""
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
        self.workers.close()
        self._supervisor.call(self._ask_to_end)
        if self.pids() and not self._ended.wait(_END):
            self._kill()
            self._ended.wait(_END)
        self.workers.detach()
        self._supervisor.flush(_END)

    @property
    def idle(self) -> bool:
        """Whether its workers have ended until the next call, or start for that call. A dead mold waits for none."""
        return self.died is None and self.workers.presence != "present"

    def end_workers(self) -> int:
        """End its workers until the next call, unless one has something to do. Blocks until they have; how many."""
        numbers = self.workers.end_until_next_call()
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
        self._ended.wait(max(0.0, seconds))

    def abandon(self) -> None:
        """In a forked child of the owner: close the copies of the descriptors. Takes no lock."""
        if self._launched is not None:
            self._launched.abandon()
        for worker in self._running.values():
            worker.channel.close()

    def replay_news(self) -> None:
        """Replay what its processes have reported so far. In the supervisor's thread."""
        if self._launched is not None:
            _supervisor.replay_all(self._launched.news)

    @property
    def belongs_here(self) -> bool:
        """Whether this process has started it, and not the one that forked this process."""
        return self.options.instructions["owner"] == os.getpid()

    @property
    def pid(self) -> int | None:
        """The id of the process that forks workers, None before it was started."""
        return None if self._launched is None else self._launched.process.pid

    def pids(self) -> list[int]:
        workers = [worker.pid for worker in list(self._running.values()) if worker.pid]
        return [] if self._launched is None or self._ended.is_set() else [self._launched.process.pid, *workers]

    # What its workers ask for

    def start_worker(self, number: int) -> None:
        self._supervisor.call(lambda: self._start(number))

    def give_up(self) -> None:
        """Workers of this mold do not come up."""
        how = "its workers end before they can take a call"
        self._supervisor.call(lambda: self._die(how))

    def settle_later(self, seconds: float) -> None:
        self._supervisor.later(seconds, self.workers.settle)

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
            self.workers.not_started(number, str(error))
            return
        # A call waits for the first worker, so that one does not stand back.
        awaited = self.workers.presence == "returning" and not any(
            map(self.workers.is_starting, self._running.values())
        )
        worker = self._running[number] = Worker(number, Channel(ours))
        self.workers.add(worker)
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
        self.workers.ready(worker)
        if self.workers.is_complete and not self._loaded.done():
            self._loaded.set_result(None)

    def _hear(self, control: Channel) -> None:
        try:
            while True:
                self._heed(control, *control.receive())
                if not control.has_unread:
                    return
        except (EOFError, OSError):
            self._gone()

    def _heed(self, control: Channel, what: str, *details: Any) -> None:
        if what == "ready":
            _, self.code, self.version = details
            self.workers.settle()
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
            self.workers.exited(worker, _processes.describe_exit(*details))
        else:
            self.workers.not_started(number, *details)

    def _read_news(self) -> None:
        assert self._launched is not None  # noqa: S101 - for the checkers
        if not _supervisor.replay_next(self._launched.news):
            self._supervisor.forget(self._launched.news.fileno())

    def _gone(self) -> None:
        """The mold has closed its channel: it has ended, or is ending."""
        assert self._launched is not None  # noqa: S101 - for the checkers
        process = self._launched.process
        self._supervisor.forget(self._launched.control.fileno())
        with suppress(TimeoutExpired):  # it may be on its way out, with an exit status that tells more
            process.wait(0.5 if self._ending else 0.1)
        _processes.kill_group(process.pid)
        how = f"its mold ended: {_processes.describe_exit(process.wait())}"
        self._ended.set()
        self._launched.control.close()
        self._supervisor.forget(self._launched.news.fileno())
        self._launched.news.close()
        running, self._running = list(self._running.values()), {}
        for worker in running:
            worker.has_exited(how)
        self._supervisor.later(1.0, lambda: _processes.reap_group(process.pid))
        self._die(how)

    def end_late(self, worker: Worker) -> None:
        """End a worker that has not come up in time. If it was not even forked, the mold is what hangs."""
        if not self.workers.is_starting(worker):
            return
        if worker.pid:
            worker.kill()
        else:
            self._die(f"it has not forked a worker within {_START:.0f} s")

    def _die(self, how: str) -> None:
        self.workers.mold_ended(how)
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


def _after_fork_in_child() -> None:
    for mold in _molds:
        mold.abandon()


fork.at_fork(fork.Rank.LOCKS, in_child=_after_fork_in_child)


def molds() -> list[Mold]:
    """The molds of this process that have not been dropped. Those of its parent, if it was forked, are not its own."""
    return [mold for mold in _molds if mold.belongs_here]


# Workers that each load for themselves, where no fork is possible. They take the place of a mold.


#: Seconds for a worker that has closed its channel to end by itself.
_LEAVE = 0.5


class SpawnedWorkers(Mold):
    """A generation of workers without a mold: fresh interpreters, which share no memory.

    For its owner it is a mold whose workers take as long to start as the model takes to load.
    """

    SPARE = 0  # it would hold a whole model

    @property
    def pid(self) -> int | None:
        """None: there is no mold."""
        return None

    def pids(self) -> list[int]:
        """The processes of the workers, those that load included."""
        return [launched.process.pid for launched, _ in list(self._launched_workers.values())]

    def replay_news(self) -> None:
        """Replay what the workers have reported so far. In the supervisor's thread."""
        for launched, _ in list(self._launched_workers.values()):
            _supervisor.replay_all(launched.news)

    def abandon(self) -> None:
        """In a forked child of the owner: close the copies of the descriptors. Takes no lock."""
        for launched, worker in self._launched_workers.values():
            launched.abandon()
            worker.channel.close()

    def __init__(self, *args: Any, **options: Any) -> None:
        self._launched_workers: dict[int, tuple[Launched, Worker]] = {}
        super().__init__(*args, **options)

    # In the supervisor's thread

    def _begin(self) -> None:
        self.workers.settle()

    def _ask_to_end(self) -> None:
        """Workers that still load take no calls; the others read the end of their channels."""
        for launched, worker in list(self._launched_workers.values()):
            if self.workers.is_starting(worker):
                _processes.kill_group(launched.process.pid)
        self._note_end()

    def _start(self, number: int) -> None:
        if self._ending:
            return
        try:
            ours, theirs = pair()
            with theirs:
                launched = launch({**self.options.instructions, "forks": False})
                launched.control.send(("serve", number), [theirs.fileno()])  # it is read after the load
        except OSError as error:
            self.workers.not_started(number, str(error))
            return
        worker = Worker(number, Channel(ours))
        worker.pid = launched.process.pid
        with suppress(OSError, AttributeError):
            worker.pidfd = os.pidfd_open(worker.pid)  # a child that nobody has waited for, so it is this one
        self._launched_workers[number] = launched, worker
        self.workers.add(worker)
        self._supervisor.watch(launched.control.fileno(), lambda: self._hear_worker(number))
        self._supervisor.watch(launched.news.fileno(), lambda: self._read_worker(launched))
        self._supervisor.watch(ours.fileno(), lambda: self._hear_first(worker))
        limit = self.options.load_timeout
        if limit is not None:
            self._supervisor.later(limit, lambda: self._end_late(worker))

    def _end_late(self, worker: Worker) -> None:
        if self.workers.is_starting(worker):
            worker.kill()

    def _hear_worker(self, number: int) -> None:
        launched, worker = self._launched_workers[number]
        try:
            while True:
                what, *details = launched.control.receive()
                if what == "failed":
                    self._not_loaded(*details)
                elif what == "found":
                    self._found(*details)
                elif what == "ready":
                    _, self.code, self.version = details
                if not launched.control.has_unread:
                    return
        except (EOFError, OSError):
            self._worker_gone(number, launched, worker)

    def _not_loaded(self, error: BaseException, text: str) -> None:
        if self._loaded.done():  # a replacement; the others serve on, and after two in a row a new generation is made
            logger.warning("%s: a new worker could not load: %s", self.options.instructions["name"], text)
        else:
            self._fail(with_remote_traceback(error, text))

    def _read_worker(self, launched: Launched) -> None:
        if not _supervisor.replay_next(launched.news):
            self._supervisor.forget(launched.news.fileno())

    def _worker_gone(self, number: int, launched: Launched, worker: Worker) -> None:
        self._supervisor.forget(launched.control.fileno())
        self._supervisor.forget(launched.news.fileno())
        self._supervisor.forget(worker.channel.fileno())
        with suppress(TimeoutExpired):
            launched.process.wait(_LEAVE)
        _processes.kill_group(launched.process.pid)
        how = _processes.describe_exit(launched.process.wait())
        launched.control.close()
        launched.news.close()
        del self._launched_workers[number]
        self.workers.exited(worker, how)
        self._note_end()

    def _note_end(self) -> None:
        if self._ending and not self._launched_workers:
            self._ended.set()

    def _kill(self) -> None:
        for launched, _ in list(self._launched_workers.values()):
            _processes.kill_group(launched.process.pid)
