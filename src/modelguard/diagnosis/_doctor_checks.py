"""The checks, by number: MG1xx the allocator, 2xx caches and threads, 3xx memory, 4xx servers, 5xx the interpreter."""

import math
import shlex
from collections.abc import Iterable

from modelguard._units import format_bytes
from modelguard.diagnosis import _facts
from modelguard.diagnosis._facts import ONEDNN, Evidence, Facts, Remedy, ServiceProcess, Variable, check
from modelguard.environment import _knobs
from modelguard.environment._allocator_files import Problem, ProblemKind, kind_of
from modelguard.environment._allocator_problems import entries

#: Bytes. A few pages in swap that are no longer needed do not mean that memory is short.
_SWAP = 10_000_000

#: The part of the limit above which the next larger request may be the last: a tenth of 450 MB is one image.
_NEAR = 0.9

_ROOM = (
    "Start fewer workers, let them share the model (MG402, MG404), find what grows (modelguard diagnose), or raise the "
    "limit. A guard with MemoryLimit('80%') replaces its model before the kernel acts."
)


@check("MG301 Nothing limits the service's memory")
def _no_limit(facts: Facts) -> Evidence | None:
    """A service that grows then harms the whole machine, and MemoryLimit('80%') has nothing to refer to."""
    limit = facts.machine.limit
    if limit is None or limit.bytes is not None:
        return None
    slowed = "" if limit.high is None else f"; memory.high slows it down above {format_bytes(limit.high)}"
    seen = f"no cgroup that is visible from here limits its memory{slowed}"
    fix = "Give the service a limit: MemoryMax= in its unit, --memory in docker, resources.limits.memory in Kubernetes."
    return Evidence([seen], fix, "note")


@check("MG302 Swap is in use")
def _swapping(facts: Facts) -> Evidence | None:
    """Pages in swap come back one by one: answers take seconds, and a growing service gets slow instead of killed."""
    fix = "Find what has grown (MG2xx, MG4xx), add memory to the machine, or set a limit and MemorySwapMax=0."
    swapped = [process for process in facts.processes if process.swap > _SWAP]
    if facts.processes:
        return Evidence([f"process {each.pid} has {format_bytes(each.swap)} in swap" for each in swapped], fix)
    machine = facts.machine.swapped or 0
    unassigned = f"the machine has {format_bytes(machine)} in swap; the owner is unknown until the service runs"
    return Evidence([unassigned] if machine > _SWAP else (), fix, "note")


@check("MG304 The kernel has killed processes for want of memory")
def _killed(facts: Facts) -> Evidence | None:
    """All calls of a killed worker fail, and each new one loads the model again, while the server seems to run."""
    limit, killed = facts.machine.limit, facts.machine.strain.killed
    if not killed:
        return None
    seen = [f"the kernel has killed {killed} process(es) of its cgroup, for want of memory"]
    limited = limit is not None and limit.bytes is not None
    if limited and limit is not None:
        seen.append(f"{limit.source} is {format_bytes(limit.bytes or 0)}{_peak(facts)}")
    # Without a service, or without a limit of its own, another program may have been killed.
    return Evidence(seen, _ROOM, "fault" if facts.words or (facts.processes and limited) else "note")


@check("MG305 The memory in use is close to the limit")
def _near_limit(facts: Facts) -> Evidence | None:
    """At the limit the kernel kills a process. What it can drop, such as mapped weights, is not counted."""
    limit, strain = facts.machine.limit, facts.machine.strain
    held = None if strain.killed else strain.held  # after kills, MG304 says it
    if limit is None or limit.bytes is None or held is None or held < limit.bytes * _NEAR:
        return None
    seen = f"{format_bytes(held)} of the {format_bytes(limit.bytes)} of {limit.source} are held{_peak(facts)}"
    return Evidence([seen], _ROOM, "fault" if facts.processes else "note")


def _peak(facts: Facts) -> str:
    peak = facts.machine.strain.peak
    return "" if peak is None else f"; the most that was used, file cache included, is {format_bytes(peak)}"


