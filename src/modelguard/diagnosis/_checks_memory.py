"""MG3xx: memory limits and swap."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable

from modelguard._units import format_bytes
from modelguard.diagnosis._facts import (
    CAPS,
    THREAD_VARIABLES,
    Evidence,
    Facts,
    Level,
    Remedy,
    ServiceProcess,
    Variable,
    check,
)
from modelguard.environment import _knobs
from modelguard.environment._allocator_files import Problem, ProblemKind, kind_of

#: Bytes. A few pages in swap that are no longer needed do not mean that memory is short.
_SWAP = 10_000_000

#: The part of the limit above which the next larger request may be the last: a tenth of 450 MB is one image.
_NEAR = 0.9

_ROOM = (
    "Start fewer workers, let them share the model (MG402, MG404), find what grows (modelguard diagnose), or raise the "
    "limit. A guard with MemoryLimit('80%') replaces its model before the kernel acts."
)


@check(
    "MG301",
    "Nothing limits the service's memory",
    "Without a limit, a growing service affects the whole machine, including SSH, and policies with a percentage "
    "such as MemoryLimit('80%') have nothing to refer to.",
)
def _no_limit(facts: Facts) -> Evidence | None:
    limit = facts.machine.limit
    if limit is None or limit.bytes is not None:
        return None
    slowed = "" if limit.high is None else f"; memory.high slows it down above {format_bytes(limit.high)}"
    seen = f"no cgroup that is visible from here limits its memory{slowed}"
    fix = "Give the service a limit: MemoryMax= in its unit, --memory in docker, resources.limits.memory in Kubernetes."
    return Evidence((seen,), fix, "note")


@check(
    "MG302",
    "Swap is in use",
    "A whole model is read for each answer. Pages in swap must be read back one by one, so answers take seconds, "
    "and a growing service becomes slow instead of being killed.",
)
def _swapping(facts: Facts) -> Evidence | None:
    fix = "Find what has grown (MG2xx, MG4xx), add memory to the machine, or set a limit and MemorySwapMax=0."
    swapped = [process for process in facts.processes if process.swap > _SWAP]
    if swapped:
        seen = (f"process {process.pid} has {format_bytes(process.swap)} in swap" for process in swapped)
        return Evidence(tuple(seen), fix)
    machine = facts.machine.swapped
    if facts.processes or machine is None or machine <= _SWAP:
        return None
    unassigned = f"the machine has {format_bytes(machine)} in swap; the owner is unknown until the service runs"
    return Evidence((unassigned,), fix, "note")


@check(
    "MG304",
    "The kernel has killed processes for want of memory",
    "A server starts a new worker for each that was killed, so it seems to run, while all calls of the killed one "
    "fail and each new one loads the model again.",
)
def _killed(facts: Facts) -> Evidence | None:
    limit, strain = facts.machine.limit, facts.machine.strain
    if strain is None or not strain.killed:
        return None
    limited = limit is not None and limit.bytes is not None
    seen = [f"the kernel has killed {strain.killed} process(es) of its cgroup, for want of memory"]
    if limited and limit is not None:
        seen.append(f"{limit.source} is {format_bytes(limit.bytes or 0)}{_peak(facts)}")
    # Without a service, or without a limit of its own, another program may have been killed.
    level: Level = "fault" if facts.words or (facts.processes and limited) else "note"
    return Evidence(tuple(seen), _ROOM, level)


@check(
    "MG305",
    "The memory in use is close to the limit",
    "At the limit the kernel kills a process. Only memory that it cannot drop is counted: file cache, such as "
    "weights that are mapped from a file, does no harm.",
)
def _near_limit(facts: Facts) -> Evidence | None:
    limit, strain = facts.machine.limit, facts.machine.strain
    held = None if strain is None or strain.killed else strain.held  # after kills, MG304 says it
    if limit is None or limit.bytes is None or held is None or held < limit.bytes * _NEAR:
        return None
    seen = f"{format_bytes(held)} of the {format_bytes(limit.bytes)} of {limit.source} are held{_peak(facts)}"
    return Evidence((seen,), _ROOM, "fault" if facts.processes else "note")


def _peak(facts: Facts) -> str:
    peak = None if facts.machine.strain is None else facts.machine.strain.peak
    return "" if peak is None else f"; the most that was used, file cache included, is {format_bytes(peak)}"


@check(
    "MG303",
    "Metric files of ended processes are left behind",
    "prometheus_client keeps a file for each worker in PROMETHEUS_MULTIPROC_DIR and reads all of them for each "
    "scrape. Files of ended processes are never removed, so scrapes take ever more time and memory, and gauges "
    "count workers that are gone.",
)
def _stale_metrics(facts: Facts) -> Evidence | None:
    stale, folder = facts.stale_metrics, facts.last("PROMETHEUS_MULTIPROC_DIR")
    if not stale or folder is None:
        return None
    seen = f"{folder.value} has {len(stale)} file(s) of processes that do not exist, such as {stale[0]}"
    remedy = Remedy(before=(f"rm -f {shlex.quote(folder.value)}/*.db",))
    fix = "Empty the folder before the service starts, and call mark_process_dead in gunicorn's child_exit."
    return Evidence((seen,), fix, remedy=remedy)


# MG1xx: whether the intended allocator is the one in use.

_RUN = "Set it before the program starts (shell, unit file, image), or use 'modelguard run --allocator auto'."

#: Variables other than LD_PRELOAD that are read only when a program starts.
_AT_EXEC = ("MALLOC_ARENA_MAX", "MALLOC_CONF", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "PYTHONMALLOC")

#: From this number of threads on, freed memory that stays in arenas counts: 8 for each CPU may be made.
_MANY_THREADS = 16

#: Those that only glibc's allocator reads.
_GLIBC = ("MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


@check(
    "MG101",
    "LD_PRELOAD is set, but not in force",
    "The dynamic linker reads LD_PRELOAD once, when a program starts. If it is set later, by a configuration such "
    "as gunicorn's raw_env or by Python, it silently has no effect.",
)
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


@check(
    "MG102",
    "LD_PRELOAD names a file that does not exist",
    "The dynamic linker prints a warning, which servers often hide, and continues without the file: the service "
    "uses the allocator that should have been replaced.",
)
def _missing(facts: Facts) -> Evidence | None:
    problems = _problems(facts, "missing")
    values = [variable.value for variable in facts.named("LD_PRELOAD")]
    return _evidence(problems, remedy=_preload(*values))


@check(
    "MG103",
    "jemalloc runs background threads in a server that forks",
    "These threads return freed memory in the background, but threads do not survive a fork: the workers do not "
    "have them.",
)
def _background_threads(facts: Facts) -> Evidence | None:
    problems, settings = _problems(facts, "background threads"), facts.last("MALLOC_CONF")
    if not facts.running("forked") or not problems:
        return None
    rest = [] if settings is None else [o for o in settings.value.split(",") if not o.startswith("background_thread")]
    remedy = Remedy(environ=(f"MALLOC_CONF={','.join(rest)}",)) if rest else Remedy(unset=("MALLOC_CONF",))
    fix = "Remove background_thread:true from MALLOC_CONF if workers are forked."
    return Evidence(tuple(problem.seen for problem in problems), fix, remedy=remedy)


@check(
    "MG104",
    "A variable that is read at program start is set later",
    "glibc, jemalloc and Python read these variables once, when the program starts. If they are set later, they "
    "have no effect.",
)
def _exec_variables(facts: Facts) -> Evidence | None:
    late = _set_late(facts, _AT_EXEC)
    if not late:
        return None
    remedy = Remedy(environ=tuple(f"{variable.name}={variable.value}" for variable in late))
    seen = tuple(f"{variable.where} sets {variable.name}" for variable in late)
    return Evidence(seen, "Set it before the program starts: in the shell, the unit file or the image.", remedy=remedy)


@check(
    "MG105",
    "MALLOC_CONF is set, but jemalloc is not in use",
    "Only jemalloc reads this variable, so it has no effect.",
)
def _unused_settings(facts: Facts) -> Evidence | None:
    remedy = Remedy(run=("--allocator", "jemalloc"))
    return _evidence(_problems(facts, "unused setting"), level="note", remedy=remedy)


@check(
    "MG106",
    "More than one allocator is loaded",
    "Only one of them serves malloc. A package's private copy is harmless, but its presence and its figures say "
    "nothing about the service. Of two preloaded allocators, the first is used.",
)
def _two(facts: Facts) -> Evidence | None:
    if two := _problems(facts, "two allocators"):
        given = facts.last("LD_PRELOAD")
        first = re.split(r"[\s:]+", given.value)[0] if given else ""
        return _evidence(two, remedy=Remedy(environ=(f"LD_PRELOAD={first}",)) if first else None)
    return _evidence(_problems(facts, "private copy"), level="note")


@check(
    "MG107",
    "Settings of glibc's allocator are left over",
    "Only glibc's own allocator reads these variables. Since another one was preloaded, they have no effect.",
)
def _other_allocators_settings(facts: Facts) -> Evidence | None:
    set_for_glibc = [variable for variable in facts.named(*_GLIBC) if variable.moment == "exec"]
    others = [process.inside.malloc for process in facts.serving if process.inside and process.inside.malloc]
    file = next((file for file in others if kind_of(file) not in (None, "glibc")), None)
    if not set_for_glibc or file is None:
        return None
    names = tuple(dict.fromkeys(variable.name for variable in set_for_glibc))
    seen = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set, but malloc is served by {file}"
    return Evidence((seen,), f"Remove {' and '.join(names)}.", "note", Remedy(unset=names))


@check(
    "MG108",
    "A variable's name is misspelt",
    "Nothing reads it, and nothing says so: the service runs as if it were not set.",
)
def _misspelt(facts: Facts) -> Evidence | None:
    if not facts.misspelt:
        return None
    seen = tuple(f"{each.where} has {each.name}, which nothing reads; {each.meant} is read" for each in facts.misspelt)
    settings = tuple(f"{each.meant}={each.value}" for each in facts.misspelt if each.value)
    fix = f"Write {', '.join(each.meant for each in facts.misspelt)}, or remove the variable."
    return Evidence(seen, fix, remedy=Remedy(environ=settings, unset=tuple(each.name for each in facts.misspelt)))


@check(
    "MG109",
    "A variable's value is not understood by what reads it",
    "Its reader uses its default or a part of the value, and prints a warning at most, which servers often hide.",
)
def _not_understood(facts: Facts) -> Evidence | None:
    wrong = [
        (each, why) for each in facts.variables if (why := _knobs.why_not_understood(each.name, each.value)) is not None
    ]
    if not wrong:
        return None
    seen = tuple(f"{variable.where} sets {variable.name}={variable.value}: {why}" for variable, why in wrong)
    names = tuple(dict.fromkeys(variable.name for variable, _ in wrong))
    return Evidence(seen, f"Correct the value, or remove {' and '.join(names)}.", remedy=Remedy(unset=names))


@check(
    "MG110",
    "Many threads, and no limit of glibc's arenas",
    "glibc makes up to 8 arenas for each CPU, so that threads do not wait for each other. Each arena keeps what "
    "was freed in it, so a service whose threads take turns grows to a multiple of what it uses.",
)
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
    named = facts.named(*names)
    started_with = {(variable.name, variable.value) for variable in named if variable.moment == "exec"}
    late = {v.name: v for v in named if v.moment != "exec" and v.value and (v.name, v.value) not in started_with}
    return list(late.values())


def _serves(facts: Facts, preload: str) -> bool:
    wanted = kind_of(re.split(r"[\s:]+", preload)[0])
    files = [process.inside.malloc for process in facts.serving if process.inside]
    return wanted is not None and bool(files) and all(kind_of(file or "") == wanted for file in files)


def _served(facts: Facts) -> str:
    files = [process.inside.malloc for process in facts.serving if process.inside and process.inside.malloc]
    return f"malloc is served by {files[0]}" if files else "it is not loaded"


def _preload(*values: str) -> Remedy:
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


# MG2xx: caches and threads, and whether their settings took effect.

#: oneDNN also reads the first of these under an older name.
_ONEDNN = (CAPS[0], "DNNL_PRIMITIVE_CACHE_CAPACITY")
_IDEEP = CAPS[1]

#: Entries in each cache where the number of input shapes is unknown, as the preset has them.
_DEFAULT = _knobs.DEFAULT_ENTRIES

#: The most bytes that the code of one compiled primitive takes, and that other compiled code may take, as written
#: memory. Measured: 31 kB for each shape of a 1-d convolution, whose data take eight times as much beside it. 200
#: shapes of two of them: 12.4 MB of code and 93 MB of data; with a cap of 8, 0.1 MB of code (torch 2.13, x86-64).
_PER_ENTRY, _OTHER_CODE = 100_000, 2_000_000

_PRESET = "modelguard run --preset torch-cpu-dynamic -- COMMAND"


_CAPPED = Remedy(run=("--preset", "torch-cpu-dynamic"))


@check(
    "MG201",
    "One of the two oneDNN caches is capped, the other is not",
    "Neither cap is enough alone: 400 lengths through 8 convolutions grew by 339 MB without a cap, by 77 MB with "
    "only oneDNN's, and by 319 MB with only ideep's.",
)
def _one_cap(facts: Facts) -> Evidence | None:
    onednn, ideep = facts.last(*_ONEDNN), facts.last(_IDEEP)
    given = onednn or ideep
    if given is None or (onednn and ideep) or not _may_run_torch(facts):
        return None
    missing = _IDEEP if onednn else _ONEDNN[0]
    seen = f"{given.where} sets {given.name}={given.value}; {missing} is not set"
    wanted = _wanted(missing, given)
    fix = f"Also set {missing}={wanted}, or use: {_PRESET}"
    return Evidence((seen,), fix, remedy=Remedy(environ=(f"{missing}={wanted}",)))


def _wanted(missing: str, given: Variable) -> int:
    entries = _knobs.capacity(given.name, given.value)
    if entries is None or entries < 0 or (entries == 0 and given.name == _IDEEP):
        return _DEFAULT  # no limit, or a crash
    # ideep's must not be 0, even if oneDNN's is: see MG205.
    return max(1, entries) if missing == _IDEEP else entries


@check(
    "MG205",
    "LRU_CACHE_CAPACITY is read as 0, which crashes the process",
    "ideep needs room for at least one entry: torch 2.13 crashes with SIGSEGV at its first convolution on CPU. "
    "It reads the decimal digits at the start, so '', 'abc' and '0x10' are 0 too. "
    "The capacity of oneDNN's own cache may be 0.",
)
def _crash(facts: Facts) -> Evidence | None:
    cap = facts.last(_IDEEP)
    if cap is None or _knobs.why_unusable(_IDEEP, cap.value) is None or not _may_run_torch(facts):
        return None
    fix = f"Set {_IDEEP}=1 or more, or use: {_PRESET}"
    return Evidence((f"{cap.where} sets {cap.name}={cap.value}",), fix, remedy=Remedy(environ=(f"{_IDEEP}=1",)))


def _may_run_torch(facts: Facts) -> bool:
    return not facts.processes or any(process.torch for process in facts.processes)


@check(
    "MG202",
    "A variable is set too late",
    "OpenMP and BLAS libraries read their variables when they are loaded, oneDNN and ideep at their first use. "
    "Variables that are set afterwards silently have no effect.",
)
def _too_late(facts: Facts) -> Evidence | None:
    late = [variable for variable in facts.named(*THREAD_VARIABLES) if variable.moment == "after import"]
    ignored = [(variable, pool) for variable in late if (pool := _larger_pool(facts, variable))]
    seen = [
        f"{variable.where} sets {variable.name}={variable.value}, but {pool[0]} has {pool[1]} threads"
        for variable, pool in ignored
    ]
    needed = [f"{variable.name}={variable.value}" for variable, _ in ignored]
    cap = facts.last(*_ONEDNN)
    if cap is not None and cap.moment != "exec":
        above = _above_cap(facts, cap)
        seen += above
        needed += [f"{each.name}={each.value}" for each in facts.named(*_ONEDNN, _IDEEP) if above]
    if not seen:
        return None
    fix = f"Set it before the program starts: env {' '.join(dict.fromkeys(needed))} COMMAND"
    return Evidence(tuple(seen), fix, remedy=Remedy(environ=tuple(dict.fromkeys(needed))))


def _larger_pool(facts: Facts, variable: Variable) -> tuple[str, int] | None:
    pools = [pool for process in facts.serving if process.inside for pool in process.inside.pools]
    wanted = int(variable.value) if variable.value.isdecimal() else None
    return next((pool for pool in pools if wanted is not None and pool[1] > wanted), None)


def _above_cap(facts: Facts, cap: Variable) -> list[str]:
    entries = _knobs.capacity(cap.name, cap.value)
    allowed = None if entries is None or entries < 0 else entries * _PER_ENTRY + _OTHER_CODE
    return [
        f"{cap.where} sets {cap.name}={cap.value}, but process {process.pid} has written {_code(process)}, "
        "more than this cap allows"
        for process in facts.processes
        if allowed is not None and process.torch and process.compiled > allowed
    ]


@check(
    "MG203",
    "torch keeps compiled code for many input shapes, without caps",
    "oneDNN compiles code for each shape of an input and keeps it for up to 1024 shapes and layers: hundreds of "
    "MB. If inputs differ in length, memory grows with each new length.",
)
def _no_caps(facts: Facts) -> Evidence | None:
    if facts.named(*_ONEDNN, _IDEEP):
        return None
    grown = [process for process in facts.processes if process.torch and process.compiled > _OTHER_CODE]
    if not grown:
        return None
    seen = [f"process {process.pid} runs torch and has written {_code(process)}" for process in grown]
    seen += [
        f"process {process.pid} has grown by {format_bytes(process.grown)} during the requests"
        for process in grown
        if process.grown
    ]
    seen.append(f"neither {CAPS[0]} nor {CAPS[1]} is set")
    return Evidence(tuple(seen), f"Start it with: {_PRESET}", remedy=_CAPPED)


def _code(process: ServiceProcess) -> str:
    return f"{format_bytes(process.compiled)} of machine code compiled at run time"


@check(
    "MG204",
    "More threads than CPUs",
    "Unless told otherwise, each worker has a thread for each CPU, regardless of the quota and other workers. The "
    "threads then wait for each other, and with a quota the kernel stops all of them for most of each tenth of a "
    "second.",
)
def _threads(facts: Facts) -> Evidence | None:
    cpus, serving = facts.machine.cpus, facts.serving
    pools = [pool for process in serving if process.inside for pool in process.inside.pools]
    if cpus is None or not pools:
        return None
    library, threads = max(pools, key=lambda pool: (pool[1], pool[0] == "torch"))
    if threads * len(serving) <= math.ceil(cpus.count) or threads == 1:
        return None
    share = max(1, int(cpus.count / len(serving)))
    seen = (
        f"{len(serving)} process(es) answer requests, each with {threads} threads of {library}, on {cpus.count:g} "
        f"CPU(s) ({cpus.source})"
    )
    fix = f"Start it with OMP_NUM_THREADS={share}, and remove torch.set_num_threads if the program calls it."
    level: Level = "fault" if any(name == "torch" for name, _ in pools) else "note"
    names = [name for name in THREAD_VARIABLES if name == "OMP_NUM_THREADS" or facts.named(name)]
    return Evidence((seen,), fix, level, Remedy(environ=tuple(f"{name}={share}" for name in names)))
