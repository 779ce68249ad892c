"""The facts about a service that the checks examine, as plain frozen data.

Facts come from this machine, or from processes that run: from outside, and from inside where a probe answers. Nothing
is guessed from a command line or a source. What could not be seen is left out and listed in ``unknown``. Facts never
contain secrets: only the environment variables that modelguard knows are kept, and command lines are redacted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Literal

from modelguard.environment import _knobs
from modelguard.environment._allocator_files import Problem
from modelguard.facts._memory import Cpus, Limit, Strain
from modelguard.facts._proc import Interpreter

#: When a variable is set: before the program starts; by the program before or after it has loaded a library that reads
#: thread variables.
Moment = Literal["exec", "app", "after import"]

Role = Literal["main", "forked", "spawned", "other"]


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that modelguard knows; or one whose name is misspelt, with what is meant."""

    name: str
    value: str
    moment: Moment
    where: str
    meant: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that the service may use."""

    cpus: Cpus | None = None  # how many CPUs it may keep busy; None if unknown
    limit: Limit | None = None  # its memory limit; None if a limit could not be seen (not Linux, or no ``/proc``)
    swapped: int | None = None  # bytes in swap on the whole machine; None if unknown
    #: How short of memory its cgroup is. For a command that was started, only what was killed since counts.
    strain: Strain = field(default_factory=Strain)


@dataclass(frozen=True, slots=True)
class Guarded:
    """A guard in a process."""

    name: str = "?"
    policy: str | None = None
    load_seconds: float = 0.0
    unshared: bool = False


@dataclass(frozen=True, slots=True)
class Inside:
    """What a process says of itself."""

    #: The module for which a build without the GIL has switched it on; empty if it does not say which; None if the GIL
    #: is as it was chosen.
    gil_for: tuple[str, ...] | None = None
    huge_pages: bool = False  # whether it was built so that Python's small objects are kept in huge pages
    malloc: str | None = None  # the file that serves ``malloc``; None if unknown
    frozen: int = 0  # the number of objects that its garbage collector ignores, because of ``gc.freeze``
    tracked: int = 0  # the number of objects that its garbage collector examines
    pools: tuple[tuple[str, int], ...] = ()  # the number of threads of each thread pool, by library
    cuda: bool = False  # whether torch has initialised CUDA
    guards: tuple[Guarded, ...] = ()  # its guards
    variables: tuple[Variable, ...] = ()  # the variables that it has set since it started
    asgi: bool | None = None  # whether the app that gunicorn serves is an ASGI application; None if unknown


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A running process of the service."""

    pid: int  # its process id
    #: ``"main"`` for the given process, ``"forked"`` for a fork of it, ``"spawned"`` for a worker that was started
    #: without a fork, ``"other"`` for any other program that it has started.
    role: Role = "main"
    private: int = 0  # bytes that only this process has written, including those in swap
    shared: int = 0  # bytes that it shares with other processes and that were written to since they were mapped
    swap: int = 0  # bytes in swap
    torch: bool = False  # whether torch's libraries are mapped
    libraries: tuple[str, ...] = ()  # libraries that compute models, as far as their compiled parts are mapped
    isolates: bool = False  # whether it has started molds, in which the models of its isolated functions are
    cuda: bool = False  # whether it holds an NVIDIA device
    #: Written bytes of machine code that libraries have compiled at run time, as oneDNN does for each shape.
    compiled: int = 0
    grown: int | None = None  # bytes by which ``private`` grew during the requests; None if there were none
    inside: Inside | None = None  # what it says of itself; None if it was not asked or did not answer

    @property
    def said(self) -> Inside:
        """What it says of itself; of one that was not asked, what is known of any process."""
        return self.inside or Inside()