@check("MG303 Metric files of ended processes are left behind")
def _stale_metrics(facts: Facts) -> Evidence | None:
    """Each scrape reads all of them, so it takes ever more time and memory, and gauges count workers that are gone."""
    stale, folder = facts.stale_metrics, facts.last("PROMETHEUS_MULTIPROC_DIR")
    if not stale or folder is None:
        return None
    seen = f"{folder.value} has {len(stale)} file(s) of processes that do not exist, such as {stale[0]}"
    fix = "Empty the folder before the service starts, and call mark_process_dead in gunicorn's child_exit."
    return Evidence([seen], fix, remedy=Remedy(before=(f"rm -f {shlex.quote(folder.value)}/*.db",)))


# MG1xx: whether the intended allocator is the one in use.

_RUN = "Set it before the program starts (shell, unit file, image), or use 'modelguard run --allocator auto'."

#: Variables other than LD_PRELOAD that are read only when a program starts.
_AT_EXEC = (*_knobs.GLIBC, "MALLOC_CONF", "PYTHONMALLOC")

#: From this number of threads on, freed memory that stays in arenas counts: 8 for each CPU may be made.
_MANY_THREADS = 16


@check("MG101 LD_PRELOAD is set, but not in force")
def _preload_not_in_force(facts: Facts) -> Evidence | None:
    """The dynamic linker reads it when a program starts. Set later, as by gunicorn's raw_env, it has no effect."""
    late = [one for one in _variables_set_after_start(facts, "LD_PRELOAD") if not _serves(facts, one.value)]
    served = f"malloc is served by {facts.allocators[0]}" if facts.allocators else "it is not loaded"
    seen = [f"{variable.where} sets LD_PRELOAD, and {served}" for variable in late]
    seen += [problem.seen for problem in _problems(facts, "placebo")]
    return Evidence(seen, _RUN, remedy=_preload(*late, *facts.named("LD_PRELOAD")[:1]))


@check("MG102 LD_PRELOAD names a file that does not exist")
def _missing(facts: Facts) -> Evidence | None:
    """The dynamic linker warns, which servers often hide, and goes on with the allocator that was to be replaced."""
    return _evidence(facts, "missing", remedy=_preload(*facts.named("LD_PRELOAD")))


@check("MG103 jemalloc runs background threads in a server that forks")
def _background_threads(facts: Facts) -> Evidence | None:
    """They return freed memory in the background. Threads do not survive a fork, so the workers do not have them."""
    settings = facts.last("MALLOC_CONF")
    if not facts.running("forked"):
        return None
    rest = [] if settings is None else [o for o in settings.value.split(",") if not o.startswith("background_thread")]
    remedy = Remedy(environ=(f"MALLOC_CONF={','.join(rest)}",)) if rest else Remedy(unset=("MALLOC_CONF",))
    seen = [problem.seen for problem in _problems(facts, "background threads")]
    return Evidence(seen, "Remove background_thread:true from MALLOC_CONF if workers are forked.", remedy=remedy)


@check("MG104 A variable that is read at program start is set later")
def _variable_too_late_for_start(facts: Facts) -> Evidence | None:
    """When the program starts, glibc, jemalloc and Python read it. Later it has no effect."""
    late = _variables_set_after_start(facts, *_AT_EXEC)
    remedy = Remedy(environ=tuple(f"{variable.name}={variable.value}" for variable in late))
    seen = [f"{variable.where} sets {variable.name}" for variable in late]
    return Evidence(seen, "Set it before the program starts: in the shell, the unit file or the image.", remedy=remedy)


@check("MG105 MALLOC_CONF is set, but jemalloc is not in use")
def _unused_settings(facts: Facts) -> Evidence | None:
    """Only jemalloc reads this variable, so it has no effect."""
    return _evidence(facts, "unused setting", Remedy(run=("--allocator", "jemalloc")), note=True)


