"""``prepare``: worker processes that share one copy of a model.

A forked child shares its parent's memory until one of them writes to it. So the parent loads the model, and its
children must not write to it: neither by a warm-up at first use, nor by the collector's marks, nor by reference counts.
:func:`prepare` prevents this in the parent just before it forks. :func:`in_child` repairs in each child what the fork
broke.
"""

import gc
import mmap
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from modelguard import _units
from modelguard.environment import _allocator
from modelguard.errors import ForkHazard, ForkOrder, ForkUnsafe, InvalidOption, NotSupported
from modelguard.facts import _memory
from modelguard.lifecycle import _models
from modelguard.lifecycle._guard_options import outside
from modelguard.lifecycle._lease import owner_of
from modelguard.lifecycle.guard import ModelGuard
from modelguard.lifecycle.guard import guards as all_guards
from modelguard.runtime import child_processes, fork_hooks
from modelguard.runtime.background import THREADS
from modelguard.sharing import _graph, _hazards, _immortal
from modelguard.sharing._hazards import Hazard
from modelguard.sharing._immortal import ImmortalReport

# Loads under way in any guard of this process: a fork in the middle of one copies the locks that its thread holds.


#: Seconds between checks whether the loads have ended.
_POLL = 0.005


def loading() -> str | None:
    """The name of a guard that is loading a model, or releasing one that it has replaced; None if there is none."""
    return next((guard.name for guard in all_guards if guard.engine.loading), None)


def wait_for_loads(timeout: float) -> str | None:
    """Wait until no guard of this process loads or releases; returns the name of one that still does then."""
    end = time.monotonic() + timeout
    while (name := loading()) is not None and time.monotonic() < end:
        time.sleep(_POLL)
    return name


# What this process has been prepared for, and how its forked children repair themselves: ``in_child``.


#: Seconds that any fork of a prepared process waits for running loads. Short, because the forking thread may hold the
#: lease that a release waits for.
_FORK_WAIT = 10.0


@dataclass
class Prepared:
    """What a process has prepared, the hazards that its children repair, and whether a child has repaired itself."""

    pid: int
    generations: Mapping[ModelGuard[Any], int]  # of each guard
    hazards: tuple[Hazard, ...]
    ready_pid: int = 0
    failure: BaseException | None = None


_current: Prepared | None = None  # by this process, or by the one that forked it
_signal_mask = threading.local()  # of the thread that forks
_mode: Literal["", "trial", "twice"] = ""
_forker = 0  # the process that forked last; its child cannot ask for its parent, which may have ended
_first = threading.Lock()  # taken by the first preparation, and never released


@contextmanager
def forking(mode: Literal["trial", "twice"]) -> Iterator[None]:
    """In the block, a child is no worker.

    It runs no warm-up but the one it was forked for; or, "twice", it only forks the worker, which repairs itself.
    """
    global _mode
    _mode = mode
    try:
        yield
    finally:
        _mode = ""


def in_child() -> None:
    """Repair a forked worker: its threads, random seeds and allocator threads, and run each guard's warm-up.

    Children of a prepared process do this by themselves when they are forked. In a server's hook, call this function as
    well, because it raises the errors of the repair. Further calls have no effect.

    Raises:
        ForkOrder: The parent was never prepared, or this is the parent.
        Exception: The error that a guard's ``warmup`` raised.
    """
    if _current is None:
        fix = "Call prefork.prepare() in it before it forks."
        raise ForkOrder("in_child", why="the parent was not prepared", fix=fix)
    if os.getpid() == _current.pid:
        fix = "Call it in the worker, as in gunicorn's post_fork or uWSGI's postfork."
        raise ForkOrder("in_child", why="this is the parent process", fix=fix)
    _repair(_current)
    if _current.failure is not None:
        raise _current.failure


def _before_fork() -> None:
    """Wait for loads in other threads, and hold back signals until the child can act on them."""
    global _forker
    _forker = os.getpid()
    if _current is None or os.getpid() != _current.pid:
        return
    if not threading.current_thread().name.startswith(_hazards.OUR_THREADS):  # a loader may fork at any time
        wait_for_loads(_FORK_WAIT)
    _signal_mask.before = child_processes.block()


