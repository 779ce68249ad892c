"""The program that drives a function in a process of its own and measures what grows. Started by :mod:`._diagnose`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
import importlib
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from modelguard import _units, memory
from modelguard.diagnosis import _census, _target
from modelguard.diagnosis._counts import Counts, Exhausted, compiled, kept_by_line
from modelguard.diagnosis._target import Arguments, Patience, Say, Target
from modelguard.environment import _allocator
from modelguard.facts import _holders, _memory, _proc
from modelguard.facts._growth_judge import Verdict, judge
from modelguard.lifecycle import system
from modelguard.lifecycle._guard_options import Swap
from modelguard.lifecycle._lease import owner_of
from modelguard.lifecycle.guard import ModelGuard, guard
from modelguard.lifecycle.policies import Policy, Uses

if TYPE_CHECKING:
    from modelguard.isolation.isolate import Isolated

_READINGS = 24
#: Shares of the time or of the calls: the warm-up, the readings, new inputs to choose from, repeated inputs, and calls
#: that are traced.
_WARM, _DRIVE, _NEW, _REPEATED, _TRACING = 0.15, 0.55, 0.05, 0.16, 0.09
_FEWEST_CALLS = 4
_CALIBRATING = 10_000
_UNCOUNTED = 10**9
#: How many times the time may be exceeded if calls are so slow that there are too few readings.
_MOST_TIMES = 3
#: A run that leaves it undecided goes on for so many times as long.
_AGAIN = 2
#: Bytes. If it grows, and by so much, or if there is so much more, going on would only endanger the machine.
_ENOUGH, _MOST = 200_000_000, 1_000_000_000
#: Calls before which that is not enough: what holds few entries is not named.
_ENOUGH_CALLS = 20
#: Bytes by which memory may grow between two readings, and in each test after them: a function that keeps 20 MB per
#: call is to have enough readings before it has grown by too much.
_READ, _TESTED = _MOST // (2 * _READINGS), _ENOUGH // 2
#: Readings without which a run goes on beyond its time.
_ENOUGH_READINGS = 10
#: Inputs that are looked at to find some of one shape, and calls of a run that is traced, at most.
_SHAPES, _TRACED = 400, 300
_MOST_ERRORS = 5
#: New objects after which a full collection comes at the latest, but for what it leaves to a heap that is large:
#: 70,000 (CPython 3.11) or 200,000, unless the service has set more.
_MOST_NEW = 1_000_000
#: Objects of a type that are few are not named as garbage.
_MANY = 100


def main() -> None:
    """Do what the configuration describes: drive the function, or try a remedy on it."""
    _target.run_program(lambda config, say, patience: (_try if "act" in config else _drive)(config, say, patience))


class _Extent(NamedTuple):
    """How long to drive: so many calls, but not beyond a moment."""

    calls: int
    until: float


class _Pace(NamedTuple):
    """How long everything takes: by time, or by calls, so that a busy machine changes nothing."""

    seconds: float
    calls: int | None
    latest: float
    most: int = _UNCOUNTED

    def part(self, share: float, *, at_most: int = _UNCOUNTED) -> _Extent:
        at_most = min(at_most, self.most)
        if self.calls is not None:
            return _Extent(min(at_most, max(_FEWEST_CALLS, round(share * self.calls))), self.latest)
        return _Extent(at_most, time.monotonic() + share * self.seconds)


def _drive(config: dict[str, Any], say: Say, patience: Patience) -> None:
    say(phase="import")
    began = time.monotonic()
    patience.begin(config["loading"])
    function = _target.load(config["target"])
    if config["load"]:
        function = guard(_target.load(config["load"]), reload_on=None)(function)
    counts = Counts()

    def look() -> None:  # a closure of this package, by which the census knows what it and ``counts.own`` hold
        counts.require_few()

    target = Target(function, _target.inputs(config, function), patience, look=look)
    patience.end()
    config |= {"imported": time.monotonic() - began}
    for _ in range(2):
        try:
            _measure(config, say, function, target, counts)
        except (Exhausted, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EMFILE:
                raise
            growing = counts.exhausted(target.calls)  # first: nothing could be said without a descriptor
            if not growing:  # it has lowered its own limit: once more, with what was kept free
                continue
            if not counts.judged:  # else only the tests are missing
                say(measured=_alone(target) | {"growing": growing})
            say(done=True)
        return


def _measure(config: dict[str, Any], say: Say, function: Any, target: Target, counts: Counts) -> None:
    seconds = float(config["seconds"])
    pace = _Pace(seconds, config.get("calls"), time.monotonic() + _MOST_TIMES * seconds)
    say(phase="warm-up")
    size = _warm_up(target, pace)
    if target.failures == target.calls:
        say(measured=_alone(target), done=True)
        return
    target.forget()
    counts.begin()
    gc.unfreeze()  # the collector shows nothing of what is frozen, and this process shares its pages with none
    gc.collect()
    sizes = _census.cache_sizes()
    pools = _emptied(_census.pools())
    target.run(size, pace.part(_WARM).until)
    free = _fallen(lambda: None)  # what calls always leave behind, without any growth
    target.run(size, pace.part(_WARM).until)
    target.forget()
    counts.begin()
    code = compiled()
    _in_use()  # what it imports is no growth
    before, moment = _census.look()[0], _census.moment()
    _trim()  # what this look has left
    in_use = _in_use()
    readings = _Readings(target, pace, size, say, counts)
    measured = readings.decided()
    counts.own += [readings, measured]
    grown = measured["private"][-1] - measured["private"][0]
    collecting = gc.isenabled()
    gc.unfreeze()  # what calls have frozen
    gc.disable()  # the looks at it would set off a collection, and what that frees would be nobody's
    pace = pace._replace(most=max(_FEWEST_CALLS, _calls_for(_TESTED, target.calls, grown)))
    measured |= {"imported": config["imported"], "trimmed": max(0, _fallen(lambda: None) - free)}
    measured |= {"before": before, "after": _census.look()[0], "compiled": compiled() - code, **_about(function)}
    say(measured=measured)
    say(phase="tests")
    measured |= _given_back(pools, sizes)
    if collecting:
        gc.enable()
    measured |= {name: size - in_use[name] for name, size in _in_use().items() if name in in_use}
    measured |= _named(moment, target.calls)  # after the collection: what is no garbage
    if _collects() and 2 * measured["collected"] > grown:  # it has not been the collector's turn yet
        _trim()
        readings.drive(_AGAIN, collect=True)
        if readings.verdict() == "steady":
            say(measured=measured | readings.found(), done=True)
            return
    measured |= _rates(target, pace)
    traced = pace.part(_TRACING, at_most=min(_TRACED, max(_FEWEST_CALLS, target.calls)))
    # It slows calls down, so it comes last.
    measured |= kept_by_line(lambda: target.run(traced.calls, max(traced.until, time.monotonic() + 1)))
    if _census.switch_off_caches():
        measured["uncached"] = _rate(target, pace, _REPEATED / 2, None)
    say(measured=measured, done=True)


def _about(function: Any) -> dict[str, Any]:
    name = getattr(function, "__qualname__", None)
    return {
        "libraries": _census.loaded(),
        "guarded": isinstance(owner_of(function), ModelGuard),
        "zones": any(hasattr(type(nlp), "memory_zone") for nlp in _census.pipelines()),
        "importable": isinstance(name, str) and "." not in name and not hasattr(function, "aio"),
    }


def _alone(target: Target) -> dict[str, Any]:
    """What is known of a function where memory says nothing: no call has succeeded, or it was ended before."""
    return {"calls": [target.calls], "private": [0], **_failed(target)}


def _failed(target: Target) -> dict[str, Any]:
    return {"failures": target.failures, "failed": target.failed, "errors": list(target.errors)[:_MOST_ERRORS]}


def _named(before: _census.ObjectCounts | None, calls: int) -> dict[str, Any]:
    """What holds what has grown, and what the memory of libraries belongs to."""
    found: dict[str, Any] = {"held": [], "owners": {}}
    with suppress(Exception):  # foreign objects can raise anything; what holds them is an extra
        found["held"] = [each._asdict() for each in _holders.of_growth(_census.grown(before, calls))]
    with suppress(Exception):
        owners = _census.owners()
        found["owners"] = {
            cause: sorted({way for one in some if (way := _holders.path(one, {id(owners), id(some)}))})
            for cause, some in owners.items()
        }
    return found


class _Readings:
    def __init__(self, target: Target, pace: _Pace, size: int, say: Say, counts: Counts) -> None:
        self.calls: list[int] = []
        self.private: list[int] = []
        self.workers: list[int] = []
        self.judged_from = 0
        self._began = time.monotonic()
        self._target, self._pace, self._size, self._say, self._counts = target, pace, size, say, counts

    def decided(self) -> dict[str, Any]:
        """Drive it until it is decided, or for three times as long.

        The second time garbage is collected before each reading: the collector's own sawtooth most often hides the
        rest.
        """
        self.drive()
        if self.verdict() == "undecided" and self.grown() <= _MOST:
            self.drive(_AGAIN, collect=True)
        return self.found()

    def found(self) -> dict[str, Any]:
        return {
            "calls": [*self.calls],
            "private": [*self.private],
            "judged_from": self.judged_from,
            "in_workers": self.workers[-1] - self.workers[0],
            **_failed(self._target),
            "growing": self._counts.growing(self.judged_from),
            "seconds": time.monotonic() - self._began,
        }

    def drive(self, times: int = 1, *, collect: bool = False) -> None:
        """Call, and read 24 times or so, or some times as often; only these readings are judged."""
        self.judged_from = len(self.calls)
        self._read(collect=collect)
        until = min(self._pace.latest, time.monotonic() + times * _DRIVE * self._pace.seconds)
        while not self._is_over(times, until):
            self._target.run(*self._pace.part(_DRIVE / _READINGS, at_most=self._at_most()))
            self._read(collect=collect)

    def verdict(self) -> Verdict:
        return judge(self.calls[self.judged_from :], self.private[self.judged_from :]).verdict

    def grown(self) -> int:
        return self.private[-1] - self.private[0]

    def _at_most(self) -> int:
        """How many calls the next reading may have; the first one has what the warm-up has found."""
        return _calls_for(_READ, self.calls[-1], self.grown()) if self.calls[-1] else self._size

    def _is_over(self, times: int, until: float) -> bool:
        count = len(self.calls) - self.judged_from
        enough = count > times * _READINGS if self._pace.calls is not None else time.monotonic() >= until
        clear = self.grown() > _ENOUGH and self.calls[-1] >= _ENOUGH_CALLS and self.verdict() == "grows"
        much = clear or self.grown() > _MOST
        return much or time.monotonic() >= self._pace.latest or (enough and count >= _ENOUGH_READINGS)

    def _read(self, *, collect: bool) -> None:
        if collect:
            gc.collect()
        self.workers.append(_target.held_by_workers())
        self.calls.append(self._target.calls)
        self._counts.read(self._target.calls)
        self.private.append(_memory.private(fresh=True) + self.workers[-1])
        now = {"calls": self.calls[-1], "private": self.private[-1], "first": self.private[0]}
        self._say(phase="drive", judged_from=self.judged_from, **now)


def _calls_for(size: int, calls: int, grown: int) -> int:
    return max(1, size * calls // grown) if grown > 0 else _UNCOUNTED


def _warm_up(target: Target, pace: _Pace) -> int:
    """Call until the time is up, or memory has grown by too much; returns how many calls make up a reading."""
    part = pace.part(_WARM)
    # The first calls may load a model, so they say nothing of the later ones.
    first = count = target.run(_FEWEST_CALLS, part.until)
    loaded = _memory.private(fresh=True)
    while count < _FEWEST_CALLS or (count < part.calls and time.monotonic() < part.until):
        count += target.run(min(_FEWEST_CALLS, part.calls - count), part.until)
        if _memory.private() - loaded > _MOST:
            break
    most = _calls_for(_READ, count - first, _memory.private(fresh=True) - loaded)
    if pace.calls is not None:
        return min(most, pace.part(_DRIVE / _READINGS).calls)
    share, began = _DRIVE / _READINGS * pace.seconds, time.monotonic()
    count = target.run(min(most, _CALIBRATING), began + share)
    return min(most, max(1, int(share * count / (time.monotonic() - began))))


def _collects() -> bool:
    """Whether the garbage collector goes through all objects by itself, and not only after very many new ones."""
    first, *others = gc.get_threshold()
    return gc.isenabled() and 0 < first * math.prod(max(1, each) for each in others) <= _MOST_NEW


def _trim() -> None:
    system.known(_allocator.trim)


def _fallen(act: Callable[[], object]) -> int:
    """By how much private memory falls, or what is in use: what is freed may stay in the allocators' pages."""
    before, used = _memory.private(fresh=True), sum(_in_use().values())
    act()
    _trim()
    return max(0, before - _memory.private(fresh=True), used - sum(_in_use().values()))