@check("MG106 More than one allocator is loaded")
def _two(facts: Facts) -> Evidence | None:
    """One of them serves malloc, of two preloaded ones the first. A package's private copy is harmless, and unused."""
    if not _problems(facts, "two allocators"):
        return _evidence(facts, "private copy", note=True)
    given = facts.last("LD_PRELOAD")
    named = entries(given.value)[:1] if given else []
    remedy = Remedy(environ=(f"LD_PRELOAD={named[0]}",)) if named else None
    return _evidence(facts, "two allocators", remedy=remedy)


@check("MG107 Settings of glibc's allocator are left over")
def _other_allocators_settings(facts: Facts) -> Evidence | None:
    """Only glibc's own allocator reads them, and another one was preloaded: they have no effect."""
    names = tuple(dict.fromkeys(each.name for each in facts.named(*_knobs.GLIBC) if each.moment == "exec"))
    file = next((file for file in facts.allocators if kind_of(file) not in (None, "glibc")), None)
    if not names or file is None:
        return None
    seen = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set, but malloc is served by {file}"
    return Evidence([seen], f"Remove {' and '.join(names)}.", "note", Remedy(unset=names))


@check("MG108 A variable's name is misspelt")
def _misspelt(facts: Facts) -> Evidence | None:
    """Nothing reads it, and nothing says so: the service runs as if it were not set."""
    seen = [f"{each.where} has {each.name}, which nothing reads; {each.meant} is read" for each in facts.misspelt]
    settings = tuple(f"{each.meant}={each.value}" for each in facts.misspelt if each.value)
    fix = f"Write {', '.join(each.meant for each in facts.misspelt)}, or remove the variable."
    return Evidence(seen, fix, remedy=Remedy(environ=settings, unset=tuple(each.name for each in facts.misspelt)))


@check("MG109 A variable's value is not understood by what reads it")
def _not_understood(facts: Facts) -> Evidence | None:
    """Its reader uses its default or a part of the value, and prints a warning at most, which servers often hide."""
    wrong = [(each, why) for each in facts.variables if (why := _knobs.why_not_understood(each.name, each.value))]
    seen = [f"{_sets(variable)}: {why}" for variable, why in wrong]
    names = tuple(dict.fromkeys(variable.name for variable, _ in wrong))
    return Evidence(seen, f"Correct the value, or remove {' and '.join(names)}.", remedy=Remedy(unset=names))


@check("MG110 Many threads, and no limit of glibc's arenas")
def _arenas(facts: Facts) -> Evidence | None:
    """Up to 8 arenas are made for each CPU. Each keeps what was freed in it: a multiple of what is used."""
    # Threads that answer requests allocate at the same time; those of thread pools for operations hardly do.
    server, tunables = facts.server, facts.last("GLIBC_TUNABLES")
    limited = facts.named("MALLOC_ARENA_MAX") or (tunables and "glibc.malloc.arena_max=" in tunables.value)
    of_others = any(kind_of(said.malloc or "") != "glibc" for said in facts.answers)
    if server.threads < _MANY_THREADS or limited or of_others:
        return None
    seen = f"{server.kind} answers on {server.threads} threads in each process, and nothing limits glibc's arenas"
    return Evidence([seen], "Set MALLOC_ARENA_MAX=2.", "note", Remedy(environ=("MALLOC_ARENA_MAX=2",)))


def _sets(variable: Variable) -> str:
    return f"{variable.where} sets {variable.name}={variable.value}"


def _variables_set_after_start(facts: Facts, *names: str) -> list[Variable]:
    named = facts.named(*names)
    started_with = {(variable.name, variable.value) for variable in named if variable.moment == "exec"}
    late = {v.name: v for v in named if v.moment != "exec" and v.value and (v.name, v.value) not in started_with}
    return list(late.values())


def _serves(facts: Facts, preload: str) -> bool:
    wanted, answers = next(map(kind_of, entries(preload)), None), facts.answers
    return wanted is not None and bool(answers) and all(kind_of(said.malloc or "") == wanted for said in answers)


def _preload(*given: Variable) -> Remedy:
    kinds = (kind_of(entry) for variable in given for entry in entries(variable.value))
    kind = next((kind for kind in kinds if kind not in (None, "glibc", "unknown")), None)
    return Remedy(unset=("LD_PRELOAD",), run=("--allocator", kind or "auto"))


