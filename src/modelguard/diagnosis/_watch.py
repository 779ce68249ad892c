"""``watch``: names the cause of growth inside a service that runs, at 1 % of its CPU time at most."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Self

from modelguard import _units, telemetry
from modelguard.diagnosis import _census, _counts, _facts_process
from modelguard.diagnosis._census import ObjectCounts
from modelguard.diagnosis._counts import Counts, compiled
from modelguard.diagnosis._diagnose import within_a_day
from modelguard.diagnosis._growth_causes import GrowthReport, Measured, Unit, attribute, notes_on
from modelguard.diagnosis._target import Progress
from modelguard.environment import _allocator
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported
from modelguard.facts import _holders, _memory, _proc
from modelguard.facts._growth_judge import FEWEST, Verdict, judge
from modelguard.facts._holders import Held
from modelguard.isolation import _processes
from modelguard.lifecycle import system
from modelguard.runtime import fork_hooks
from modelguard.runtime.background import start_thread
from modelguard.telemetry import GrowthFound

# Readings of a service that runs: kept few however long they go on, and judged. Without clock or thread.

#: Readings for a verdict. When there are twice as many, every second one is dropped, so that they cover the whole time.
_READINGS = 24

#: The share of Python's new blocks, and of the growth, below which a container is not what holds it.
_BY_THE_WAY = 0.01


@dataclass(frozen=True, slots=True)
class Look:
    """A closer look at a process, at one moment."""

    census: Mapping[str, int] = field(default_factory=dict)
    types: Mapping[str, int] = field(default_factory=dict)
    compiled: int = 0
    libraries: tuple[str, ...] = ()
    moment: ObjectCounts | None = None


class Observed:
    """Readings of private memory, and the calls until each: those that have ended on guards, over all generations.

    Without guards at the first count, the time stands for the calls: readings of two units are no series.
    """

    def __init__(self, per: Unit | None = None) -> None:
        self.per: Unit | None = per
        self._uses: dict[tuple[str, int], int] = {}
        self._readings: list[tuple[int, int]] = []
        self._every = 1
        self._skipped = 0

    @property
    def ended(self) -> int:
        return sum(self._uses.values())

    def count(self, uses: Iterable[tuple[str, int, int]], seconds: float) -> int:
        for name, generation, count in uses:  # a rollback makes a generation current once more
            self._uses[name, generation] = max(count, self._uses.get((name, generation), 0))
        self.per = self.per or ("calls" if self._uses else "milliseconds")
        return self.ended if self.per == "calls" else int(1000 * seconds)

    def add(self, calls: int, private: int) -> bool:
        """Add a reading of private memory after so many calls; returns whether it is kept."""
        self._skipped += 1
        if self._readings and self._skipped < self._every:
            return False
        self._skipped = 0
        self._readings.append((calls, private))
        if len(self._readings) >= 2 * _READINGS:
            self._readings = self._readings[::2]
            self._every *= 2
        return True

    @property
    def first(self) -> int:
        return self._readings[0][1] if self._readings else 0

    @property
    def calls(self) -> int:
        return self._readings[-1][0] - self._readings[0][0] if self._readings else 0

    def verdict(self) -> Verdict:
        """Whether memory grows; undecided with few readings, and without calls."""
        enough = len(self._readings) >= _READINGS and self.calls > 0
        return judge(*zip(*self._readings, strict=True)).verdict if enough else "undecided"

    def measured(self, first: Look, last: Look, trimmed: int, held: tuple[Held, ...] = ()) -> Measured:
        """What was measured between two looks, with the bytes that a trim has just given back."""
        begin = self._readings[0][0] if self._readings else 0
        rise = self._readings[-1][1] - self.first if self._readings else 0
        blocks = last.census.get("blocks", 0) - first.census.get("blocks", 0)
        grown = {name: number - first.types.get(name, 0) for name, number in last.types.items()}
        return Measured(
            calls=tuple(calls - begin for calls, _ in self._readings),
            private=tuple(private for _, private in self._readings),
            before=dict(first.census),
            after=dict(last.census),
            types={name: number for name, number in grown.items() if number > 0},
            compiled=last.compiled - first.compiled,
            libraries=last.libraries,
            trimmed=trimmed,
            # A few entries with little in them came by the way, as in a buffer that is written to again and again.
            held=tuple(each for each in held if each.more >= _BY_THE_WAY * blocks or each.size >= _BY_THE_WAY * rise),
            live=True,
            per=self.per or "calls",
        )


#: The share of the time that the watch may compute.
_SHARE = 0.01
#: Readings more often than this decide nothing sooner, in seconds.
_SHORTEST = 0.05


def _look() -> Look:
    return Look(*_census.look(), compiled(), tuple(_census.loaded()), _census.moment())


def _held(first: Look, calls: int) -> tuple[Held, ...]:
    """What holds what has become more. Nothing is collected here, so what has no way from a root may be garbage."""
    return tuple(one for one in _holders.of_growth(_census.grown(first.moment, calls)) if one.path)


@dataclass(frozen=True, kw_only=True)
class World:
    """The process that is watched, as the watch reaches it. Tests replace it."""

    clock: Callable[[], float] = time.monotonic
    cpu: Callable[[], float] = time.thread_time
    private: Callable[[], int] = lambda: _memory.private(fresh=True)
    free: Callable[[], int | None] = lambda: system.known(lambda: _allocator.stats().retained)
    look: Callable[[], Look] = _look
    held: Callable[[Look, int], tuple[Held, ...]] = _held
    trim: Callable[[], int] = lambda: system.known(_allocator.trim) or 0


class Watch:
    """Watches this process until it is stopped. Made by :func:`watch`; a context manager that stops at its end.

    Attributes:
        found: What was found last; None if memory does not grow, or if that is not decided yet.
    """

    def __init__(self, name: str, every: float, calls: Callable[[], int] | None, world: World) -> None:
        self.found: GrowthFound | None = None
        self._name = name
        self._every = every
        self._given = calls
        self._world = world
        self._begin()

    def _begin(self) -> None:
        self._stopped = threading.Event()
        self._observed = self._observe()
        self._first: Look | None = None
        self._free: int | None = None
        self._began = self._world.clock()
        self.found = None

    def start(self) -> None:
        """Start the thread that watches."""
        start_thread(self._run, "modelguard-watch")

    def stop(self) -> None:
        """Stop watching; guards no longer show what was found."""
        self._stopped.set()
        _running.discard(self)
        if self.found is not None and system.found() is self.found:
            system.note(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        stopped, rest = self._stopped, self._every
        while not stopped.wait(rest):
            try:
                rest = self.step()
            except Exception:  # noqa: BLE001 - a watch never harms what it watches
                telemetry.logger.exception("modelguard could not look at the growth of this process")
                rest = 60 * self._every

    def step(self) -> float:
        """Look once; returns the seconds to wait until the next look."""
        began = self._world.cpu()
        if self._first is None:
            self._first = self._world.look()
            self._free = self._world.free()
        if self._observed.add(self._count(), self._world.private()):
            verdict = self._observed.verdict()
            if verdict == "grows":
                self._decide(self._first)
            elif verdict == "steady" and self.found is not None:
                self.found = None
                system.note(None)
        return max(self._every, (self._world.cpu() - began) / _SHARE)

    def _decide(self, first: Look) -> None:
        """Name the cause, and begin again: the next decision is about what comes then."""
        # Before the looks: what they need and free again is not what the service has freed.
        free, trimmed = self._world.free(), self._world.trim()
        if free is not None and self._free is not None:
            trimmed = min(trimmed, max(0, free - self._free))  # some was free from the start
        held = self._world.held(first, self._observed.calls if self._observed.per == "calls" else 0)
        last = self._world.look()
        measured = self._observed.measured(first, last, trimmed, held)
        causes, _ = attribute(measured)
        cause, share, seen, fix = astuple(causes[0]) if causes else (None, 0.0, "", "")
        growth, calls = measured.growth, measured.calls[-1]
        event = GrowthFound(guard=self._name, cause=cause, share=share, seen=seen, fix=fix, growth=growth, calls=calls)
        if self.found is None or event.cause != self.found.cause:
            telemetry.emit(event)
        self.found = event
        if not self._stopped.is_set():
            system.note(event)
        self._observed, self._first, self._free = self._observe(), last, self._world.free()

    def _observe(self) -> Observed:
        return Observed(None if self._given is None else "calls")

    def _count(self) -> int:
        if self._given is not None:
            return self._given()
        return self._observed.count(_census.guard_uses(), self._world.clock() - self._began)

    def after_fork_in_child(self) -> None:
        """Watch the child too: the parent's thread does not exist there."""
        self._begin()
        self.start()


