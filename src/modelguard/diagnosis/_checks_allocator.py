"""MG1xx: whether the intended allocator is the one in use."""

from __future__ import annotations

from collections.abc import Iterable

from modelguard.diagnosis._facts import Facts, Variable
from modelguard.diagnosis._findings import Check, Evidence, Level
from modelguard.environment._allocator_kinds import Problem, ProblemKind

__all__ = ["CHECKS"]

_RUN = "Set it before the program starts (shell, unit file, image), or use 'modelguard run --allocator auto'."

#: Variables other than LD_PRELOAD that are read only when a program starts.
_AT_EXEC = ("MALLOC_ARENA_MAX", "MALLOC_CONF", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "PYTHONMALLOC")


def _placebo(facts: Facts) -> Evidence | None:
    late = _set_late(facts, ("LD_PRELOAD",))
    problems = _problems(facts, "placebo")
    if not late and not problems:
        return None
    seen = (*(f"{variable.where} sets LD_PRELOAD" for variable in late), *(problem.seen for problem in problems))
    return Evidence(seen, _RUN)


def _missing(facts: Facts) -> Evidence | None:
    return _evidence(_problems(facts, "missing"))


def _background_threads(facts: Facts) -> Evidence | None:
    if not (facts.server and facts.server.forks) and not facts.running("forked"):
        return None
    fix = "Remove background_thread:true from MALLOC_CONF if workers are forked."
    if problems := _problems(facts, "background threads"):
        return Evidence(tuple(problem.seen for problem in problems), fix)
    settings, preload = facts.last("MALLOC_CONF"), facts.last("LD_PRELOAD")
    enabled = settings is not None and "background_thread:true" in (settings.value or "")
    if settings is None or not enabled or preload is None or "jemalloc" not in (preload.value or ""):
        return None
    return Evidence((f"{settings.where} has MALLOC_CONF={settings.value}, and its server forks workers",), fix)


def _exec_variables(facts: Facts) -> Evidence | None:
    late = _set_late(facts, _AT_EXEC)
    if not late:
        return None
    return Evidence(tuple(f"{variable.where} sets {variable.name}" for variable in late), _RUN)


def _unused_settings(facts: Facts) -> Evidence | None:
    return _evidence(_problems(facts, "unused setting"), level="note")


def _two(facts: Facts) -> Evidence | None:
    if two := _problems(facts, "two allocators"):
        return _evidence(two)
    return _evidence(_problems(facts, "private copy"), level="note")


def _set_late(facts: Facts, names: Iterable[str]) -> list[Variable]:
    """The variables that are set after the start, to values other than at the start."""
    named = facts.named(*names)
    started_with = {(variable.name, variable.value) for variable in named if variable.moment == "exec"}
    return [v for v in named if v.moment != "exec" and (v.name, v.value) not in started_with]


def _problems(facts: Facts, kind: ProblemKind) -> list[Problem]:
    return [problem for problem in facts.problems if problem.kind == kind]


def _evidence(problems: list[Problem], level: Level = "fault") -> Evidence | None:
    if not problems:
        return None
    fixes = dict.fromkeys(problem.fix for problem in problems)
    return Evidence(tuple(problem.seen for problem in problems), " ".join(fixes), level)


CHECKS = (
    Check(
        "MG101",
        "LD_PRELOAD is set, but not in force",
        "The dynamic linker reads LD_PRELOAD once, when a program starts. If it is set later, by a configuration such "
        "as gunicorn's raw_env or by Python, it silently has no effect.",
        _placebo,
    ),
    Check(
        "MG102",
        "LD_PRELOAD names a file that does not exist",
        "The dynamic linker prints a warning, which servers often hide, and continues without the file: the service "
        "uses the allocator that should have been replaced.",
        _missing,
    ),
    Check(
        "MG103",
        "jemalloc runs background threads in a server that forks",
        "These threads return freed memory in the background, but threads do not survive a fork: the workers do not "
        "have them.",
        _background_threads,
    ),
    Check(
        "MG104",
        "A variable that is read at program start is set later",
        "glibc, jemalloc and Python read these variables once, when the program starts. If they are set later, they "
        "have no effect.",
        _exec_variables,
    ),
    Check(
        "MG105",
        "MALLOC_CONF is set, but jemalloc is not in use",
        "Only jemalloc reads this variable, so it has no effect.",
        _unused_settings,
    ),
    Check(
        "MG106",
        "More than one allocator is loaded",
        "Only one of them serves malloc. A package's private copy is harmless, but its presence and its figures say "
        "nothing about the service. Of two preloaded allocators, the first is used.",
        _two,
    ),
)