def _problems(facts: Facts, kind: ProblemKind) -> list[Problem]:
    return [problem for problem in facts.problems if problem.kind == kind]


def _evidence(facts: Facts, kind: ProblemKind, remedy: Remedy | None = None, *, note: bool = False) -> Evidence:
    found = _problems(facts, kind)
    fixes = dict.fromkeys(problem.fix for problem in found)
    return Evidence([problem.seen for problem in found], " ".join(fixes), "note" if note else "fault", remedy)


# MG2xx: caches and threads, and whether their settings took effect.

_IDEEP = _knobs.IDEEP

#: The most bytes that the code of one compiled primitive takes, and that other compiled code may take, as written
#: memory. Measured: 31 kB for each shape of a 1-d convolution, whose data take eight times as much beside it. 200
#: shapes of two of them: 12.4 MB of code and 93 MB of data; with a cap of 8, 0.1 MB of code (torch 2.13, x86-64).
_PER_ENTRY, _OTHER_CODE = 100_000, 2_000_000

_PRESET = "modelguard run --preset torch-cpu-dynamic -- COMMAND"


@check("MG201 One of the two oneDNN caches is capped, the other is not")
def _one_cap(facts: Facts) -> Evidence | None:
    """Neither is enough: 400 lengths grew by 339 MB without a cap, by 77 with oneDNN's, and by 319 with ideep's."""
    onednn, ideep = facts.last(*ONEDNN), facts.last(_IDEEP)
    given = onednn or ideep
    if given is None or (onednn and ideep) or not _may_run_torch(facts):
        return None
    missing = _IDEEP if onednn else ONEDNN[0]
    setting = f"{missing}={_wanted(missing, given)}"
    fix = f"Also set {setting}, or use: {_PRESET}"
    return Evidence([f"{_sets(given)}; {missing} is not set"], fix, remedy=Remedy(environ=(setting,)))


def _wanted(missing: str, given: Variable) -> int:
    entries = _knobs.capacity(given.name, given.value)
    if entries is None or entries < 0 or (entries == 0 and given.name == _IDEEP):
        return _knobs.DEFAULT_ENTRIES  # no limit, or a crash
    # ideep's must not be 0, even if oneDNN's is: see MG205.
    return max(1, entries) if missing == _IDEEP else entries


@check("MG205 LRU_CACHE_CAPACITY is read as 0, which crashes the process")
def _crash(facts: Facts) -> Evidence | None:
    """At its first convolution on CPU torch 2.13 crashes. '', 'abc' and '0x10' are 0 too. oneDNN's own may be 0."""
    cap = facts.last(_IDEEP)
    if cap is None or _knobs.why_unusable(_IDEEP, cap.value) is None or not _may_run_torch(facts):
        return None
    fix = f"Set {_IDEEP}=1 or more, or use: {_PRESET}"
    return Evidence([_sets(cap)], fix, remedy=Remedy(environ=(f"{_IDEEP}=1",)))


def _may_run_torch(facts: Facts) -> bool:
    return not facts.processes or any(process.torch for process in facts.processes)


@check("MG202 A variable is set too late")
def _variable_too_late_for_import(facts: Facts) -> Evidence | None:
    """OpenMP and BLAS read theirs when they are loaded, oneDNN and ideep at their first use. Later it has no effect."""
    late = [variable for variable in facts.named(*_facts.THREAD_VARIABLES) if variable.moment == "after import"]
    ignored = [(variable, pool) for variable in late if (pool := _larger_pool(facts, variable))]
    seen = [f"{_sets(variable)}, but {library} has {threads} threads" for variable, (library, threads) in ignored]
    needed = [f"{variable.name}={variable.value}" for variable, _ in ignored]
    cap = facts.last(*ONEDNN)
    if cap is not None and cap.moment != "exec":
        above = _above_cap(facts, cap)
        seen += above
        needed += [f"{each.name}={each.value}" for each in facts.named(*ONEDNN, _IDEEP) if above]
    settings = tuple(dict.fromkeys(needed))
    fix = f"Set it before the program starts: env {' '.join(settings)} COMMAND"
    return Evidence(seen, fix, remedy=Remedy(environ=settings))