def _after_fork_in_parent() -> None:
    mask = getattr(_signal_mask, "before", None)
    if mask is not None:
        _signal_mask.before = None
        child_processes.restore_mask(mask)


def _after_fork() -> None:
    global _mode
    prepared = _current
    is_worker = prepared is not None and _forker == prepared.pid  # the children of a worker are not ours
    with child_processes.default_actions() if is_worker and not _mode else nullcontext():
        _after_fork_in_parent()
        if prepared is None or not is_worker:
            return
        if _mode == "twice":
            _mode, prepared.pid = "", os.getpid()
        elif _mode == "trial":
            _hazards.restore(prepared.hazards)
        else:
            _repair(prepared)


def _repair(prepared: Prepared) -> None:
    if prepared.ready_pid == os.getpid():
        return
    prepared.ready_pid = os.getpid()
    try:
        _hazards.restore(prepared.hazards)
        for guard in prepared.generations:
            guard.engine.warm_up()
    except BaseException as error:  # noqa: BLE001 - a fork hook cannot raise; in_child() does
        prepared.failure = error


OnHazard = Literal["fix", "refuse", "warn"]
Immortalize = Literal[True, False, "auto"]

#: Bytes of models for which it is worth the time at start to make objects immortal.
_IMMORTALIZE_FROM = 16_000_000

_RENEWED = "old models could never be freed after TTL, Modified or Changed"

_ONE_COPY = "@isolate(scope='host') above its functions gives all workers one copy, which is renewed as well."


@dataclass(frozen=True, slots=True)
class ForkReport:
    """What :func:`prepare` found and did.

    Attributes:
        guards: Names of the guards whose models are shared.
        hazards: What does not survive a fork, worst first.
        tried: The guards whose warm-up was run in a trial child, each with the seconds that it took.
        frozen: Number of objects that the collector ignores from now on; 0 if ``freeze`` was off.
        immortal: What was made immortal; None if nothing was.
        why_mortal: Why models were not made immortal, or some of them; None if all were.
        private: Private memory afterwards, in bytes, which the children share.
        seconds: How long everything took, including loads.
    """

    guards: tuple[str, ...]
    hazards: tuple[Hazard, ...]
    tried: dict[str, float]
    frozen: int
    immortal: ImmortalReport | None
    why_mortal: str | None
    private: int
    seconds: float

    def lines(self) -> list[str]:
        """What was done, one sentence each, without the hazards."""
        counts = f"{self.immortal.objects:,} objects immortal" if self.immortal else "none immortal"
        if self.why_mortal is not None:
            counts += f" ({self.why_mortal})"
        names = ", ".join(self.guards) or "a process without guards"
        return [
            f"prepared {names} in {self.seconds:.1f} s: {_units.format_bytes(self.private)} to share",
            f"{self.frozen:,} objects frozen, {counts}",
            *(f"warm-up of {name} tried in a child: {seconds:.2f} s" for name, seconds in self.tried.items()),
            *(f"mortal: {one}" for one in (self.immortal.mortal if self.immortal else ())),
        ]

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *map(str, self.hazards)])


