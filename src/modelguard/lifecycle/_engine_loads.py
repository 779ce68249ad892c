"""The half of a guard's engine that starts loads, and has calls wait for them."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypeVar

from modelguard import _units
from modelguard.errors import InvalidOption, LoadFailed
from modelguard.lifecycle import _in_thread, _inline, _ticker
from modelguard.lifecycle._checks import Checks
from modelguard.lifecycle._context import GuardContext
from modelguard.lifecycle._load_job import LoadJob
from modelguard.lifecycle._reload import Reload
from modelguard.lifecycle._state import GuardState
from modelguard.lifecycle._waiters import Outcome
from modelguard.lifecycle._waiting import Timeout, wait_for_load, wait_for_load_on_loop
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle._options import GuardOptions
    from modelguard.lifecycle.runtime import Runtime

M = TypeVar("M")

_MEANWHILE = (Reason("requested", "requested during a load"),)


class EngineLoads(Generic[M]):
    """Runs the loads of one guard, one at a time, which all who need the model join.

    Attributes:
        guard: Options, state and runtime.
        name: The guard's name.
        state: The guard's state, to be read.
        checks: Ask the policies, and start what is due.
    """

    def __init__(self, options: GuardOptions[M], runtime: Runtime) -> None:
        self.name = options.name
        self.state: GuardState[M] = GuardState(options.name)
        self.guard = GuardContext(options, self.state, runtime)
        self.checks = Checks(self.guard, self._start)

    @property
    def loading(self) -> bool:
        """Whether a load is under way, or the release of what it replaced."""
        return self.state.job is not None

    def _check_keep(self) -> None:
        """Refuse to load a model in a process where ``keep="mold"`` has no meaning. Before, nobody can know."""
        guard = self.guard
        if guard.options.keeps_mold and guard.options.workers is None and not guard.runtime.in_mold:
            why = f"is for the workers of an isolated function, and guard {self.name!r} loads its model in this process"
            fix = "Put @isolate() above the guard's decorator, or leave keep out to release the model."
            raise InvalidOption("keep", "mold", why=why, fix=fix)

    def _request_reload(self) -> Future[Outcome]:
        self._check_keep()
        if (renew := self.checks.renew) is not None:
            self.state.raise_if_closed()
            renew()
            asked: Future[Outcome] = Future()
            asked.set_result(None)  # whoever waits for more would wait for the end of this process
            return asked
        with self.state.lock:
            request, job = self.state.request((Reason("requested", "requested"),), urgent=True)
            future = self.state.wait_for_request(request)
        self._start(job)
        return future

    def _start(self, job: LoadJob | None) -> bool:
        if job is None:
            return False
        try:
            if self.guard.runtime.ticks:
                _ticker.TICKER.add(self)
            self.guard.runtime.start_thread(lambda: self._run(job), f"modelguard-load-{self.name}")
        except RuntimeError as error:  # the system gives no thread, or the interpreter is shutting down
            if job.unloads:
                return self._start(self.state.finish(job, _MEANWHILE))
            # Reported to those who wait and not raised: this may be the end of a call that succeeded.
            self._reload(job).fail(LoadFailed, str(error), error)
            return False
        return True

    def _run(self, job: LoadJob | None) -> None:
        while job is not None:
            self._reload(job).run()
            self._after_load()
            job = self.state.finish(job, _MEANWHILE)
            if job is not None and self.guard.runtime.ticks:
                with suppress(RuntimeError):  # the interpreter is shutting down
                    _ticker.TICKER.add(self)
        current = self.state.current
        if current is not None and current.uses >= current.alarm:
            # The ends of calls start nothing as long as there is a job, and one may just have seen this job.
            self.checks.ask(sample=False, insist=True)

    def _reload(self, job: LoadJob) -> Reload[M]:
        return Reload(self.guard, self.checks.readings, job)

    def _after_load(self) -> None:
        """Set the policy's alarm, before the job ends: a request in between would start another thread."""
        self.checks.after_load()
        if not self.checks.needed and not self.state.failures:
            _ticker.TICKER.remove(self)  # nothing can become due, and a process that forks should have few threads

    # Waiting

    def _timeout(self, timeout: _units.Duration | None) -> Timeout:
        """A first load may take as long as it takes; a replacement is awaited for up to ``wait_timeout``."""
        return Timeout(self.load_patience if timeout is None else timeout)

    @property
    def load_patience(self) -> float | None:
        """Seconds that a call waits for the load that it joins; None for as long as that takes."""
        return self.guard.options.wait_timeout if self.state.generations else None

    def _wait_until_ready(self, limit: Timeout) -> None:
        if (future := self.join_load()) is not None:
            wait_for_load(self.state, future, limit)

    async def _await_until_ready(self, limit: Timeout) -> None:
        if _inline.active():
            await _inline.aload(self.guard)
            return
        if self.state.current is None:
            self.state.raise_if_closed()
            _in_thread.require_asyncio("waiting for a model in a coroutine")  # before the load begins
        if (future := self.join_load()) is not None:
            await wait_for_load_on_loop(self.state, future, limit)

    def join_load(self) -> Future[Outcome] | None:
        """Join the one load, started here if need be; None if there is a current generation already. Does not block.

        Raises:
            GuardClosed, LoadFailed: None begins.
        """
        if _inline.active():
            _inline.load(self.guard)
            return None
        state = self.state
        with state.lock:
            state.raise_if_closed()
            if state.current is not None:
                return None
            self._check_keep()
            left = state.retry_at - self.guard.runtime.clock()
            if state.job is None and state.failure is not None and left > 0:
                raise state.failure.again(left)
            future = state.wait_for_any()
            if state.failures:
                reason = Reason("retry", "retry")
            else:
                reason = Reason("woken", "next use") if state.unloaded else Reason("first_use", "first use")
            job = state.request_if_idle((reason,), urgent=True)
        self._start(job)
        return future

    # What the ticker asks

    def check(self) -> bool:
        """Ask the policies now, and trim if it is time; true if a reload was started."""
        return self.checks.check()

    def tick(self) -> None:
        """:meth:`check`, as the ticker calls it: does not block."""
        self.checks.tick()

    def check_interval(self) -> float:
        """Seconds until :meth:`check` should be called again; infinity if only the ends of calls matter."""
        return self.checks.interval