@dataclass(frozen=True, slots=True)
class Server:
    """The server that runs the app, with its settings as it has loaded them."""

    kind: str = ""  # ``"gunicorn"``, ``"uvicorn"`` or ``"hypercorn"``; empty if there is none
    workers: int = 1  # the number of worker processes that run; 1 if the server itself serves
    forks: bool = False  # whether workers are forks of the server's own process, and not newly started programs
    preload: bool | None = None  # whether the app is loaded before the workers are forked; None if unknown
    config: str = ""  # the configuration file or module; empty if there is none
    worker_class: str = ""  # gunicorn's worker class, such as ``"sync"``; empty if unknown
    asgi_worker: str = ""  # gunicorn's own worker class for ASGI applications; empty if this version has none
    threads: int = 1  # threads of one worker that answer requests
    max_requests: int | None = None  # after how many requests a worker is replaced, 0 for never; None if unknown
    jitter: int = 0  # the most requests by which that number differs between workers
    reload: bool = False  # whether the server restarts workers when a source file changes
    #: Seconds after which a worker that gives no sign of life is killed; 0 for never, or if unknown.
    timeout: float = 0.0
    grace: float = 0.0  # seconds that a worker gets to finish its requests when it is stopped; 0 if unknown

    @property
    def preforks(self) -> bool:
        return self.forks and bool(self.preload)


@dataclass(frozen=True, slots=True)
class Facts:
    """All known facts about a service.

    Attributes:
        subject: What is examined, as text for users.
        machine: The resources that it may use.
        variables: The variables that modelguard knows, in the order in which they are set.
        interpreter: Its Python; None if unknown.
        problems: The problems of its allocator.
        server: Its server; one without a name if there is none, or if it could not be seen.
        processes: The main process and all its descendants; empty if no service was named.
        stale_metrics: Names of files in ``PROMETHEUS_MULTIPROC_DIR`` whose process does not exist, and that should not
            be there: live gauges, files that are older than the service, or a hundred and more.
        unknown: What could not be determined, in sentences.
        words: The command that starts the service, with secrets hidden; empty if unknown.
        misspelt: Variables whose names are misspelt.
        served: Whether it served when it was examined. Only a command can be seen not to.
    """

    subject: str
    machine: Machine = Machine()
    variables: tuple[Variable, ...] = ()
    interpreter: Interpreter | None = None
    problems: tuple[Problem, ...] = ()
    server: Server = Server()
    processes: tuple[ServiceProcess, ...] = ()
    stale_metrics: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    misspelt: tuple[Variable, ...] = ()
    served: bool = True

    def named(self, *names: str) -> tuple[Variable, ...]:
        """The variables of these names, in the order in which they are set."""
        return tuple(variable for variable in self.variables if variable.name in names)

    def last(self, *names: str) -> Variable | None:
        """The one of these variables that is set last, and takes effect."""
        return next(reversed(self.named(*names)), None)

    def running(self, role: Role) -> tuple[ServiceProcess, ...]:
        """The processes with this role."""
        return tuple(process for process in self.processes if process.role == role)

    @property
    def serving(self) -> tuple[ServiceProcess, ...]:
        """The processes that answer requests: the workers, or the main process if there are none."""
        workers = (*self.running("forked"), *self.running("spawned"))
        return workers or self.running("main")

    @property
    def main(self) -> ServiceProcess:
        return next(iter(self.running("main")), ServiceProcess(0))

    @property
    def answers(self) -> list[Inside]:
        """What the processes that answer requests say of themselves, as far as they do."""
        return [process.inside for process in self.serving if process.inside]

    @property
    def allocators(self) -> list[str]:
        """The files that serve ``malloc`` where requests are answered."""
        return [said.malloc for said in self.answers if said.malloc]

    @property
    def pools(self) -> list[tuple[str, int]]:
        return [pool for said in self.answers for pool in said.pools]

    @property
    def guards(self) -> list[Guarded]:
        return [guard for said in self.answers for guard in said.guards]


# The environment variables that are kept of any service. No other variable's value is looked at or shown.

#: oneDNN also reads its capacity under an older name.
ONEDNN = (_knobs.ONEDNN, "DNNL_PRIMITIVE_CACHE_CAPACITY")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_OF_ALLOCATORS = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_CONF", *_knobs.GLIBC)
_OF_PYTHON = ("PROMETHEUS_MULTIPROC_DIR", "PYTHONDEVMODE", "PYTHONMALLOC", "PYTHON_PYMALLOC_HUGEPAGES")
KNOWN = frozenset({*THREAD_VARIABLES, *ONEDNN, _knobs.IDEEP, *_OF_ALLOCATORS, *_OF_PYTHON})