def _larger_pool(facts: Facts, variable: Variable) -> tuple[str, int] | None:
    wanted = int(variable.value) if variable.value.isdecimal() else math.inf
    return next((pool for pool in facts.pools if pool[1] > wanted), None)


def _above_cap(facts: Facts, cap: Variable) -> list[str]:
    entries = _knobs.capacity(cap.name, cap.value)
    allowed = math.inf if entries is None or entries < 0 else entries * _PER_ENTRY + _OTHER_CODE
    above = (process for process in facts.processes if process.torch and process.compiled > allowed)
    start, end = f"{_sets(cap)}, but process", "more than this cap allows"
    return [f"{start} {process.pid} has written {_code(process)}, {end}" for process in above]


@check("MG203 torch keeps compiled code for many input shapes, without caps")
def _no_caps(facts: Facts) -> Evidence | None:
    """For each shape of an input oneDNN compiles code, and keeps that of up to 1024 shapes: hundreds of MB."""
    grown = [process for process in facts.processes if process.torch and process.compiled > _OTHER_CODE]
    if facts.named(*ONEDNN, _IDEEP) or not grown:
        return None
    seen = [f"process {process.pid} runs torch and has written {_code(process)}" for process in grown]
    sizes = ((process.pid, format_bytes(process.grown)) for process in grown if process.grown)
    seen += [f"process {pid} has grown by {size} during the requests" for pid, size in sizes]
    seen.append(f"neither {ONEDNN[0]} nor {_IDEEP} is set")
    return Evidence(seen, f"Start it with: {_PRESET}", remedy=Remedy(run=("--preset", "torch-cpu-dynamic")))


def _code(process: ServiceProcess) -> str:
    return f"{format_bytes(process.compiled)} of machine code compiled at run time"


@check("MG204 More threads than CPUs")
def _threads(facts: Facts) -> Evidence | None:
    """A worker has a thread for each CPU, whatever the quota and other workers.

    They wait for each other, and a quota stops all of them for most of each tenth of a second.
    """
    cpus, serving, pools = facts.machine.cpus, facts.serving, facts.pools
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
    names = [name for name in _facts.THREAD_VARIABLES if name == "OMP_NUM_THREADS" or facts.named(name)]
    remedy = Remedy(environ=tuple(f"{name}={share}" for name in names))
    return Evidence([seen], fix, "fault" if any(name == "torch" for name, _ in pools) else "note", remedy)


# MG4xx: how workers are started, and how much memory each of them has for itself.

#: Bytes: more than the private memory of a worker without a model. FastAPI takes about 30 MB, torch 2.13 153 MB.
_HOLDS_A_MODEL = 180_000_000

#: Objects. A heap of 600,000 objects took 276 MB (CPython 3.11), so these are about 46 MB for each worker.
MANY_OBJECTS = 100_000


_FREEZE = "def when_ready(server): gc.collect(); gc.freeze()"
_OURS = ("-c", "python:modelguard.frameworks.gunicorn")
_GUNICORN = f"gunicorn {' '.join(_OURS)}"

#: Seconds beyond a load, for the call that waits for it.
_LOAD_ROOM = 30

#: gunicorn's own worker classes that speak WSGI only.
_KINDS_WITHOUT_ASGI = ("sync", "gthread", "gevent", "eventlet", "tornado")


@check("MG401 The app is loaded before the fork, but not frozen")
def _not_frozen(facts: Facts) -> Evidence | None:
    """A worker's first full garbage collection writes to all objects that it inherited, and copies their pages."""
    main, said = facts.main, facts.main.said
    # CPython 3.12 freezes 375 at its own start.
    frozen = said.frozen > said.tracked or said.tracked < MANY_OBJECTS
    if not facts.server.preforks or not facts.running("forked") or frozen:
        return None
    loaded = (
        f"process {main.pid} has loaded the app before it forks; its collector examines {said.tracked:,} objects, "
        "and few are frozen"
    )
    fix = f"With a guard, use {_GUNICORN}; without one, add to the configuration: import gc, and {_FREEZE}"
    return Evidence([loaded, *map(_own_share, facts.running("forked"))], fix, remedy=_ours(facts))


