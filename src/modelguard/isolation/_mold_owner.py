"""A mold as its owner sees it: start it, have it fork workers, hear how they end, end it; and the guard of molds."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NoReturn

from modelguard import telemetry
from modelguard.errors import GuardClosed, NoPreviousModel, NotSupported, Reloading
from modelguard.facts import _proc
from modelguard.isolation import _channel, _processes, _supervisor, status
from modelguard.isolation._channel import Channel, Unreadable, failed_load, pair
from modelguard.isolation._isolation_options import IsolationOptions
from modelguard.isolation._mold_workers import MoldOrders, Worker, Workers
from modelguard.isolation._supervisor import Files, Instructions, Launched, Origin, launch, supervisor
from modelguard.lifecycle import system
from modelguard.lifecycle._guard_options import GuardOptions
from modelguard.lifecycle._models import Loaded
from modelguard.lifecycle._reload import Unwanted
from modelguard.lifecycle._state import Generation
from modelguard.lifecycle.guard import ModelGuard, hide
from modelguard.lifecycle.policies import subset
from modelguard.lifecycle.status import Postponed
from modelguard.runtime import child_processes, fork_hooks
from modelguard.runtime.background import THREADS
from modelguard.runtime.fork_hooks import WeakRegistry, weakly
from modelguard.runtime.waiting import Steps, Timeout, Wait, promise, start
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

#: Seconds that a worker may take from its fork to its first call; the warm-up runs in it.
_START = 60.0

#: Seconds that a mold may take to end, its ``unload`` included, before it is killed.
_END = 5.0

#: Seconds for which it takes only the CPU time that is left over. On a busy machine that may be none.
_IDLE = 1.0

#: Seconds between two looks whether the workers have ended.
_POLL = 0.01

#: The number of the process that forks workers, among those that were launched; workers have the others.
_FORKER = 0

_molds: WeakRegistry[Mold] = WeakRegistry()


class Mold(MoldOrders):
    """One mold and its workers.

    Its owner hears in the supervisor's thread when it ends without having been asked to, or gives no workers.
    """

    #: A fork of a mold costs little memory, and saves the time that a new worker needs.
    SPARE = 1

    def __init__(self, instructions: Instructions, owner: MoldGuard, *, generation: int) -> None:
        self.born = time.monotonic()
        self.died: float | None = None  # by itself
        self.code = instructions.code  # the files of its modules, if it was asked for them
        self.version: str | None = None
        self.instructions = instructions
        self.owner = owner
        self._supervisor = supervisor()
        self._load_timeout = owner.load_timeout
        self._found = False
        self._loaded: Future[None] = Future()
        self._programs: dict[int, Launched] = {}  # what was launched: the mold, or workers by their numbers
        self._ending = False
        self.ended = threading.Event()  # with all of its processes
        self._running: dict[int, Worker] = {}  # until the mold has reported their ends
        self.workers = Workers(
            instructions.options,
            self,
            generation=generation,
            backoff=owner.source.loading.backoff,
            spare=self.SPARE,
            is_paused=owner.is_paused,
        )
        _molds.add(self)

    def load(self) -> None:
        self._supervisor.call(self._begin)
        try:
            self._loaded.result(self._load_timeout)
        except BaseException:
            self.end_at_once()
            raise

    def end(self) -> None:
        """End it and its workers: nicely, and after some seconds by force. Blocks."""
        if not self.belongs_here:
            return
        # To give back the memory takes a while, which others' calls must not wait for.
        if self.owner.current is not None:
            _processes.schedule(self.pids(), when_idle=True)
        self.begin_to_end()
        if self.pids() and not self.ended.wait(_IDLE):
            _processes.schedule(self.pids(), when_idle=False)
        if self.pids() and not self.ended.wait(_END):
            self._kill()
            self.ended.wait(_END)
        self.workers.detach()
        self._supervisor.flush(_END)

    def end_load(self) -> None:
        """End it if it still loads. Does not block."""
        self._supervisor.call(lambda: self._fail(Unwanted()))

    def begin_to_end(self) -> None:
        self._ending = True
        if not self._loaded.done():
            self._kill()
        self.workers.retire_all()
        self._supervisor.call(self._ask_to_end)

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
        if self.belongs_here:
            self._ending = True
            self._kill()

    def abandon(self) -> None:
        """In a forked child of the owner: close the copies of the descriptors. Takes no lock."""
        for program in self._programs.values():
            program.abandon()
        for worker in self._running.values():
            worker.channel.close()

    def replay_news(self) -> None:
        for program in list(self._programs.values()):
            _channel.replay(program.news)

    @property
    def belongs_here(self) -> bool:
        return self.instructions.owner == os.getpid()

    @property
    def pid(self) -> int | None:
        """The id of the process that forks workers; None if there is none, or none yet."""
        program = self._programs.get(_FORKER)
        return None if program is None else program.process.pid

    def pids(self) -> list[int]:
        programs = [program.process.pid for program in list(self._programs.values())]
        workers = [worker.pid for worker in list(self._running.values()) if worker.pid]
        return list(dict.fromkeys([*programs, *workers]))

    # What its workers ask for

    def start_worker(self, worker: Worker) -> None:
        self._supervisor.call(lambda: self._start(worker))

    def give_up(self) -> None:
        self._supervisor.call(lambda: self._condemn("its workers end before they can take a call"))

    def look_again_later(self, seconds: float) -> None:
        self._supervisor.later(seconds, self.workers.look_again)

    # In the supervisor's thread

    def _begin(self) -> None:
        if self._ending:
            return
        try:
            program = self._programs[_FORKER] = launch(self.instructions)
        except Exception as error:  # noqa: BLE001 - it is the load's failure
            self._loaded.set_exception(error)
            return
        self._listen_to(program, lambda: self._gone(program))
        self._kill_if_ending()

    def _listen_to(self, program: Launched, gone: Callable[[], object]) -> None:
        """Heed what a process says, and call ``gone`` when it has ended, or is ending."""
        self._supervisor.watch(program.control.fileno(), lambda: self._hear(program.control, gone))
        self._supervisor.watch(program.news.fileno(), lambda: self._read_news(program.news))

    def _hear(self, control: Channel, gone: Callable[[], object]) -> None:
        try:
            while True:
                try:
                    self._heed(control, *control.receive())
                except Unreadable as error:  # no descriptor is free for that of a worker, which tells its number itself
                    logger.warning("%s: a report of its mold is lost: %s", self.instructions.options.name, error)
                if not control.has_unread:
                    return
        except (EOFError, OSError):
            gone()

    def _read_news(self, news: socket.socket) -> None:
        if not _channel.replay(news):
            self._supervisor.forget(news.fileno())

    def _collect(self, program: Launched, patience: float) -> str:
        """Wait for a process that has closed its channel, and end its group; returns how it ended."""
        self._supervisor.forget(program.control.fileno())
        with suppress(TimeoutExpired):  # it may be on its way out, with an exit status that tells more
            program.process.wait(patience)
        child_processes.kill_group(program.process.pid)
        how = _processes.describe_exit(program.process.wait())
        self._supervisor.forget(program.news.fileno())
        _channel.replay(program.news)  # what it has reported last
        program.control.close()
        program.news.close()
        return how

    def _ask_to_end(self) -> None:
        if _FORKER in self._programs:
            with suppress(OSError):
                self._programs[_FORKER].control.send(("end", 0))

    def _start(self, worker: Worker) -> None:
        program = self._programs.get(_FORKER)
        if program is None or self._ending:
            return
        try:
            ours, theirs = pair()
        except OSError as error:  # no descriptor is left
            self.workers.lost(worker, str(error))
            return
        # A call waits for the first worker, so that one keeps its priority.
        is_first = not any(map(self.workers.is_starting, self._running.values()))
        awaited = is_first and self.workers.presence == "returning"
        self._add_worker(worker, ours)
        with theirs, suppress(OSError):  # a mold that is gone is noticed by itself
            beside_calls = not awaited and (self._loaded.done() or self.instructions.beside_calls)
            program.control.send(("fork", worker.number, beside_calls), [theirs.fileno()])
        self._supervisor.later(_START, weakly(self.end_slow_start, worker.number))

    def _add_worker(self, worker: Worker, ours: socket.socket) -> None:
        worker.channel = Channel(ours)
        self._running[worker.number] = worker
        self._supervisor.watch(ours.fileno(), lambda: self._hear_first(worker))

    def _hear_first(self, worker: Worker) -> None:
        """A worker is ready; from now on its channel belongs to its callers. Or it has died."""
        self._supervisor.forget(worker.channel.fileno())
        try:
            _, worker.pid, _ = worker.channel.receive()  # the mold tells it too, but later perhaps
        except (EOFError, OSError):  # the mold reports how it ended
            worker.channel.close()
            return
        self.workers.ready(worker)
        if self.workers.is_complete and not self._loaded.done():
            self._loaded.set_result(None)

    def _heed(self, control: Channel, what: str, *details: Any) -> None:
        if what == "ready":
            _, self.code, self.version = details
            self.workers.look_again()
        elif what == "found":
            if not self._found and not self._loaded.done():  # of spawned workers, the first of a load speaks for all
                self._found = True
                self.owner.follow(self, *details)
        elif what != "failed":
            self._heed_worker(control, what, *details)
        elif self._loaded.done():  # a replacement; the others serve on, and after two in a row a new generation is made
            logger.warning("%s: a new worker could not load: %s", self.instructions.options.name, details[1])
        else:
            self._fail(failed_load(*details))

    def end_late_load(self) -> None:
        if not self._loaded.done():
            self._fail(TimeoutError("the load did not end within the timeout of its Loading"))

    def _heed_worker(self, control: Channel, what: str, number: int, *details: Any) -> None:
        worker = self._running[number]
        if what == "born":
            worker.pid, has_pidfd = details
            if has_pidfd:
                worker.pidfd = control.take_fd()
            return
        del self._running[number]
        self._supervisor.forget(worker.channel.fileno())  # it is closed next, and may be watched still
        how = _processes.describe_exit(*details) if what == "exit" else str(*details)
        self.workers.exited(worker, how)

    def _gone(self, program: Launched) -> None:
        how = f"its mold ended: {self._collect(program, 0.5 if self._ending else 0.1)}"
        self._programs.clear()
        running, self._running = list(self._running.values()), {}
        self.ended.set()
        for worker in running:
            if self.workers.is_starting(worker):  # else its channel is its caller's
                self._supervisor.forget(worker.channel.fileno())
                worker.channel.close()
            worker.has_exited(how)
        self._supervisor.later(1.0, lambda: child_processes.reap(-program.process.pid))
        self._die(how)

    def end_slow_start(self, number: int) -> None:
        """End a worker that has not come up in time. If it was not even forked, the mold is what hangs."""
        worker = self._running.get(number)
        if worker is None or not self.workers.is_starting(worker):
            return
        if worker.pid:
            worker.kill()
        else:
            self._condemn(f"it has not forked a worker within {_START:.0f} s")

    def _condemn(self, how: str) -> None:
        """Have another mold made. This one serves meanwhile, if it has a worker that can."""
        if self._loaded.done() and self.workers.is_ready:
            self.owner.replace_failed(self)
        else:
            self._die(how)

    def _die(self, how: str) -> None:
        self.workers.mold_ended(how)
        self._fail(RuntimeError(how))
        if not self._ending and self.died is None:
            self.died = time.monotonic()
            self.owner.replace_failed(self)
        if not self.ended.is_set():
            self._kill()

    def _fail(self, error: BaseException) -> None:
        if not self._loaded.done():
            self._ending = True
            self.workers.retire_all()  # others may still load: their end is no news
            self._loaded.set_exception(error)

    def _kill_if_ending(self) -> None:
        """Another thread has ended it while a process was launched, which it could not know."""
        if self._ending:
            self._kill()

    def _kill(self) -> None:
        for program in list(self._programs.values()):
            child_processes.kill_group(program.process.pid)


def _after_fork_in_child() -> None:
    for mold in _molds:
        mold.abandon()


fork_hooks.at_fork(fork_hooks.Rank.LOCKS, in_child=_after_fork_in_child)


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

    # In the supervisor's thread

    def _begin(self) -> None:
        self.workers.look_again()

    def _ask_to_end(self) -> None:
        """Workers that still load take no calls; the others read the end of their channels."""
        for worker in list(self._running.values()):
            if self.workers.is_starting(worker):
                child_processes.kill_group(worker.pid)
        self._note_end()

    def _start(self, worker: Worker) -> None:
        if self._ending:
            return
        ends: tuple[socket.socket, ...] = ()
        try:
            ends = ours, theirs = pair()
            with theirs:
                program = launch(self.instructions)
                program.control.send(("serve", worker.number), [theirs.fileno()])  # it is read after the load
        except Exception as error:  # noqa: BLE001 - no process is left, or a pool's key cannot be sent to one
            for end in ends:
                end.close()
            if not isinstance(error, OSError):
                self._fail(error)
            self.workers.lost(worker, str(error))
            return
        self._add_worker(worker, ours)
        worker.pid = program.process.pid
        worker.pidfd = child_processes.open_pidfd(worker.pid)  # a child that nobody has waited for, so it is this one
        self._programs[worker.number] = program
        self._listen_to(program, lambda: self._worker_gone(program, worker))
        self._kill_if_ending()
        if self._load_timeout is not None:
            self._supervisor.later(self._load_timeout, weakly(self.end_slow_start, worker.number))

    def _worker_gone(self, program: Launched, worker: Worker) -> None:
        self._supervisor.forget(worker.channel.fileno())
        how = self._collect(program, _LEAVE)
        del self._programs[worker.number], self._running[worker.number]
        self.workers.exited(worker, how)
        self._note_end()

    def _note_end(self) -> None:
        if self._ending and not self._programs:
            self._fail(Unwanted())  # what was to end may have loaded still
            self.ended.set()


# The guard of an isolated function in its owner: its model is a mold.
#
# So everything that :mod:`modelguard.lifecycle` promises of models holds for molds: one load at a time, a replacement
# beside the old one, backoff after failures, draining, ``TTL``, ``Modified`` and ``Changed``, one replacement at a time
# on the host.


#: Seconds. A mold that has lived this long was no part of a series of failures.
_SOUND = 60.0

#: Seconds after the timeout of a load at which the mold itself is ended; the guard reports the timeout before.
_MARGIN = 0.5

#: Seconds that the exit of this process waits for its molds to end, after they were killed.
_EXIT = 1.0

#: Seconds for which a reading of all molds' memory is late enough for what only reports it. It walks the page tables of
#: all their processes, which takes 10 ms of CPU time for 500 MB in each, beside calls.
_FRESH = 1.0

#: Seconds between two looks whether a worker has come up.
_LOOK = 0.002


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
        self.source = source
        self._origin = origin
        self._key = key
        self.code: Files = {}
        self._deaths = 0
        self._ending_workers = threading.Lock()
        self._read: tuple[list[int], float, int] = [], 0.0, 0  # of which processes, when, and their memory
        world = system.System(
            private=self._private,
            private_lately=self._private_lately,
            headroom=self._headroom,
            trim=_nothing_to_trim,
            in_use=lambda: None,
            python_in_use=lambda: None,
            returning=nullcontext,
            ticks=retries,
        )
        self.guard: ModelGuard[Mold] = ModelGuard(self._made_of(source), world)
        state = self.guard.engine.state
        state.on_retire = self._send_on
        state.set_paused(paused=paused)
        self.guard.engine.shown_pause.show(paused=paused)
        self.guard.engine.end_load = self._end_load
        hide(self.guard)

    def _made_of(self, source: GuardOptions[Any]) -> GuardOptions[Mold]:
        return replace(
            source,
            load=self._load,
            reload_on=subset(source.reload_on, renews=True, unloads=True),
            swap=replace(source.swap, mode="auto", defer=0),  # the load is in another process, and stalls no call
            warmup=None,
            validate=None,
            unload=lambda mold: mold.end(),
            prefork=False,
            name=self._options.name,
            workers=self,
        )

    def _send_on(self, generation: Generation[Mold]) -> None:
        """A mold takes no new calls: have those that wait at it go on, else its end would wait for them."""
        workers = generation.model.workers
        if workers.gone or not self.guard.engine.state.closed:  # who waits when the function is closed is served
            workers.send_on()

    @property
    def current(self) -> Mold | None:
        return _model_of(self.guard.engine.state.current)

    def _end_load(self) -> None:
        for mold in self._running():
            mold.end_load()

    def end_at_once(self) -> None:
        self.guard.engine.stop_checks()
        for mold in self._running():
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
            self.guard.engine.system.start_thread(partial(self._end_workers, reasons), name)
        except RuntimeError:  # the system gives no thread; the next look tries again
            self._ending_workers.release()

    def _end_workers(self, reasons: tuple[Reason, ...]) -> None:
        try:
            mold, system = self.current, self.guard.engine.system
            if mold is None:
                return
            started, before = time.monotonic(), system.private()
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
                    bytes_after=system.private(),
                    seconds=time.monotonic() - started,
                )
            )
        finally:
            self._ending_workers.release()

    @property
    def workers_ended(self) -> bool:
        mold = self.current
        return mold is None or mold.workers.presence != "present"

    def until_workers_return(self, limit: Timeout) -> Steps[None]:
        """Start the workers that have ended until the next call, and wait for the first."""
        while (mold := self.current) is not None and mold.idle:
            mold.workers.call_back()
            if limit.left() == 0:
                raise Reloading(self._options.name, waited=limit.waited())
            del mold  # a drained mold is released, and must not be alive then
            yield Wait(promise(), Timeout(_LOOK))

    def set_paused(self, *, paused: bool, reported: bool = True) -> None:
        """Let no policy replace a mold or a worker, or let them again; who has several reports it. Does not block."""
        engine = self.guard.engine
        (engine if reported else engine.state).set_paused(paused=paused)
        for mold in (self.current, self.previous):
            if mold is not None:
                mold.workers.look_again()

    @property
    def postponed(self) -> Postponed | None:
        molds, mold = self.guard.status().postponed, self.current
        reasons = () if mold is None else mold.workers.postponed
        if not reasons:
            return molds
        more = () if molds is None else molds.reasons
        return Postponed(reasons=(*more, *reasons), cause="paused", seconds=None)

    @property
    def previous(self) -> Mold | None:
        return _model_of(self.guard.engine.state.previous)

    def rollback(self) -> None:
        if self.previous is not None and self.previous.died is not None:
            raise NoPreviousModel(self._options.name, why="the processes of the one that was kept have ended")
        self.guard.rollback()

    # What the guard calls

    def _load(self) -> Mold | Loaded[Mold]:
        _end_all_at_exit()
        origin = Origin(_supervisor.preparation(), _channel.levels()) if self._origin is None else self._origin
        instructions = Instructions(
            owner=os.getpid(),
            origin=origin,
            options=self._options,
            key=self._key,
            beside_calls=self.current is not None,
            code=self.code,
            shared=self._origin is not None,
        )
        kind, state = Mold if self._options.start == "fork" else SpawnedWorkers, self.guard.engine.state
        mold = kind(instructions, self, generation=state.generations + 1)
        if state.load_unwanted:
            mold.end_load()
        serving = [] if self.current is None else self.current.workers.pids()
        try:
            with _processes.on_cpus_of_their_own(serving):
                mold.load()
        except BaseException:
            if state.load_unwanted:  # as at the exit of this process, which kills what still loads
                raise Unwanted from None
            raise
        self.code = mold.code
        return mold if mold.version is None else Loaded(mold, version=mold.version)

    @property
    def load_timeout(self) -> float | None:
        """After how many seconds a mold that still loads is ended."""
        limit = self.source.loading.timeout
        return None if limit is None else limit + _MARGIN

    def _headroom(self) -> int | None:
        mold = self.current
        if mold is not None and mold.died is not None:
            return -1  # it takes no calls, so nothing is lost if it goes first
        if self.source.swap.mode == "auto":
            return system.headroom()
        return None if self.source.swap.mode == "load_first" else -1

    def _running(self) -> list[Mold]:
        return [mold for mold in molds() if mold.owner is self]

    def _private(self) -> int:
        pids = self._pids()  # first: a mold may be released meanwhile
        if not pids:  # as at the exit, where no thread starts any more
            return 0
        reading = start(partial(_shares, pids, beside_calls=True), "modelguard-reads", THREADS.start_once)
        held = _shares(pids) if isinstance(reading.exception(), RuntimeError) else reading.result()
        self._read = pids, time.monotonic(), held
        return held

    def _private_lately(self) -> int:
        pids, when, held = self._read
        return held if time.monotonic() < when + _FRESH and pids == self._pids() else self._private()

    def _pids(self) -> list[int]:
        return [pid for mold in self._running() for pid in mold.pids()]

    # In the supervisor's thread

    def follow(self, mold: Mold, source: GuardOptions[Any], files: Mapping[Path, Any]) -> None:
        """Go by the options of the guard that a mold has found where a stub has sent it."""
        self.source = source
        self.guard.engine.follow(self._made_of(source), files)
        if self.load_timeout is not None:
            supervisor().later(self.load_timeout, weakly(mold.end_late_load))

    def replace_failed(self, mold: Mold) -> None:
        """Make another mold in place of one that has died, or gets no workers."""
        lived = time.monotonic() - mold.born
        self._deaths = 1 if lived > _SOUND else self._deaths + 1
        wait = 0.0 if self._deaths == 1 else self.source.loading.backoff.seconds(self._deaths - 1, 0.5)
        supervisor().later(wait, partial(self._replace_failed, weakref.ref(mold)))

    def _replace_failed(self, old: weakref.ref[Mold], *, again: bool = False) -> None:
        mold, engine = self.current, self.guard.engine
        if mold is None or mold is not old():
            return
        due = not engine.loading and (not again or engine.state.retry_at <= engine.system.clock())
        if due:
            with suppress(GuardClosed):
                self.guard.reload(wait=False)
        serves = mold.died is None
        if serves or not due:
            # If that load fails, the guard may not try again: paused, it takes this mold for one that is all right.
            pause = self.source.loading.backoff.seconds(1, 0.5)
            supervisor().later(pause, partial(self._replace_failed, old, again=serves))

    def is_paused(self) -> bool:
        return self.guard.engine.state.paused


def _model_of(generation: Generation[Mold] | None) -> Mold | None:
    return getattr(generation, "model", None)


def _shares(pids: list[int], *, beside_calls: bool = False) -> int:
    """What processes hold. Beside calls in a thread that ends with it, since not everybody may take its priority back.

    No signal handler runs in between there.
    """
    if beside_calls:
        _processes.lower_priority(_processes.priority())
    return sum(map(_share, pids))


def _share(pid: int) -> int:
    try:
        sums: Mapping[str, int] = _proc.memory_sums(pid)
    except (OSError, ValueError):
        return 0
    # Shares of what a mold and its workers have in common add up to the whole, once.
    return sums.get("Pss_Dirty", sums.get("Pss", 0)) + sums.get("SwapPss", 0)


def _nothing_to_trim() -> NoReturn:
    raise NotSupported("trim", reason="a mold's memory comes back when its processes end")


@functools.cache
def _end_all_at_exit() -> None:
    atexit.register(end_all)
    atexit.register(status.refuse_calls)  # which comes first: the last one to be registered


def end_all() -> None:
    """At the exit of this process: let the molds unload their models, at most :data:`_END`, and leave none behind."""
    running = [mold for mold in molds() if mold.pids()]
    for mold in running:
        mold.begin_to_end()
    for seconds in (_END, _EXIT):
        until = time.monotonic() + seconds
        for mold in running:
            mold.ended.wait(max(0.0, until - time.monotonic()))
            mold.end_at_once()