def prepare(
    *guards: ModelGuard[Any],
    freeze: bool = True,
    immortalize: Immortalize = "auto",
    on_hazard: OnHazard = "fix",
    warm_timeout: _units.Duration = 60.0,
) -> ForkReport:
    """Prepare this process to be forked into workers that share its models. Call it last, just before the fork.

    It loads the models, searches for hazards, runs each warm-up in a trial child, collects garbage, freezes the
    remaining objects and makes the models' objects and the program immortal, in this order. Children that are forked
    from now on repair what a fork breaks and warm up by themselves (``os.register_at_fork``). In a server's hook, call
    :func:`in_child` as well: it raises the errors of that repair.

    Args:
        guards: The guards whose models are shared. Default: every guard made with ``prefork=True``.
        freeze: Hide all objects from the garbage collector (``gc.freeze``), because its marks would copy their pages.
        immortalize: Stop counting references to the models' objects, so that reading them does not copy their pages
            (CPython 3.12 or newer). This cannot be undone: such objects are never freed. ``"auto"``: if the interpreter
            supports it and the models take at least 16 MB, and not for guards with ``TTL``, ``Modified`` or
            ``Changed``, whose old models this process could never free; children then copy the objects that they
            read, which the hazard ``"copies"`` tells. True: always, or raise ``NotSupported``. Unless it is False,
            classes and functions that there are become immortal as well, because each call of them is counted.
        on_hazard: ``"fix"``: refuse what no child could survive, let children repair what they can, end threads that
            their library starts again, and warn about the rest. ``"refuse"``: refuse every hazard. ``"warn"``: warn
            about all and repair nothing.
        warm_timeout: How long a warm-up may take in the trial child before it counts as hung, and how long to wait for
            a running reload.

    Returns:
        What was found and done.

    Raises:
        InvalidOption: An option is invalid, or there is no guard.
        ForkOrder: Called in a forked child, or a second time although no model has been replaced.
        ForkUnsafe: There is a hazard that cannot be repaired, or a warm-up hung or failed in a child. The process can
            continue to serve as before.
        LoadFailed: A model could not be loaded.
        NotSupported: ``immortalize=True`` on an interpreter without immortal objects; or there is no ``/proc``.
    """
    _units.flag(freeze, "freeze")
    _units.one_of(on_hazard, "on_hazard", get_args(OnHazard), what="choice")
    timeout = _units.seconds(warm_timeout, "warm_timeout")
    return PrepareOptions(freeze, immortalize, on_hazard, timeout).prepare(_chosen(guards))


@dataclass(frozen=True, slots=True)
class PrepareOptions:
    """The options of :func:`prepare`, of which servers read their own."""

    freeze: bool = True
    immortalize: Immortalize = "auto"
    on_hazard: OnHazard = "fix"
    warm_timeout: float = 60.0

    def prepare(self, chosen: Sequence[ModelGuard[Any]], *, renewed_here: bool = True) -> ForkReport:
        """:func:`prepare` for exactly these guards, or for a process without any.

        One that ends with its models, instead of loading new weights itself, may make them immortal whatever their
        policies.
        """
        check_immortalize(self.immortalize)
        started = time.monotonic()
        process = _hazards.ThisProcess()
        if process.event_loop() is not None:
            # Not the warnings: the loop's own connections and event queue would be among them.
            raise ForkUnsafe(hazard for hazard in _hazards.find_hazards(process) if hazard.severity == "fatal")
        for guard in chosen:
            guard.load()
        # A thread that loads holds locks, and an old model that is not released would be frozen.
        if (late := wait_for_loads(self.warm_timeout)) is not None:
            seen = f"a load or a release did not end within {self.warm_timeout:g} s"
            fix = "Prepare after it has ended."
            raise ForkUnsafe((Hazard("python thread", f"guard {late!r}", seen, fix, "fatal"),))
        generations = {guard: guard.status().generation for guard in chosen}
        before = _check_order(generations)
        THREADS.end_idle()
        ended = _hazards.end_threads() if self.on_hazard == "fix" else ()
        kept, why_mortal = _to_make_immortal(chosen, self.immortalize, renewed_here=renewed_here)
        copied = _copies(guard for guard in chosen if guard not in kept) if self.immortalize == "auto" else ()
        found = (*_hazards.find_hazards(process), *copied, *ended)
        _enforce(self.on_hazard, found)
        state = Prepared(os.getpid(), {**(before or {}), **generations}, () if self.on_hazard == "warn" else found)
        _compile_for_children(state)
        with _installed(state):
            tried, failed = self._try(chosen)
            frozen = _freeze(again=before is not None) if self.freeze else 0
            made = _immortalize(kept) if self.immortalize else None
        return ForkReport(
            guards=tuple(guard.name for guard in chosen),
            hazards=(*failed, *found),
            tried=tried,
            frozen=frozen,
            immortal=made,
            why_mortal=why_mortal,
            private=_memory.private(fresh=True),
            seconds=time.monotonic() - started,
        )

    def _try(self, chosen: Sequence[ModelGuard[Any]]) -> tuple[dict[str, float], list[Hazard]]:
        """Run each guard's warm-up in a child: how long each took, and, if hazards only warn, which failed."""
        tried, failed = {}, list[Hazard]()
        for guard in chosen:
            if guard.engine.options.warmup is None:
                continue
            with forking("trial"):
                result = child_processes.run_trial(partial(_warm_up_uncounted, guard), self.warm_timeout)
            if not result.ok:
                bad = _failed_trial(guard, result, self.warm_timeout)
                _enforce(self.on_hazard, (bad,))
                failed.append(bad)
            tried[guard.name] = result.seconds
        return tried, failed