@check("MG402 Each forked worker holds its own model")
def _copies(facts: Facts) -> Evidence | None:
    """Workers that load the model after the fork do not share it: N workers take N times the memory."""
    server, heavy = facts.server, _heavy(facts.running("forked"))
    if not server.forks or len(heavy) <= 1 or server.preload:
        return None
    if server.preload is None and facts.main.private + facts.main.shared > _HOLDS_A_MODEL:
        return None  # the app may well have been loaded before the fork
    fix = f"Use {_GUNICORN}, or set preload_app = True, freeze ({_FREEZE}), and load the model on import."
    remedy = _ours(facts) or Remedy(options=("--preload",))
    return Evidence([f"{server.kind} runs {server.workers} workers", *map(_own_share, heavy)], fix, remedy=remedy)


@check("MG404 Each spawned worker holds its own model")
def _spawned_copies(facts: Facts) -> Evidence | None:
    """These servers start their workers without a fork, and have no preload: N workers take N times the memory."""
    heavy, kind = _heavy(facts.running("spawned")), facts.server.kind or "the service"
    if len(heavy) <= 1:
        return None
    fix = (
        "Use gunicorn with preload_app = True and an ASGI worker (uvicorn-worker), or one worker; or map the weights "
        "from a file: modelguard.weights."
    )
    count = f"{kind} runs {len(facts.running('spawned'))} workers, which it has not forked"
    return Evidence([count, *map(_own_share, heavy)], fix, remedy=Remedy(options=("--workers", "1")))


@check("MG403 The server replaces workers, and the guard reloads too")
def _two_ways_to_reload(facts: Facts) -> Evidence | None:
    """A new worker loads the model, and so does the guard inside of a worker: some of these loads are wasted."""
    server, guards = facts.server, [guard for guard in facts.guards if guard.policy]
    if not server.max_requests or not guards:
        return None
    seen = (
        f"{server.kind} replaces a worker after {server.max_requests} requests",
        f"the guard {guards[0].name!r} replaces its model by {guards[0].policy}",
    )
    fix = "Use only one: remove max_requests, or give the guard reload_on=None and let the server replace workers."
    by_option = server.kind == "gunicorn"
    remedy = Remedy(options=("--max-requests", "0")) if by_option else Remedy(drop=("--limit-max-requests=",))
    return Evidence(seen, fix, remedy=remedy)


@check("MG405 CUDA is used before the fork")
def _cuda(facts: Facts) -> Evidence | None:
    """CUDA does not support fork: every use in the workers fails or hangs."""
    fix = "Use CUDA only in the workers (load in gunicorn's post_worker_init, or without preload_app)."
    if not (facts.main.cuda or facts.main.said.cuda) or not facts.running("forked"):
        return None
    return Evidence([f"process {facts.main.pid} uses an NVIDIA device, and has forked workers"], fix)


@check("MG406 An ASGI application is served by a WSGI worker")
def _asgi_on_sync(facts: Facts) -> Evidence | None:
    """These classes call it with two arguments, and it takes three: every request fails with status 500."""
    server = facts.server
    if not any(process.said.asgi for process in facts.processes) or server.worker_class not in _KINDS_WITHOUT_ASGI:
        return None
    seen = f"gunicorn serves an ASGI application with workers of the class {server.worker_class}"
    kind = server.asgi_worker or "uvicorn_worker.UvicornWorker"
    extra = "" if server.asgi_worker else ", from the package uvicorn-worker"
    return Evidence([seen], f"Add --worker-class {kind}{extra}.", remedy=Remedy(options=("--worker-class", kind)))