#: What is read of each family of variables that decide on memory and threads, behind the family's first word. A name
#: that is close to one of them, and is none of them, is misspelt.
_READ = {
    "MALLOC_": "ARENA_MAX ARENA_TEST CHECK_ CONF MMAP_MAX_ MMAP_THRESHOLD_ PERTURB_ TOP_PAD_ TRACE TRIM_THRESHOLD_",
    "MIMALLOC_": "ABANDONED_PAGE_PURGE ABANDONED_PAGE_RESET ALLOW_DECOMMIT ALLOW_LARGE_OS_PAGES ARENA_EAGER_COMMIT "
    "ARENA_PURGE_MULT ARENA_RESERVE DECOMMIT_DELAY DECOMMIT_EXTEND_DELAY DISALLOW_ARENA_ALLOC DISALLOW_OS_ALLOC "
    "EAGER_COMMIT EAGER_COMMIT_DELAY EAGER_REGION_COMMIT LARGE_OS_PAGES LIMIT_OS_ALLOC MAX_ERRORS MAX_SEGMENT_RECLAIM "
    "MAX_WARNINGS OS_TAG PAGE_RESET PURGE_DECOMMITS PURGE_DELAY PURGE_EXTEND_DELAY RESERVE_HUGE_OS_PAGES "
    "RESERVE_HUGE_OS_PAGES_AT RESERVE_OS_MEMORY RESET_DECOMMITS RESET_DELAY RETRY_ON_OOM SEGMENT_CACHE SEGMENT_RESET "
    "SHOW_ERRORS SHOW_STATS TARGET_SEGMENTS_PER_THREAD USE_NUMA_NODES VERBOSE VISIT_ABANDONED",
    "TCMALLOC_": "AGGRESSIVE_DECOMMIT DISABLE_MEMORY_RELEASE HEAP_LIMIT_MB LARGE_ALLOC_REPORT_THRESHOLD "
    "MAX_PER_CPU_CACHE_SIZE MAX_TOTAL_THREAD_CACHE_BYTES OVERRIDE_PAGESIZE RELEASE_RATE SAMPLE_PARAMETER SKIP_MMAP "
    "SKIP_SBRK STACKTRACE_METHOD",
    "OMP_": "AFFINITY_FORMAT ALLOCATOR AVAILABLE_DEVICES CANCELLATION DEBUG DEFAULT_DEVICE DISPLAY_AFFINITY "
    "DISPLAY_ENV DYNAMIC MAX_ACTIVE_LEVELS MAX_TASK_PRIORITY NESTED NUM_TEAMS NUM_THREADS PLACES PROC_BIND SCHEDULE "
    "STACKSIZE TARGET_OFFLOAD TEAMS_THREAD_LIMIT THREAD_LIMIT TOOL TOOL_LIBRARIES TOOL_VERBOSE_INIT WAIT_POLICY",
    "MKL_": "CBWR DEBUG_CPU_TYPE DISABLE_FAST_MM DOMAIN_NUM_THREADS DYNAMIC ENABLE_INSTRUCTIONS FAST_MEMORY_LIMIT "
    "INTERFACE_LAYER NUM_STRIPES NUM_THREADS SERVICE_FORCE_INTEL THREADING_LAYER VERBOSE",
    "OPENBLAS_": "CORETYPE DEFAULT_NUM_THREADS MAIN_FREE NUM_THREADS THREAD_TIMEOUT VERBOSE",
    "ONEDNN_": "CPU_ISA_HINTS DEFAULT_FPMATH_MODE JIT_DUMP JIT_PROFILE MAX_CPU_ISA PRIMITIVE_CACHE_CAPACITY VERBOSE",
    "DNNL_": "CPU_ISA_HINTS DEFAULT_FPMATH_MODE JIT_DUMP JIT_PROFILE MAX_CPU_ISA PRIMITIVE_CACHE_CAPACITY VERBOSE",
    "PYTORCH_": "ALLOC_CONF CUDA_ALLOC_CONF HIP_ALLOC_CONF JIT NO_CUDA_MEMORY_CACHING NVML_BASED_CUDA_CHECK",
    "PYTHON": "ASYNCIODEBUG BREAKPOINT COERCECLOCALE DEBUG DEVMODE DONTWRITEBYTECODE DUMPREFS EXECUTABLE FAULTHANDLER "
    "HASHSEED HOME INSPECT INTMAXSTRDIGITS IOENCODING MALLOC MALLOCSTATS NODEBUGRANGES NOUSERSITE OPTIMIZE PATH "
    "PERFSUPPORT PLATLIBDIR PROFILEIMPORTTIME PYCACHEPREFIX SAFEPATH STARTUP TRACEMALLOC UNBUFFERED USERBASE UTF8 "
    "VERBOSE WARNDEFAULTENCODING WARNINGS",
    "PYTHON_": "BASIC_REPL COLORS CONTEXT_AWARE_WARNINGS CPU_COUNT DISABLE_REMOTE_DEBUG FROZEN_MODULES GIL HISTORY JIT "
    "LAZY_IMPORTS PERF_JIT_SUPPORT PRESITE PYMALLOC_HUGEPAGES THREAD_INHERIT_CONTEXT TLBC",
    "MODELGUARD_": "FREEZE IMMORTALIZE ON_HAZARD PROBE RUNTIME_DIR WARM_TIMEOUT",
    "": "GLIBC_TUNABLES GRPC_ENABLE_FORK_SUPPORT LD_PRELOAD LRU_CACHE_CAPACITY NUMEXPR_MAX_THREADS NUMEXPR_NUM_THREADS "
    "PROMETHEUS_MULTIPROC_DIR TOKENIZERS_PARALLELISM TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT CUDA_MODULE_LOADING",
}
#: Names that other programs read: CMake, Spark, Gradle and the like.
_OF_OTHERS = frozenset({"PYTHON_EXECUTABLE", "PYTHON_HOME", "PYTHON_PATH"})
_NAMES = tuple(f"{family}{name}" for family, names in _READ.items() for name in names.split())