def _in_use() -> dict[str, int]:
    """What Python has given out in small objects, and malloc in blocks; without what is not known."""
    found = {"small": system.python_in_use(), "given_out": system.in_use()}
    return {name: size for name, size in found.items() if size is not None}


def _given_back(pools: dict[str, int], sizes: dict[int, int]) -> dict[str, Any]:
    """What a collection and empty caches give back; of libraries' pools, what is more than at the start."""
    freed: list[int] = []
    kinds = _census.look()[1]
    _trim()  # what was looked at since then
    found: dict[str, Any] = {"collected": _fallen(lambda: freed.append(gc.collect()))}
    found["garbage"] = freed[0]
    left = _census.look()[1]
    found["freed"] = {kind: fewer for kind, number in kinds.items() if (fewer := number - left.get(kind, 0)) > _MANY}
    more = {name: size - pools.get(name, 0) for name, size in _emptied(_census.pools()).items()}
    found["cleared"] = _emptied(_census.caches(sizes)) | {name: size for name, size in more.items() if size > 0}
    return found


def _emptied(caches: Iterable[tuple[str, Callable[[], object]]]) -> dict[str, int]:
    """Empty these caches, and return freed memory: what each has given back."""
    _trim()
    return {name: _fallen(clear) for name, clear in list(caches)}  # a list: emptying one must not hide another


