"""Workers that each load for themselves, where no fork is possible. They take the place of a mold."""

from __future__ import annotations

import os
from contextlib import suppress
from subprocess import TimeoutExpired
from typing import Any

from modelguard.isolation import _news, _processes
from modelguard.isolation._channel import Channel, pair
from modelguard.isolation._launch import Launched, launch
from modelguard.isolation._molds import Mold, with_remote_traceback
from modelguard.isolation._worker_process import Worker
from modelguard.telemetry import logger

__all__ = ["SpawnedWorkers"]

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
            _news.replay_all(launched.news)

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
        self.roster.settle()

    def _ask_to_end(self) -> None:
        """Workers that still load take no calls; the others read the end of their channels."""
        for launched, worker in list(self._launched_workers.values()):
            if self.roster.is_starting(worker):
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
            self.roster.not_started(number, str(error))
            return
        worker = Worker(number, Channel(ours))
        worker.pid = launched.process.pid
        with suppress(OSError, AttributeError):
            worker.pidfd = os.pidfd_open(worker.pid)  # a child that nobody has waited for, so it is this one
        self._launched_workers[number] = launched, worker
        self.roster.add(worker)
        self._supervisor.watch(launched.control.fileno(), lambda: self._hear_worker(number))
        self._supervisor.watch(launched.news.fileno(), lambda: self._read_worker(launched))
        self._supervisor.watch(ours.fileno(), lambda: self._hear_first(worker))
        limit = self.options.load_timeout
        if limit is not None:
            self._supervisor.later(limit, lambda: self._end_late(worker))

    def _end_late(self, worker: Worker) -> None:
        if self.roster.is_starting(worker):
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
        if not _news.replay_next(launched.news):
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
        self.roster.exited(worker, how)
        self._note_end()

    def _note_end(self) -> None:
        if self._ending and not self._launched_workers:
            self._ended.set()

    def _kill(self) -> None:
        for launched, _ in list(self._launched_workers.values()):
            _processes.kill_group(launched.process.pid)