_running: set[Watch] = set()


def watch(*, every: _units.Duration = "10s", calls: Callable[[], int] | None = None, name: str = "service") -> Watch:
    """Watch the memory of this process, and name the cause when it is decided that it grows with the calls.

    A background thread reads private memory, and takes at most 1 % of one CPU: after each look it rests a hundred times
    as long as it has computed. When memory grows, it emits ``GrowthFound``, ``status().growth`` of each guard shows it,
    and ``PolicyIgnored`` names the cause. The attribution is that of :func:`diagnose`, without what would disturb the
    service: no cache is emptied, nothing is collected or traced. Freed memory is returned once, when it is decided.

    It needs 24 readings. They cover the whole time: the longer it runs, the farther apart they are. Forked children are
    watched for themselves.

    Args:
        every: How long to wait between two readings, at first.
        calls: Returns how many calls have ended so far. Default: those on the guards of this process; without guards,
            time is counted instead.
        name: For events and logs, which show it as the guard's name.

    Returns:
        The watch, which goes on until its ``stop()``, or the end of its ``with`` block.

    Raises:
        InvalidOption: ``every`` is not a duration, ``calls`` is not callable, or ``name`` is not text.
        NotSupported: Private memory cannot be read here.
    """
    if calls is not None:
        _units.function(calls, "calls", "no arguments", fix="Write calls=lambda: counter.value.", arguments=0)
    name = _units.name(name)
    interval = _units.seconds(every, "every")
    if interval < _SHORTEST:
        raise InvalidOption("every", every, why=f"must be at least {_SHORTEST:g} s", fix="Write every='10s'.")
    _memory.private(fresh=True)  # raises if it cannot be read
    made = Watch(name, interval, calls, World())
    _running.add(made)
    if _processes.role == "owner":  # a mold only forks workers, which are watched
        made.start()
    return made