def _rates(target: Target, pace: _Pace) -> dict[str, Any]:
    """Growth per call with one input, with inputs of one shape, and with inputs that fail or do not."""
    works, failing = _sorted_out(target, pace.part(_NEW, at_most=_SHAPES))
    groups: dict[Any, list[Arguments]] = {}
    for item in works:
        groups.setdefault(_shape(item), []).append(item)
    alike = max(groups.values(), key=len, default=[])
    tries: dict[str, list[Arguments]] = {"repeats": works[:1]}
    if len(groups) > 1 and len(alike) > 1:
        tries["same_shape"] = alike
    if failing and works:
        tries |= {"failing": failing, "succeeding": works}
    share = _REPEATED / len(tries) / 2
    return {name: _rate(target, pace, share, items) if items else None for name, items in tries.items()}


def _sorted_out(target: Target, extent: _Extent) -> tuple[list[Arguments], list[Arguments]]:
    works: list[Arguments] = []
    failing: list[Arguments] = []
    while len(works) + len(failing) < extent.calls and (time.monotonic() < extent.until or not works + failing):
        item, failures = target.next_input(), target.failures
        target.run(1, extent.until, lambda item=item: item)  # type: ignore[misc]
        (failing if target.failures > failures else works).append(item)
    return works, failing


