"""One load, from its request to the release of what it replaced. Runs in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import GeneratorType
from typing import TYPE_CHECKING, Generic, TypeVar

from modelguard import _units, telemetry
from modelguard.environment import _openmp
from modelguard.errors import LoadFailed, LoadTimeout, ModelRejected
from modelguard.lifecycle import adapting, loading
from modelguard.lifecycle.core import Core, Ticket
from modelguard.lifecycle.generation import Generation
from modelguard.lifecycle.release import release, see_off
from modelguard.lifecycle.watch import Watch

if TYPE_CHECKING:
    from modelguard.lifecycle.runtime import Runtime
    from modelguard.lifecycle.settings import Settings

M = TypeVar("M")

#: A moment counts as quiet when no call has been running for this long. Calls of one burst follow each other faster.
QUIET = 0.05
_LOOK = 0.01

#: While it loads, a model takes more than afterwards: ja_ginza peaks at 1.17 times its size.
PEAK = 1.25


@dataclass
class _Load(Generic[M]):
    """A model that was made, and what making it was like."""

    generation: Generation[M]
    seconds: float
    stall: float


class Flight(Generic[M]):
    """The work behind one ticket."""

    def __init__(self, core: Core[M], settings: Settings[M], runtime: Runtime, watch: Watch, ticket: Ticket) -> None:
        self._core = core
        self._settings = settings
        self._runtime = runtime
        self._watch = watch
        self._ticket = ticket

    def run(self, afterwards: Callable[[], None]) -> Ticket | None:
        """Do it all, and what is to follow; returns the ticket of a follow-up, if more requests came in meanwhile."""
        installed = False
        self._ticket.threads.add(threading.get_ident())
        try:
            installed = self._replace() if self._ticket.replaces else self._load("first", slot="none")
        except BaseException as error:  # noqa: BLE001 - a fault of ours must not leave callers waiting for ever
            self.fail(LoadFailed, f"{type(error).__name__}: {error}", error)
        afterwards()
        return self._core.finish(self._ticket, failed=not installed)

    def _replace(self) -> bool:
        runtime, core = self._runtime, self._core
        with runtime.slot.held(sleep=runtime.sleep, clock=runtime.clock, cancelled=lambda: core.closed) as slot:
            deferred = self._wait_for_quiet()
            if self._choose_swap() == "load_first":
                return self._load("load_first", slot=slot, deferred=deferred)
            since = runtime.clock()
            old = core.retire_serving()
            if old is not None:
                see_off(core, old, settings=self._settings, runtime=runtime)
            return self._load("drain_first", slot=slot, deferred=deferred, since=since)

    def _load(self, swap: str, *, slot: str, deferred: float = 0.0, since: float | None = None) -> bool:
        """Make a generation and let it serve. One that became stale while it loaded is made once more."""
        for discardable in (True, False):
            if not self._core.begin(self._ticket):
                return False
            files = self._watch.before_load()
            made = self._make(slot=slot, deferred=deferred)
            if made is None:
                return False
            generation = made.generation
            waited = 0.0 if since is None else self._runtime.clock() - since
            serves, old = self._core.install(self._ticket, generation, discardable=discardable)
            if serves:
                self._watch.loaded(generation, files)
                self._tell(made, swap, waited)
                if old is not None:
                    see_off(self._core, old, settings=self._settings, runtime=self._runtime)
                return True
            self._discard(generation, "the guard was closed" if self._core.closed else "a newer request made it stale")
        return False

    def _tell(self, made: _Load[M], swap: str, waited: float) -> None:
        telemetry.emit(
            telemetry.LoadFinished(
                guard=self._core.name,
                generation=made.generation.number,
                reasons=self._ticket.reasons,
                seconds=made.seconds,
                stall_seconds=made.stall,
                model_bytes=made.generation.model_bytes,
                swap=swap,
                waited_seconds=waited,
            )
        )

    # Before the load

    def _wait_for_quiet(self) -> float:
        """Wait for the beginning of a pause among the calls, as long as ``defer`` allows; returns the seconds it took.

        The beginning, because that leaves most of the pause: a load that starts late in one meets the next calls.
        """
        runtime, ticket = self._runtime, self._ticket
        started = since = runtime.clock()
        uses, call_ended = None, ticket.after_call
        while not ticket.urgent and not self._core.closed:
            generation, now = self._core.serving, runtime.clock()
            if generation is None or now - started >= self._settings.defer:
                break
            if generation.leases or generation.uses != uses:
                call_ended = call_ended or uses is not None
                uses, since = generation.uses, now
            elif call_ended and now - since >= QUIET:
                break
            runtime.sleep(_LOOK)
        return runtime.clock() - started

    def _choose_swap(self) -> str:
        size, room = self._core.model_bytes, self._runtime.headroom()
        swap, why = self._settings.swap, "chosen by the guard's author"
        if swap == "auto":
            need = int(PEAK * (size or 0))
            swap = "load_first" if room is None or room >= need else "drain_first"
            free = "an unknown amount" if room is None else _units.format_bytes(room)
            why = f"a second copy needs {_units.format_bytes(need)} while it loads, and {free} is free"
        telemetry.emit(telemetry.SwapChosen(guard=self._core.name, swap=swap, why=why, model_bytes=size, headroom=room))
        return swap

    # The load itself

    def _make(self, *, slot: str, deferred: float) -> _Load[M] | None:
        """Load, validate and warm up within ``load_timeout``; None if that failed, of which all have been told."""
        name, timeout = self._core.name, self._settings.load_timeout
        telemetry.emit(
            telemetry.LoadStarted(
                guard=name,
                generation=self._core.generations + 1,
                reasons=self._ticket.reasons,
                deferred_seconds=deferred,
                slot=slot,
            )
        )
        try:
            return loading.within(
                timeout,
                self._make_now,
                start_thread=self._runtime.start_thread,
                name=f"modelguard-loader-{name}",
                when_late=lambda made: self._discard(made.generation, "it came after load_timeout"),
            )
        except loading.Late:
            self.fail(LoadTimeout, f"the loader was not done after load_timeout={timeout:g} s and was abandoned", None)
        except _Refused as refusal:
            self.fail(ModelRejected, str(refusal), refusal.__cause__)
        except BaseException as error:  # noqa: BLE001 - whatever a loader raises is its failure, not its caller's
            self.fail(LoadFailed, f"{type(error).__name__}: {error}", error)
        return None

    def _make_now(self) -> _Load[M]:
        self._ticket.threads.add(threading.get_ident())
        try:
            return self._load_and_prove()
        finally:
            _openmp.end_openmp_pool()  # this thread may be kept, and wait for minutes
            self._ticket.threads.discard(threading.get_ident())  # the next one may be given the same identity

    def _load_and_prove(self) -> _Load[M]:
        before, started = self._runtime.private(), self._runtime.clock()
        with loading.StallMeter() as meter:
            model: M = loading.finished(self._settings.load())
            if model is None:
                raise _Refused("the loader returned None; let it return the model")
            if isinstance(model, GeneratorType):
                raise _Refused("the loader is a generator function; let it return the model instead of yielding it")
            generation = Generation(
                self._core.generations + 1, model, born=self._runtime.clock(), jitter=self._runtime.random()
            )
            del model  # the generation alone holds it from here on
            try:
                self._prove(generation)
            except BaseException:
                self._discard(generation, "validate or warmup failed")
                raise
            self._runtime.trim()  # what only the loading needed: 30 to 60 MB for ja_ginza
        grown = self._runtime.private() - before
        generation.model_bytes = max(0, grown, adapting.find(generation.model).size(generation.model) or 0)
        generation.born = self._runtime.clock()
        generation.uses = generation.errors = 0
        return _Load(generation, seconds=self._runtime.clock() - started, stall=meter.longest)

    def _prove(self, generation: Generation[M]) -> None:
        """Validate and warm up. Guarded functions that these call run on the new generation."""
        with self._core.on(generation):
            if self._settings.validate is not None:
                self._validate(self._settings.validate, generation)
            if self._settings.warmup is not None:
                loading.finished(self._settings.warmup(generation.model))

    @staticmethod
    def _validate(validate: Callable[[M], object], generation: Generation[M]) -> None:
        try:
            verdict = loading.finished(validate(generation.model))
            refused = verdict is not None and not verdict
        except Exception as error:
            raise _Refused(f"validate raised {type(error).__name__}: {error}") from error
        if refused:
            raise _Refused(f"validate returned {verdict!r}")

    # When it goes wrong

    def fail(self, kind: type[LoadFailed], reason: str, cause: BaseException | None) -> None:
        """End in failure: those who wait are told, and the next attempt waits for its time."""
        core = self._core
        attempt = core.failures + 1
        wait = self._settings.backoff.seconds(attempt, self._runtime.random())
        failure = kind(core.name, reason, attempt=attempt, retry_after=wait)
        failure.__cause__ = cause
        serving = core.serving
        telemetry.emit(
            telemetry.LoadErrored(
                guard=core.name,
                attempt=attempt,
                error=reason,
                retry_after=wait,
                serving=None if serving is None else serving.number,
            )
        )
        core.fail(self._ticket, failure, retry_at=self._runtime.clock() + wait)

    def _discard(self, generation: Generation[M], why: str) -> None:
        release(self._core, generation, unload=self._settings.unload, runtime=self._runtime)
        telemetry.emit(telemetry.LoadDiscarded(guard=self._core.name, why=why))


class _Refused(Exception):
    """The model was loaded and is not good enough."""
