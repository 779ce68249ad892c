"""MG1xx: whether the intended allocator is the one in use."""

from __future__ import annotations

import re
from collections.abc import Iterable

from modelguard.diagnosis._facts import Facts, Variable
from modelguard.diagnosis._findings import Check, Evidence, Level, Remedy
from modelguard.environment import _capacities
from modelguard.environment._allocator_kinds import Problem, ProblemKind, kind_of

__all__ = ["CHECKS"]

_RUN = "Set it before the program starts (shell, unit file, image), or use 'modelguard run --allocator auto'."

#: Variables other than LD_PRELOAD that are read only when a program starts.
_AT_EXEC = ("MALLOC_ARENA_MAX", "MALLOC_CONF", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "PYTHONMALLOC")

#: From this number of threads on, freed memory that stays in arenas counts: 8 for each CPU may be made.
_MANY_THREADS = 16

#: Those that only glibc's allocator reads.
_GLIBC = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def _placebo(facts: Facts) -> Evidence | None:
    late = [variable for variable in _set_late(facts, ("LD_PRELOAD",)) if not _serves(facts, variable.value)]
    problems = _problems(facts, "placebo")
    if not late and not problems:
        return None
    seen = (
        *(f"{variable.where} sets LD_PRELOAD, and {_served(facts)}" for variable in late),
        *(problem.seen for problem in problems),
    )
    start = facts.named("LD_PRELOAD")[:1]
    return Evidence(seen, _RUN, remedy=_preload(*[variable.value for variable in (*late, *start)]))


def _missing(facts: Facts) -> Evidence | None:
    problems = _problems(facts, "missing")
    values = [variable.value for variable in facts.named("LD_PRELOAD")]
    return _evidence(problems, remedy=_preload(*values))


def _background_threads(facts: Facts) -> Evidence | None:
    problems, settings = _problems(facts, "background threads"), facts.last("MALLOC_CONF")
    if not facts.running("forked") or not problems:
        return None
    rest = [] if settings is None else [o for o in settings.value.split(",") if not o.startswith("background_thread")]
    remedy = Remedy(environ=(f"MALLOC_CONF={','.join(rest)}",)) if rest else Remedy(unset=("MALLOC_CONF",))
    fix = "Remove background_thread:true from MALLOC_CONF if workers are forked."
    return Evidence(tuple(problem.seen for problem in problems), fix, remedy=remedy)


def _exec_variables(facts: Facts) -> Evidence | None:
    late = _set_late(facts, _AT_EXEC)
    if not late:
        return None
    remedy = Remedy(environ=tuple(f"{variable.name}={variable.value}" for variable in late))
    seen = tuple(f"{variable.where} sets {variable.name}" for variable in late)
    return Evidence(seen, "Set it before the program starts: in the shell, the unit file or the image.", remedy=remedy)


def _unused_settings(facts: Facts) -> Evidence | None:
    remedy = Remedy(run=("--allocator", "jemalloc"))
    return _evidence(_problems(facts, "unused setting"), level="note", remedy=remedy)


def _two(facts: Facts) -> Evidence | None:
    if two := _problems(facts, "two allocators"):
        given = facts.last("LD_PRELOAD")
        first = re.split(r"[\s:]+", given.value)[0] if given else ""
        return _evidence(two, remedy=Remedy(environ=(f"LD_PRELOAD={first}",)) if first else None)
    return _evidence(_problems(facts, "private copy"), level="note")


def _other_allocators_settings(facts: Facts) -> Evidence | None:
    set_for_glibc = [variable for variable in facts.named(*_GLIBC) if variable.moment == "exec"]
    others = [process.inside.malloc for process in facts.serving if process.inside and process.inside.malloc]
    file = next((file for file in others if kind_of(file) not in (None, "glibc")), None)
    if not set_for_glibc or file is None:
        return None
    names = tuple(dict.fromkeys(variable.name for variable in set_for_glibc))
    seen = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set, but malloc is served by {file}"
    return Evidence((seen,), f"Remove {' and '.join(names)}.", "note", Remedy(unset=names))