def _after_fork_in_child() -> None:
    for each in list(_running):
        each.after_fork_in_child()


# Watches a running process until its growth is decided: from outside, and from inside where it can be asked.

_OUTSIDE = "from outside, private memory by kind, the allocator ({}), threads, child processes and open files"
_INSIDE = "and from inside: its objects, what holds those that grow, and the calls on its guards"
#: How to get what was not looked at.
_LISTEN = "call modelguard.control.listen() where its application is made, or use Python 3.14 for both"
_ELSEWHERE = "modelguard.diagnosis.watch() in it, or modelguard diagnose MODULE:FUNCTION, find it too"


def diagnose_process(
    pid: str | int,
    *,
    seconds: _units.Duration = 300.0,
    progress: Progress = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> GrowthReport:
    """Watch a running process, decide whether its memory grows with its calls, and attribute the growth.

    Any process is watched from outside: the kinds of its memory, its threads, children and open files. One that has
    called ``modelguard.control.listen()``, or that runs the same CPython as this one, 3.14 or later, is asked too:
    a thread of it counts objects at the start and at the end, finds what holds those that have become more, and counts
    calls on guards in between. Freed memory is then returned at the start and at the end; nothing else is changed.

    Args:
        pid: The id of the process: of a server with workers, that of one worker.
        seconds: How long to watch it. It has to get requests meanwhile.
        progress: Called at each reading.
        clock: Monotonic seconds.
        sleep: Waits for that many seconds.

    Raises:
        InvalidOption: It is not a process id, the process does not exist, has ended, belongs to another user, or has
            stopped to answer; or the time is not valid.
        NotSupported: There is no ``/proc``.
    """
    number = _facts_process.process_number(pid)
    seconds = within_a_day(seconds, "--time", least=1, example="5m")
    _facts_process.require_proc()
    with _facts_process.readable(number), ExitStack() as stack:
        _memory.usage(number)  # raises if there is no such process, or it belongs to another user
        subject, python = _facts_process.named_process(number), _facts_process.interpreter_of(number)
        inside, why = None, "it runs no Python"
        if python is not None:
            try:
                inside = stack.enter_context(_facts_process.inside_of(number, python))
            except ModelGuardError as error:
                why = _reason(error)
                why = "; ".join([why, *([] if "control.listen()" in why else [_LISTEN]), _ELSEWHERE])
        return Watched(number, inside, clock, sleep, progress, why=why).report(subject, seconds)


def _reason(error: ModelGuardError) -> str:
    if isinstance(error, NotSupported):
        return error.reason
    fix = f". {error.fix}" if isinstance(error, InvalidOption) else ""
    return f"it {str(error).removesuffix(fix).partition(': ')[2]}"


@dataclass(frozen=True)
class Watched:
    """A process that is watched."""

    pid: int
    inside: _facts_process.Ask | None
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    progress: Progress
    private: Callable[[int], int] = _memory.private_of
    why: str = ""
    _unknown: list[str] = field(default_factory=list)

    def report(self, subject: str, seconds: float) -> GrowthReport:
        observed = Observed()
        self._still_there()
        counts = Counts(self.pid)
        free = self._trim()
        first, kinds = self._look(), _counts.kinds_of(self.pid)
        self._trim()  # what this look has left
        began, computed = self.clock(), _proc.cpu_seconds(self.pid)
        if (below := len(_proc.tree(self.pid)) - 1) > 0:
            self._unknown.append(f"it has {below} processes below it, which were not watched")
        try:
            for number in range(_READINGS + 1):
                self.sleep(max(0.0, began + number * seconds / _READINGS - self.clock()))
                private = self._still_there()
                made = observed.count(self._ask("uses").get("uses", ()), self.clock() - began)
                observed.add(made, private)
                counts.read(made)
                self.progress({"calls": observed.ended, "private": private, "first": observed.first, "phase": "drive"})
        except KeyboardInterrupt:
            self._unknown.append("it was interrupted")
        idle = _proc.cpu_seconds(self.pid) == computed
        moved = _counts.moved(kinds, _counts.kinds_of(self.pid))
        trimmed = max(0, self._trim() - free)  # before it is looked at once more, as in a watch
        last, held = self._look(), self._held(observed.calls if observed.per == "calls" else 0)
        measured = observed.measured(first, last, trimmed, held)
        measured = replace(measured, growing=tuple(counts.growing(0)))
        judged = measured.judged
        self._unknown.extend(notes_on(judged, measured.per))
        if len(measured.calls) >= FEWEST and not measured.calls[-1]:
            self._unknown.append("no call has ended meanwhile; send it requests")
        elif idle and judged.verdict == "steady" and measured.per != "calls":
            judged = replace(judged, verdict="undecided")
            self._unknown.append("it has computed nothing meanwhile: continue it if it is stopped; send it requests")
        elif judged.verdict == "undecided":
            longer = _units.format_seconds(math.ceil(judged.more * seconds))
            self._unknown.append(f"{judged.reason}; it needs --time {longer}")
        grows = judged.verdict == "grows"
        causes, rest = attribute(measured) if grows and self.inside is not None else ((), float(grows))
        seen = (*self._looked_at(), *([f"where private memory grew: {moved}"] if moved else ()))
        verdict = "grows" if measured.growing else judged.verdict
        return GrowthReport(subject, verdict, causes, rest, measured, tuple(self._unknown), seen=seen)

    def _still_there(self) -> int:
        private = self.private(self.pid)
        if not _proc.runs(self.pid):
            why = "has ended meanwhile"
            raise InvalidOption("--pid", self.pid, why=why, fix="Give the id of a process that goes on.")
        return private

    def _looked_at(self) -> Iterator[str]:
        outside = _OUTSIDE.format(_counts.allocator_of(self.pid) or "unknown")
        yield f"looked at: {outside}" if self.inside is None else f"looked at: {outside}; {_INSIDE}"
        if self.inside is None:
            yield f"not looked at: its Python objects, what holds them, and its calls, because {self.why}"

    def _ask(self, question: str) -> dict[str, Any]:
        return {} if self.inside is None else self.inside(question)

    def _look(self) -> Look:
        said = self._ask("look")
        return Look(said.get("census", {}), said.get("types", {}), compiled(self.pid), tuple(said.get("libraries", ())))

    def _held(self, calls: int) -> tuple[Held, ...]:
        """What holds what has become more. Where calls are not known, growth with them cannot be asked for."""
        return tuple(Held(**each) for each in self._ask(f"held {calls}").get("held", ()) if each["path"])

    def _trim(self) -> int:
        before = self.private(self.pid)
        self._ask("trim")
        return max(0, before - self.private(self.pid))


fork_hooks.at_fork(fork_hooks.Rank.THREADS, in_child=_after_fork_in_child)