@check("MG407 All workers are replaced at the same time")
def _in_step(facts: Facts) -> Evidence | None:
    """Requests are spread evenly, so without a jitter all workers reach max_requests together and load together."""
    server = facts.server
    if not server.max_requests or server.jitter or server.workers <= 1:
        return None
    jitter = max(1, server.max_requests // 10)
    seen = f"{server.kind} replaces each of {server.workers} workers after exactly {server.max_requests} requests"
    option = "--max-requests-jitter" if server.kind == "gunicorn" else "--limit-max-requests-jitter"
    return Evidence([seen], f"Add {option} {jitter}.", remedy=Remedy(options=(option, str(jitter))))


@check("MG408 The server restarts when a source file changes")
def _restarts_on_changes(facts: Facts) -> Evidence | None:
    """It has one more process for that, and restarts amid the copy of a deployment. uvicorn runs one worker then."""
    seen = [f"{facts.server.kind} watches its source files"] if facts.server.reload else ()
    fix = "Remove --reload (or reload=True) where the service runs for users."
    return Evidence(seen, fix, remedy=Remedy(drop=("--reload",)))


@check("MG409 A load takes longer than the server waits")
def _loads_too_long(facts: Facts) -> Evidence | None:
    """A sync worker that waits for a load gives no sign of life: gunicorn kills it after the timeout, with its load.

    One that is stopped is killed after graceful_timeout, with the calls that wait.
    """
    # A call that waits for a load keeps a sync worker from giving its sign of life, and a stop from being graceful.
    server, guards = facts.server, [guard for guard in facts.guards if guard.policy]
    if server.kind != "gunicorn" or not guards:
        return None
    slowest = max(guards, key=lambda guard: guard.load_seconds)
    silent = server.worker_class == "sync" and 0 < server.timeout <= slowest.load_seconds
    if not silent and not 0 < server.grace <= slowest.load_seconds:
        return None
    options = ("--timeout" if silent else "--graceful-timeout", str(int(slowest.load_seconds) + _LOAD_ROOM))
    seen = (
        f"the guard {slowest.name!r} has taken {slowest.load_seconds:.0f} s to load, and reloads by {slowest.policy}",
        f"gunicorn's timeout is {server.timeout:g} s, its graceful_timeout {server.grace:g} s",
    )
    return Evidence(seen, f"Add {' '.join(options)}.", "fault" if silent else "note", remedy=Remedy(options=options))


@check("MG410 prefork=True has no effect under this server")
def _unshared(facts: Facts) -> Evidence | None:
    """A model is shared if the process that forks the workers has loaded and prepared it. Else each loads its own."""
    server, guards = facts.server, [guard for guard in facts.guards if guard.unshared]
    if server.workers <= 1 or not guards:
        return None
    seen = (
        f"the guard {guards[0].name!r} has prefork=True, and nothing has prepared its model to be shared",
        f"{server.kind} runs {server.workers} workers",
    )
    if not server.forks:
        return Evidence(seen, f"{server.kind} forks no workers, so there is nothing to share: use {_GUNICORN}.")
    fix = f"Use {_GUNICORN}; in a configuration of your own: from modelguard.frameworks.gunicorn import *"
    return Evidence(seen, fix, remedy=_ours(facts))


@check("MG411 A process imports libraries that it does not use")
def _unused_imports(facts: Facts) -> Evidence | None:
    """The model of an isolated function is in a mold, which imports them itself. Here they are held once more."""
    seen = [
        f"process {one.pid} has imported {', '.join(one.libraries)} and holds {format_bytes(one.private)} of its own; "
        "the models of its isolated functions are in other processes"
        for one in facts.processes
        if one.isolates and one.libraries and not any(guard.load_seconds for guard in one.said.guards)
    ]
    fix = (
        "Unless it uses these libraries itself, move the isolated functions to a module that it does not import, and "
        "name them there: @isolate(target='module:function')."
    )
    return Evidence(seen, fix, "note")


def _ours(facts: Facts) -> Remedy | None:
    """Our configuration in the place of the service's, if that has none, and has a guard to share."""
    guarded = any(process.said.guards for process in facts.processes)
    return Remedy(options=_OURS) if guarded and facts.server.kind and not facts.server.config else None


def _heavy(processes: Iterable[ServiceProcess]) -> list[ServiceProcess]:
    return [process for process in processes if process.private > _HOLDS_A_MODEL]


def _own_share(process: ServiceProcess) -> str:
    return (
        f"process {process.pid} has written {format_bytes(process.private)} for itself, "
        f"and shares {format_bytes(process.shared)} of written memory with others"
    )


# MG5xx: what the interpreter itself does to memory.

_IMMORTAL = (3, 12)  # the first version of CPython with immortal objects

#: The patches of CPython 3.14 whose garbage collector worked in increments. 3.14.5 went back to that of 3.13.
_INCREMENTAL = (3, 14), range(5)


@check("MG501 This Python has no immortal objects")
def _no_immortal_objects(facts: Facts) -> Evidence | None:
    """Reading an object changes its reference count, and copies its page in the worker. An immortal object's stays."""
    python, objects = facts.interpreter, facts.main.said.frozen + facts.main.said.tracked
    if python is None or not facts.server.preforks or not facts.running("forked") or objects < MANY_OBJECTS:
        return None
    if python.name == "CPython" and python.version >= _IMMORTAL and not python.free_threaded:
        return None
    fix = "If the model consists of many Python objects, use CPython 3.12 or newer, with the GIL."
    return Evidence([f"workers share {objects:,} objects on {python}"], fix, "note")


@check("MG502 This Python's garbage collector lets memory grow")
def _incremental_collector(facts: Facts) -> Evidence | None:
    """It looks at a part of the heap at a time: objects in reference cycles stay longer, which looks like a leak."""
    python = facts.interpreter
    if python is None or python.name != "CPython" or python.free_threaded:
        return None
    if python.version != _INCREMENTAL[0] or python.micro not in _INCREMENTAL[1]:
        return None
    seen = f"the service runs on CPython 3.14.{python.micro}, whose garbage collector works in increments"
    return Evidence([seen], "Use CPython 3.14.5 or newer.", "note")


@check("MG503 Python keeps small objects in huge pages, and workers are forked")
def _huge_pages(facts: Facts) -> Evidence | None:
    """If no huge page is free when a worker writes to one that it has inherited, the kernel ends it with SIGBUS."""
    setting = facts.last("PYTHON_PYMALLOC_HUGEPAGES")
    built = [process for process in facts.running("forked") if process.said.huge_pages]
    if not built or setting is None or setting.value in ("", "0"):
        return None
    return _without(setting, f"{_sets(setting)}, and process {built[0].pid} is a fork")


@check("MG504 Python's allocator runs with its debug checks")
def _debug_allocator(facts: Facts) -> Evidence | None:
    """It adds 24 to 32 bytes to every block, and fills and checks it: more memory and time for every object."""
    known = facts.named("PYTHONMALLOC", "PYTHONDEVMODE")
    at_start = [variable for variable in known if variable.moment == "exec" and variable.value]
    if not at_start:
        return None
    setting = at_start[-1]  # by name: the development mode has its checks unless PYTHONMALLOC says otherwise
    if setting.name == "PYTHONMALLOC" and not setting.value.endswith("debug"):
        return None
    return _without(setting, _sets(setting))


def _without(setting: Variable, seen: str) -> Evidence:
    return Evidence([seen], f"Remove {setting.name}.", remedy=Remedy(unset=(setting.name,)))


@check("MG505 An extension has switched the GIL back on")
def _gil_switched_on(facts: Facts) -> Evidence | None:
    """From then on one thread runs at a time, and what this build costs in speed and memory buys nothing."""
    found = next((process for process in facts.serving if process.said.gil_for is not None), None)
    if found is None:
        return None
    names = ", ".join(found.said.gil_for or ())
    seen = f"process {found.pid} is free-threaded, and has switched the GIL on to load {names or 'an extension'}"
    what = names or "the extension that Python's RuntimeWarning names at its import"
    fix = f"Use a release of {what} that supports Python without the GIL, or the ordinary build of Python."
    return Evidence([seen], fix)
