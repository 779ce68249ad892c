"""Models of gunicorn's master that are renewed: a mold loads each generation, and forks the workers.

A mold is a child of the master, which has imported the application and loaded no model. It loads and prepares the
models of all shared guards, and waits for orders. It ends with its generation, and all memory with it, so its objects
may be immortal. A worker is forked twice, so that it becomes the master's child: gunicorn waits for it, looks at its
heartbeat and ends it as it does with workers of its own.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from modelguard.errors import ForkHazard, GuardClosed, told
from modelguard.frameworks._workers import MetricFiles, PreforkOptions, log_report
from modelguard.isolation._channel import Channel, Unreadable, failed_load, pair
from modelguard.isolation._mold_program import loading, unload
from modelguard.isolation._processes import priority
from modelguard.lifecycle._models import Loaded
from modelguard.lifecycle._reload import Unwanted
from modelguard.lifecycle.guard import ModelGuard
from modelguard.runtime import child_processes
from modelguard.runtime.background import TICKER
from modelguard.runtime.child_processes import exit_now, flush_output
from modelguard.runtime.fork_hooks import WeakRegistry
from modelguard.sharing import _immortal, _prefork
from modelguard.telemetry import _hooks

#: Seconds between two looks at the first mold, before the server starts.
_POLL = 0.01
#: Seconds that a mold may take to fork a worker (which warms up later) before it is killed.
_FORK = 30.0
#: Seconds that a mold may take to unload its models.
_UNLOAD = 5
#: Seconds. A mold that has lived this long was no part of a series of deaths.
_SOUND = 60.0

#: A guard whose model a mold asks to be made.
_Asked = list[tuple[ModelGuard[Any], "Future[Any]"]]


def needed(guards: Sequence[ModelGuard[Any]]) -> bool:
    """Whether molds are to load the models: one of them is renewed, and none is compared with the one before it."""
    if not hasattr(os, "pidfd_open") or any(guard.engine.options.validates_both for guard in guards):
        return False
    return any(guard.engine.renews_weights for guard in guards)


class _Mold:
    def __init__(self, pid: int, control: Channel, configuration: object, asked: _Asked) -> None:
        self.pid, self.control, self.configuration, self.asked = pid, control, configuration, asked
        self.pidfd = os.pidfd_open(pid)
        self.born = time.monotonic()
        self.dead = False
        self.figures: list[tuple[str | None, int]] = []  # version and bytes of each guard's model
        self.shares: WeakRegistry[_Share] = WeakRegistry()
        self.workers: set[int] = set()

    def has_news(self) -> bool:
        return self.control.await_message(time.monotonic())

    def close(self) -> None:
        self.control.close()
        os.close(self.pidfd)


class _Share:
    """A model of a mold, as a guard in the master holds it."""

    def __init__(self, mold: _Mold, guard: ModelGuard[Any], size: int) -> None:
        self.mold, self.guard, self.bytes = mold, guard, size


class Molds:
    """The molds of one master. All but the guards' loaders runs in gunicorn's main loop."""

    def __init__(
        self,
        server: Any,
        guards: Sequence[ModelGuard[Any]],
        options: PreforkOptions,
        metric_files: MetricFiles,
        *,
        make_worker: Callable[[], int],
        before_worker: Callable[[], None],
    ) -> None:
        self._server, self._guards, self._options, self._metric_files = server, guards, options, metric_files
        self._make_worker, self._before_worker = make_worker, before_worker
        self._pid = os.getpid()
        self._own = [(guard.engine.options, guard.engine.system) for guard in guards]
        self._lock = threading.RLock()
        self._asked: _Asked = []
        self._handed: dict[ModelGuard[Any], tuple[Any, int]] = {}
        self._seen: dict[ModelGuard[Any], _Mold] = {}
        self._molds: list[_Mold] = []
        self._made: _Mold | None = None
        self._current: _Mold | None = None
        self._deaths, self._not_before = 0, 0.0

    # In the main loop

    def start(self) -> None:
        """Load the models, in the first mold."""
        atexit.register(self._end_all)
        for guard in self._guards:
            if guard.engine.state.current is not None:  # the application has loaded it on import
                guard.unload()
            self._have_molds_made(guard)
        if self._options.freeze:  # else each mold copies what the application has imported
            gc.collect()
            gc.freeze()
        if self._options.immortalize is not False:
            _immortal.immortalize_program()
        first = self._guards[0].engine.join_load()
        while any(_mold_of(guard) is None for guard in self._guards):
            self.step()
            if first is not None and first.done() and (error := first.result()) is not None:
                raise error
            time.sleep(_POLL)
        self.step()

    def _have_molds_made(self, guard: ModelGuard[Any]) -> None:
        context = guard.engine
        context.options = replace(
            context.options,
            load=partial(self._load, guard),
            swap=replace(context.options.swap, mode="load_first", defer=0),
            warmup=None,
            validate=None,
            unload=None,
            loading=replace(context.options.loading, timeout=None),  # the mold has one for each guard
        )
        guard.engine.system = replace(context.system, private=partial(self._bytes, guard))

    @property
    def may_fork(self) -> bool:
        return self._current is not None and not self._current.has_news()

    def step(self) -> list[int]:
        """Go on with what is under way, without a wait; returns the workers that another mold is to replace now."""
        self._hear()
        self._fork_mold()
        changed = self._follow()
        self._end_unused()
        self._revive()
        return list(self._server.WORKERS) if changed else []

    def _fork_mold(self) -> None:
        with self._lock:
            if self._made is not None or not self._asked:
                return
            asked, self._asked = self._asked, []
        ends: tuple[socket.socket, ...] = ()
        try:
            ends = ours, theirs = pair()
            flush_output()
            pid = os.fork()
            if pid == 0:
                self._begin_mold(ours, Channel(theirs))
            self._made = _Mold(pid, Channel(ours), self._server.cfg, asked)
        except OSError as error:
            for end in ends:  # a mold that was forked ends when it has loaded
                end.close()
            _refuse(asked, error)
            return
        theirs.close()
        self._molds.append(self._made)
        self._metric_files.worker_started(self._made.pid)  # a loader may count

    def _hear(self) -> None:
        """Give a mold that has loaded to those who have asked for it, or its error."""
        mold = self._made
        if mold is None or not mold.has_news():
            return
        self._made, asked, mold.asked = None, mold.asked, []  # they refer to its shares from now on
        try:
            what, *details = mold.control.receive()
        except (EOFError, OSError, Unreadable):
            what, details = "failed", [RuntimeError(f"the mold {mold.pid} ended while it loaded"), None]
        if what == "failed":
            _refuse(asked, failed_load(*details))
            return
        report, mold.figures = details
        log_report(self._server.log, report, self._options.on_hazard, self._server.num_workers)
        for guard, wanted in asked:
            wanted.set_result(self._share(mold, guard))

    def _follow(self) -> bool:
        """Fork workers from the mold that a guard has got since the last look, and let the other guards have it too."""
        newest = self._current
        for guard in self._guards:
            mold = _mold_of(guard)
            if mold is not None and mold is not self._seen.get(guard):
                self._seen[guard] = newest = mold
        if newest is None or newest is self._current:
            return False
        self._current = newest
        for guard in self._guards:
            if _mold_of(guard) is not newest and not guard.engine.loading:
                with self._lock:
                    self._handed[guard] = self._share(newest, guard), guard.engine.state.requests + 1
                self._reload(guard)
        return True

    def _reload(self, guard: ModelGuard[Any]) -> None:
        try:
            guard.reload(wait=False)
        except GuardClosed:
            self._handed.pop(guard, None)

    def _end_unused(self) -> None:
        for mold in self._molds[:]:
            mold.workers.intersection_update(self._server.WORKERS)
            if not (mold.shares or mold.workers or mold is self._current or mold is self._made):
                mold.control.hang_up()
                if child_processes.await_end(mold.pidfd, 0):
                    self._molds.remove(mold)
                    mold.close()
                    self._metric_files.worker_ended(mold.pid)

    def _revive(self) -> None:
        """Have a new mold made if the current one has ended, or gunicorn has read its configuration again."""
        mold, now = self._current, time.monotonic()
        if mold is None or self._made is not None or any(guard.engine.loading for guard in self._guards):
            return
        if mold.has_news():
            if not mold.dead:
                mold.dead = True
                self._deaths = 0 if now - mold.born > _SOUND else self._deaths
                text = "modelguard: the mold %s has ended: workers serve on, and their models are loaded in a new one"
                self._server.log.error(text, mold.pid)
            if now < self._not_before:
                return
            self._deaths += 1
            self._not_before = now + self._own[0][0].loading.backoff.seconds(self._deaths, 0.5)
        elif mold.configuration is self._server.cfg:
            return
        mold.configuration = self._server.cfg
        self._reload(self._guards[0])

    def spawn(self) -> int:
        hook = self._server.cfg.pre_fork
        try:
            return self._run_gunicorns(partial(hook, self._server), self._order)
        except (EOFError, OSError, Unreadable) as error:
            self._server.log.warning("modelguard: no worker could be started: %r", error)
            return 0

    def _order(self, worker: Any) -> int:
        mold, listeners = self._current, self._server.LISTENERS
        if mold is None:
            raise OSError("there is no mold")
        fds = [worker.tmp.fileno(), *(listener.fileno() for listener in listeners)]
        kinds = [(type(listener), listener.cfg_addr) for listener in listeners]
        try:
            mold.control.set_timeout(_FORK)
            with child_processes.adopt_orphans():
                mold.control.send((worker.age, kinds, self._metric_files.ended), fds)
                pid, error = mold.control.receive()
        except (EOFError, OSError, Unreadable):
            child_processes.send_kill(mold.pidfd)  # a late answer would be taken for that to the next order
            raise
        if not pid:
            raise OSError(error)
        mold.workers.add(pid)
        return int(pid)

    def _run_gunicorns(self, pre_fork: Callable[[Any], object], fork: Callable[[Any], int]) -> int:
        """Run gunicorn's own code for a new worker, with these in the place of its hook and of ``os.fork``."""
        real: Callable[..., int] = os.fork
        setting = self._server.cfg.settings["pre_fork"]  # not `cfg.set`, which inspects the function
        hook = setting.value

        def put_back() -> None:
            setattr(os, "fork", real)  # noqa: B010 - checkers refuse the assignment
            setting.value = hook

        def pre_fork_instead(_server: Any, worker: Any) -> None:
            def fork_instead() -> int:
                put_back()
                made = partial(fork, worker)
                # gevent collects all children that end, and tells gunicorn only of those that it knows.
                return real(fork=made) if os.waitpid.__module__ == "gevent.os" else made()

            pre_fork(worker)
            setattr(os, "fork", fork_instead)  # noqa: B010

        setting.value = pre_fork_instead
        try:
            return self._make_worker()
        finally:
            put_back()

    def _end_all(self) -> None:
        """At exit: let the molds unload their models, and end the load that nobody needs any more.

        What is left is killed with this process.
        """
        if os.getpid() != self._pid:
            return
        if self._made is not None:
            child_processes.send_kill(self._made.pidfd)  # it would heed nothing before it has loaded
            _refuse(self._made.asked, Unwanted())
        with self._lock:
            _refuse(self._asked, Unwanted())
        until = time.monotonic() + _UNLOAD
        for mold in self._molds:
            mold.control.hang_up()
        for mold in self._molds:
            child_processes.await_end(mold.pidfd, until - time.monotonic())

    # For the guards, in any thread

    def _load(self, guard: ModelGuard[Any]) -> Any:
        """The guard's loader: waits for a mold that begins from now on, or takes the one that it is to have."""
        with self._lock:
            share, request = self._handed.pop(guard, (None, 0))
            if share is not None and request == guard.engine.state.requests:
                return share
            wanted: Future[Any] = Future()
            self._asked.append((guard, wanted))
        return wanted.result()

    def _share(self, mold: _Mold, guard: ModelGuard[Any]) -> Any:
        version, size = mold.figures[self._guards.index(guard)]
        share = _Share(mold, guard, size)
        mold.shares.add(share)
        return share if version is None else Loaded(share, version=version)

    def _bytes(self, guard: ModelGuard[Any]) -> int:
        return sum(share.bytes for mold in self._molds[:] for share in mold.shares if share.guard is guard)

    # In a mold

    def _begin_mold(self, masters: socket.socket, control: Channel) -> NoReturn:
        try:
            masters.close()
            self._become_mold(control)
        except Exception:  # noqa: BLE001 - above this are frames of the master; a worker leaves them by SystemExit
            traceback.print_exc()
            exit_now(1)

    def _become_mold(self, control: Channel) -> NoReturn:
        server, beside_workers = self._server, self._current is not None
        child_processes.end_with_parent(self._pid, signal.SIGKILL)
        for number in server.SIGNALS:  # the master ends it
            signal.signal(number, child_processes.do_nothing)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._lock = threading.RLock()  # a thread of the master may have it
        TICKER.stop()
        for mold in self._molds:  # each would see the end of the master too late, and clients that of its port
            mold.close()
        for held in (*server.LISTENERS, *(worker.tmp for worker in server.WORKERS.values())):
            held.close()
        server.LISTENERS = []
        server.WORKERS.clear()
        self._metric_files.take_over()
        # A status other than 0 would be in gunicorn's log. Of several guards, the LoadFailed says which it was.
        only, name = len(self._guards) == 1, self._guards[0].name
        with (
            loading(control, name, priority(), beside_calls=beside_workers, plain=True, unwrap=only, status=0),
            _hooks.muted(),  # the master reports its own
            warnings.catch_warnings(action="ignore", category=ForkHazard),  # the report has them
        ):
            report = self._prepare()
        with suppress(BrokenPipeError):  # the master has ended meanwhile, and no order will come
            control.send(
                ("ready", report, [(guard.version, guard.status().model_bytes or 0) for guard in self._guards])
            )
        self._serve(control)

    def _prepare(self) -> Any:
        for guard, (options, system) in zip(self._guards, self._own, strict=True):
            if guard.engine.state.current is not None:
                guard.unload()  # its share of the mold before
            guard.engine.options = options
            guard.engine.system = system
        return self._options.prepare(self._guards, renewed_here=False)

    def _serve(self, control: Channel) -> NoReturn:
        while True:
            try:
                age, listeners, self._metric_files.ended = control.receive()
                fds = [control.take_fd() for _ in range(1 + len(listeners))]
            except (EOFError, OSError, Unreadable):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(_UNLOAD)  # a hook that hangs
                with _hooks.muted():
                    unload(self._guards)
                exit_now(0)
            control.send(self._double_fork(control, age, listeners, fds))
            for fd in fds:
                os.close(fd)

    def _double_fork(self, control: Channel, age: int, listeners: Sequence[Any], fds: Sequence[int]) -> tuple[int, str]:
        """Fork a worker by way of a process that ends at once; returns the worker's process id, or 0 and why not."""
        reader, writer = pair()
        flush_output()
        with reader:
            with writer:
                try:
                    with _prefork.forking("twice"):
                        between = os.fork()
                except OSError as error:
                    return 0, str(error)
                if between == 0:
                    self._fork_again(Channel(writer))
                    for end in (reader, writer, control):
                        end.close()
                    self._become_worker(age, listeners, fds)
                os.waitpid(between, 0)
            answers = Channel(reader)
            answers.set_timeout(1.0)  # the answer is there, unless that process was killed
            try:
                answer: tuple[int, str] = answers.receive()
            except (EOFError, OSError):
                return 0, "the process between the mold and the worker was killed"
            return answer

    def _fork_again(self, answers: Channel) -> None:
        """Fork the worker and end; returns in the worker, once it is the master's child."""
        me = os.getpid()
        try:
            TICKER.stop()
            self._before_worker()
            pid = os.fork()
        except BaseException as error:  # noqa: BLE001 - this process ends here
            answers.send((0, told(error)))
            os._exit(0)
        if pid:
            answers.send((pid, ""))
            os._exit(0)
        while os.getppid() == me:
            time.sleep(0.001)

    def _become_worker(self, age: int, listeners: Sequence[Any], fds: Sequence[int]) -> NoReturn:
        server = self._server

        def take_tmp(worker: Any) -> None:
            os.dup2(fds[0], worker.tmp.fileno(), inheritable=False)
            os.close(fds[0])

        server.worker_age = age - 1
        server.LISTENERS = [
            kind(address, server.cfg, server.log, fd=fd) for (kind, address), fd in zip(listeners, fds[1:], strict=True)
        ]
        server.log.reopen_files()  # they may have been moved since the mold was forked
        self._run_gunicorns(take_tmp, lambda _worker: 0)
        sys.exit(0)


def _mold_of(guard: ModelGuard[Any]) -> _Mold | None:
    share = getattr(guard.engine.state.current, "model", None)
    return share.mold if isinstance(share, _Share) else None


def _refuse(asked: _Asked, error: BaseException) -> None:
    for _, wanted in asked:
        wanted.set_exception(error)