def check_immortalize(value: object) -> None:
    """Check that it is one of the choices, and possible here."""
    if not isinstance(value, bool | str) or value not in get_args(Immortalize):
        why = "must be True, False or 'auto'"
        raise InvalidOption("immortalize", value, why=why, fix="'auto' is the right choice for most services.")
    if value is True and (why_not := _immortal.immortalize_unsupported()) is not None:
        raise NotSupported("immortalize=True", reason=why_not)


def check_guards(given: Iterable[object]) -> None:
    for guard in given:
        if not isinstance(guard, ModelGuard):
            raise InvalidOption("guards", guard, why="must be guards", fix=_fix_for(guard))


def _chosen(guards: Sequence[ModelGuard[Any]]) -> tuple[ModelGuard[Any], ...]:
    check_guards(guards)
    marked = (guard for guard in all_guards if guard.prefork)
    chosen = tuple(dict.fromkeys(guards)) or tuple(sorted(marked, key=lambda guard: guard.name))
    if not chosen:
        fix = "Give a guard, or make it with guard(..., prefork=True) in a module that is imported before."
        raise InvalidOption("guards", (), why="must not be empty, and no guard has prefork=True", fix=fix)
    return chosen


def _fix_for(given: object) -> str:
    if isinstance(given, list | tuple | set):
        return "Give each guard as an argument of its own: prepare(*guards)."
    if callable(given) and isinstance(owner_of(given), ModelGuard):
        return "Give the guard of this function: prepare(guard_of(function))."
    return "Give what modelguard.guard() returned."


def _check_order(generations: Mapping[ModelGuard[Any], int]) -> Mapping[ModelGuard[Any], int] | None:
    """What this process is prepared for, if it is: some of these models have been replaced since, or are new."""
    if _current is None:
        return None
    if _current.pid != os.getpid():
        why = "this is a child of the process that was prepared"
        raise ForkOrder("prepare", why=why, fix="Prepare in the parent; workers call in_child().")
    if generations == _current.generations:
        why = "this process is already prepared, and no model has been replaced since"
        raise ForkOrder("prepare", why=why, fix="Call it once, or again after a reload.")
    return _current.generations


def _enforce(on_hazard: OnHazard, found: tuple[Hazard, ...]) -> None:
    refused = [hazard for hazard in found if hazard.severity == "fatal"] if on_hazard == "fix" else found
    if refused and on_hazard != "warn":
        raise ForkUnsafe(found)
    for hazard in found:
        if hazard.severity != "fixed" or on_hazard == "warn":
            warnings.warn(str(hazard), ForkHazard, stacklevel=outside())  # the line that called prepare()


def _compile_for_children(state: Prepared) -> None:
    """Have compilers make here, once, what each child would make for itself, as their code is for a number of threads.

    The trial counts a child that compiles for minutes as hung.
    """
    if not _models.compilers():
        return
    with _hazards.with_childrens_threads(state.hazards) as differ:
        for guard in state.generations if differ else ():
            with suppress(Exception):  # the trial reports it
                guard.engine.warm_up()