#: From this likeness on a name is misspelt: one letter of ten may be wrong, and the first one is right.
_ALIKE = 0.9


def known_variables(environ: Mapping[str, str], where: str) -> tuple[Variable, ...]:
    return tuple(Variable(name, environ[name], "exec", where) for name in sorted(KNOWN & environ.keys()))


def misspelt_variables(environ: Mapping[str, str], where: str) -> Iterator[Variable]:
    """The names in an environment that nothing reads, and that are nearly a name that is read.

    Only a value of digits is kept: of any other it is not known what it is.
    """
    for name in sorted(environ.keys() - {*_NAMES, *_OF_OTHERS}):
        meant = _meant(name)
        if meant is not None and meant not in environ:
            value = environ[name]
            yield Variable(name, value if value.isascii() and value.isdecimal() else "", "exec", where, meant)


def _meant(name: str) -> str | None:
    if name.rstrip("0123456789") in _NAMES:  # PYTHONPATH2: put aside, not misspelt
        return None
    # Another first letter is most often another program's own prefix: KMP_AFFINITY_FORMAT.
    near = get_close_matches(name, [each for each in _NAMES if each.startswith(name[:1])], 1, _ALIKE)
    return near[0] if near else None


# Checks, and the findings that they report.

#: A fault does harm, or is a setting without effect. A note may be intended, and does not make the doctor fail.
Level = Literal["fault", "note"]


@dataclass(frozen=True, slots=True)
class Remedy:
    """A fix as changes to the command that starts the service."""

    environ: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a check found: nothing if nothing was seen."""

    seen: Sequence[str]
    fix: str
    level: Level = "fault"
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem, or a possible problem.

    Attributes:
        number: Such as ``"MG101"``.
        title: What is wrong, in one line.
        level: How serious it is.
        seen: The evidence.
        why: Why it matters.
        fix: Exactly what to do.
        page: The command that prints more about it.
        remedy: The fix as changes to the command; None if the command cannot change it.
    """

    number: str
    title: str
    level: Level
    seen: tuple[str, ...]
    why: str
    fix: str
    page: str
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A check for one problem.

    Attributes:
        number: Such as ``"MG101"``; numbers are never reused.
        title: The problem, in one line.
        why: Why it matters.
        find: Finds the evidence in the facts, or returns None.
    """

    number: str
    title: str
    why: str
    find: Callable[[Facts], Evidence | None]

    def __call__(self, facts: Facts) -> Finding | None:
        """Run the check."""
        found = self.find(facts)
        if found is None or not found.seen:
            return None
        page = f"modelguard docs doctor#{self.number.lower()}"
        return Finding(self.number, self.title, found.level, tuple(found.seen), self.why, found.fix, page, found.remedy)


def check(text: str) -> Callable[[Callable[[Facts], Evidence | None]], Check]:
    """Make the function below it the ``find`` of a check. Its docstring says why it matters."""
    number, _, title = text.partition(" ")
    return lambda find: Check(number, title, " ".join((find.__doc__ or "").split()), find)