def _misspelt(facts: Facts) -> Evidence | None:
    if not facts.misspelt:
        return None
    seen = tuple(f"{each.where} has {each.name}, which nothing reads; {each.meant} is read" for each in facts.misspelt)
    settings = tuple(f"{each.meant}={each.value}" for each in facts.misspelt if each.value)
    fix = f"Write {', '.join(each.meant for each in facts.misspelt)}, or remove the variable."
    return Evidence(seen, fix, remedy=Remedy(environ=settings, unset=tuple(each.name for each in facts.misspelt)))


def _not_understood(facts: Facts) -> Evidence | None:
    wrong = [
        (each, why)
        for each in facts.variables
        if (why := _capacities.why_not_understood(each.name, each.value)) is not None
    ]
    if not wrong:
        return None
    seen = tuple(f"{variable.where} sets {variable.name}={variable.value}: {why}" for variable, why in wrong)
    names = tuple(dict.fromkeys(variable.name for variable, _ in wrong))
    return Evidence(seen, f"Correct the value, or remove {' and '.join(names)}.", remedy=Remedy(unset=names))


def _arenas(facts: Facts) -> Evidence | None:
    """Threads that answer requests allocate at the same time; those of thread pools for operations hardly do."""
    server, tunables = facts.server, facts.last("GLIBC_TUNABLES")
    limited = facts.named("MALLOC_ARENA_MAX") or (tunables and "glibc.malloc.arena_max=" in tunables.value)
    if server is None or server.threads < _MANY_THREADS or limited:
        return None
    if any(kind_of(process.inside.malloc or "") != "glibc" for process in facts.serving if process.inside):
        return None
    seen = f"{server.kind} answers on {server.threads} threads in each process, and nothing limits glibc's arenas"
    return Evidence((seen,), "Set MALLOC_ARENA_MAX=2.", "note", Remedy(environ=("MALLOC_ARENA_MAX=2",)))


def _set_late(facts: Facts, names: Iterable[str]) -> list[Variable]:
    """The variables that are set after the start, to values other than at the start."""
    named = facts.named(*names)
    started_with = {(variable.name, variable.value) for variable in named if variable.moment == "exec"}
    late = {v.name: v for v in named if v.moment != "exec" and v.value and (v.name, v.value) not in started_with}
    return list(late.values())


def _serves(facts: Facts, preload: str) -> bool:
    """Whether an allocator of the kind that a preload names serves ``malloc``."""
    wanted = kind_of(re.split(r"[\s:]+", preload)[0])
    files = [process.inside.malloc for process in facts.serving if process.inside]
    return wanted is not None and bool(files) and all(kind_of(file or "") == wanted for file in files)


def _served(facts: Facts) -> str:
    files = [process.inside.malloc for process in facts.serving if process.inside and process.inside.malloc]
    return f"malloc is served by {files[0]}" if files else "it is not loaded"


def _preload(*values: str) -> Remedy:
    """Start with the allocator that was meant."""
    kinds = (kind_of(entry) for value in values for entry in re.split(r"[\s:]+", value) if entry)
    kind = next((kind for kind in kinds if kind not in (None, "glibc", "unknown")), None)
    return Remedy(unset=("LD_PRELOAD",), run=("--allocator", kind or "auto"))


def _problems(facts: Facts, kind: ProblemKind) -> list[Problem]:
    return [problem for problem in facts.problems if problem.kind == kind]


def _evidence(problems: list[Problem], level: Level = "fault", remedy: Remedy | None = None) -> Evidence | None:
    if not problems:
        return None
    fixes = dict.fromkeys(problem.fix for problem in problems)
    return Evidence(tuple(problem.seen for problem in problems), " ".join(fixes), level, remedy)


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
    Check(
        "MG107",
        "Settings of glibc's allocator are left over",
        "Only glibc's own allocator reads these variables. Since another one was preloaded, they have no effect.",
        _other_allocators_settings,
    ),
    Check(
        "MG108",
        "A variable's name is misspelt",
        "Nothing reads it, and nothing says so: the service runs as if it were not set.",
        _misspelt,
    ),
    Check(
        "MG109",
        "A variable's value is not understood by what reads it",
        "Its reader uses its default or a part of the value, and prints a warning at most, which servers often hide.",
        _not_understood,
    ),
    Check(
        "MG110",
        "Many threads, and no limit of glibc's arenas",
        "glibc makes up to 8 arenas for each CPU, so that threads do not wait for each other. Each arena keeps what "
        "was freed in it, so a service whose threads take turns grows to a multiple of what it uses.",
        _arenas,
    ),
)