@contextmanager
def _installed(state: Prepared) -> Iterator[None]:
    """Have children repair themselves from now on, unless the block fails: then all is as it was."""
    global _current
    before, _current = _current, state
    # Not at the import: what the application has registered meanwhile comes first. Once: else signals stayed blocked.
    if _first.acquire(blocking=False):
        fork_hooks.at_fork(
            fork_hooks.Rank.REPAIR, before=_before_fork, in_parent=_after_fork_in_parent, in_child=_after_fork
        )
    try:
        yield
    except BaseException:
        _current = before
        raise


def _warm_up_uncounted(guard: ModelGuard[Any]) -> None:
    """Warm up in a trial child: what it counts with prometheus_client would be a worker's for ever."""
    with ExitStack() as stack:
        if os.access(folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR", ""), os.W_OK):
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        guard.engine.warm_up()


def _failed_trial(guard: ModelGuard[Any], result: child_processes.TrialResult, timeout: float) -> Hazard:
    owner = f"guard {guard.name!r}"
    if result.hung:
        seen = f"its warm-up hung for {timeout:g} s in a child:\n{result.report}"
        fix = "See the child's stacks above: it waits for something that exists only in the parent."
        return Hazard("hang", owner, seen, fix, "fatal")
    return Hazard("warm-up", owner, f"its warm-up failed in a child:\n{result.report}", "Fix the warm-up.", "fatal")


def _freeze(*, again: bool) -> int:
    if again:  # otherwise the replaced model's garbage would stay frozen forever
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()


def _immortalize(guards: Sequence[ModelGuard[Any]]) -> ImmortalReport | None:
    made = _immortal.immortalize(*_loaded_by(guards)) if guards else None
    if _immortal.immortalize_program():
        with suppress(NotSupported):
            _allocator.trim()  # the walk through a model leaves free heap behind: 52 MB for ja_ginza
    return made


def _to_make_immortal(
    chosen: Sequence[ModelGuard[Any]], wanted: Immortalize, *, renewed_here: bool
) -> tuple[Sequence[ModelGuard[Any]], str | None]:
    """The guards whose models should become immortal, and why others should not."""
    if wanted != "auto":
        return (chosen, None) if wanted else ((), "not asked for")
    if (why := _immortal.immortalize_unsupported()) is not None:
        return (), why
    kept = tuple(guard for guard in chosen if not (renewed_here and guard.engine.renews_weights))
    renewed = ", ".join(guard.name for guard in chosen if guard not in kept)
    why = f"{renewed}: {_RENEWED}" if renewed else None
    if kept and (size := _size(kept)) < _IMMORTALIZE_FROM:
        small = f"the models take only {_units.format_bytes(size)}"
        return (), small if why is None else f"{small}; {why}"
    return kept, why


def _copies(mortal: Iterable[ModelGuard[Any]]) -> tuple[Hazard, ...]:
    """Those of the guards whose objects stay mortal of which each child will copy much as it reads them."""
    why = _immortal.immortalize_unsupported() or _RENEWED  # what is small is not worth a warning either
    found = []
    for guard in mortal:
        # Of an array or another large object, a reader writes to the first page alone.
        size = _graph.measure(*_loaded_by((guard,)), enough=_IMMORTALIZE_FROM, most=mmap.PAGESIZE)
        if size >= _IMMORTALIZE_FROM:
            seen = f"each child copies its Python objects as it reads them: up to N + 1 copies with N workers ({why})"
            found.append(Hazard("copies", f"guard {guard.name!r}", seen, _ONE_COPY, "warning"))
    return tuple(found)


def _loaded_by(chosen: Sequence[ModelGuard[Any]]) -> list[Any]:
    current = (guard.engine.state.current for guard in chosen)
    return [generation.model for generation in current if generation is not None]


def _size(chosen: Sequence[ModelGuard[Any]]) -> int:
    """Bytes of the models: what their loads have added or, if that is little, their objects up to the bound.

    A model that was made when a module was imported, or in freed memory, adds nothing when it is loaded.
    """
    grown = sum(guard.status().model_bytes or 0 for guard in chosen)
    if grown >= _IMMORTALIZE_FROM:
        return grown
    return max(grown, _graph.measure(*_loaded_by(chosen), enough=_IMMORTALIZE_FROM))