def _rate(target: Target, pace: _Pace, share: float, items: list[Arguments] | None) -> float:
    """Growth per call, with new inputs if none are given.

    They are called once more before that, so that what they make anew is there.
    """
    again = None if items is None else itertools.cycle(items).__next__
    target.run(*pace.part(share), again)
    before = _memory.private(fresh=True)
    count = target.run(*pace.part(share), again)
    return (_memory.private(fresh=True) - before) / count


def _shape(given: Any) -> Any:
    """Lengths and dimensions, without contents."""
    if hasattr(given, "shape"):
        return tuple(given.shape)
    if isinstance(given, str | bytes):
        return len(given)
    if isinstance(given, dict):
        return tuple((key, _shape(value)) for key, value in sorted(given.items()))
    return tuple(map(_shape, given)) if isinstance(given, list | tuple) else type(given).__name__


# One remedy, tried on the function in a process of its own.

_STEPS = 24
#: The module that this program writes, so that worker processes can import the function.
_MODULE = "modelguard_tried"


def _try(config: dict[str, Any], say: Say, patience: Patience) -> None:
    plain = _target.load(config["target"])
    function, around = _with_remedy(plain, config)
    given = _target.inputs(config, _guarded(plain, config, None) if config["load"] else plain)
    asynchronous = _units.function_kind(plain) == "coroutine"
    target = Target(function, given, patience, asynchronous=asynchronous, around=around)
    until = time.monotonic() + config["limit"]
    say(phase="warm-up")
    target.run(config["warm"], until)
    gc.collect()
    target.forget()
    target.timed = True
    _settle(function, until)
    size = max(1, config["calls"] // _STEPS)
    calls, private, cpu = [0], [_private()], _cpu()
    say(phase="try")
    while len(calls) <= _STEPS and time.monotonic() < until:
        target.run(size, until)
        _settle(function, until)
        calls.append(target.calls)
        private.append(_private())
    seconds = sorted(target.seconds)
    p99 = seconds[int(0.99 * (len(seconds) - 1))] if seconds else 0.0
    made = {"calls": target.calls, "failures": target.failures, "errors": list(target.errors)[:3]}
    costs = {"cpu": (_cpu() - cpu) / max(1, target.calls), "p99": p99, "held": private[-1]}
    say(readings=[calls, private], **made, **costs, whole=len(calls) > _STEPS, done=True)


def _settle(function: Any, until: float) -> None:
    """Wait for the replacement that is due: on a busy machine it comes late, and memory is judged, not time."""
    from modelguard.isolation.isolate import Isolated  # here: what imports leave behind would falsify a measurement

    owner = owner_of(function)
    if isinstance(function, Isolated):
        _target.settled_workers([function], until)
    elif isinstance(owner, ModelGuard):
        while owner.engine.loading and time.monotonic() < until:
            time.sleep(_target.PAUSE)


# The remedies

_Around = Callable[[], contextlib.AbstractContextManager[object]]


def _with_remedy(plain: Callable[..., Any], config: dict[str, Any]) -> tuple[Callable[..., Any], _Around]:
    act = config["act"]
    if act == "reload":
        return _guarded(plain, config, Uses(config["uses"])), contextlib.nullcontext
    if act == "isolate":
        return _isolated(config), contextlib.nullcontext
    function = _guarded(plain, config, None) if config["load"] else plain
    if act == "trim":
        memory.trim_every(config["trim_every"])
    if act == "bucketed":
        from modelguard.adapters.torch import bucketed

        function = bucketed(*config["bucketed"], cut=None)(function)
    return function, _zones() if act == "zones" else contextlib.nullcontext


def _zones() -> _Around:
    """What makes the context of a call: a memory zone in each pipeline. They are looked for after the first call."""
    calls, pipelines = itertools.count(), list[Any]()

    @contextlib.contextmanager
    def zones() -> Iterator[None]:
        if next(calls) == 1:
            pipelines.extend(_census.pipelines())
        with contextlib.ExitStack() as stack:
            for nlp in pipelines:
                stack.enter_context(nlp.memory_zone())
            yield

    return zones


def _guarded(plain: Any, config: dict[str, Any], policy: Policy | None) -> Any:
    """The function with a guard that has another policy, and does not wait for a pause between calls."""
    if config["load"]:
        return guard(_target.load(config["load"]), reload_on=policy, swap=Swap(defer=0))(plain)
    owner = owner_of(plain)
    if not isinstance(owner, ModelGuard):
        raise TypeError(f"{config['target']} has no guard")
    context = owner.engine
    swap = dataclasses.replace(context.options.swap, defer=0)
    options = dataclasses.replace(context.options, reload_on=policy, swap=swap)
    return ModelGuard(options, context.system)(plain.__wrapped__)


def _isolated(config: dict[str, Any]) -> Any:
    folder = Path(config["answer"]).parent
    chosen = {name: config[name] for name in ("target", "load", "uses")}
    made = f"isolated_function({chosen!r}, __name__)"
    text = f"from modelguard.diagnosis._driven_program import isolated_function\ncall = {made}\n"
    (folder / f"{_MODULE}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    return importlib.import_module(_MODULE).call


def isolated_function(config: dict[str, Any], module: str) -> Isolated[..., Any]:
    from modelguard.isolation.isolate import isolate

    plain, policy = _target.load(config["target"]), Uses(config["uses"])
    guarded = config["load"] or isinstance(owner_of(plain), ModelGuard)
    if guarded:
        call = _guarded(plain, config, policy)
    else:

        @functools.wraps(plain)  # whose kind it has: a coroutine's, a generator's
        def call(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

    call.__module__, call.__qualname__ = module, "call"
    return isolate(workers=1, timeout=None, recycle_on=None if guarded else policy)(call)


# What a run costs


def _private() -> int:
    return sum(_memory.private_of(each.pid) for each in _proc.tree(os.getpid()))


def _cpu() -> float:
    return sum(_proc.if_readable(_proc.cpu_seconds, each.pid) or 0.0 for each in _proc.tree(os.getpid()))


if __name__ == "__main__":
    main()
