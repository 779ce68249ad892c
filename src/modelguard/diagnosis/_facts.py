"""The facts about a service that the checks examine, as plain frozen data.

Facts come from this machine, or from processes that run: from outside, and from inside where a probe answers. Nothing
is guessed from a command line or a source. What could not be seen is left out and listed in ``unknown``. Facts never
contain secrets: only the environment variables that modelguard knows are kept, and command lines are redacted.
"""

from dataclasses import dataclass
from typing import Literal

from modelguard.environment import _capacities
from modelguard.environment._allocator_kinds import Problem
from modelguard.environment._cpus import Cpus
from modelguard.environment._limits import Limit, Strain

__all__ = [
    "CAPS",
    "Facts",
    "Guarded",
    "Inside",
    "Interpreter",
    "Machine",
    "Misspelt",
    "Moment",
    "Role",
    "Server",
    "ServiceProcess",
    "Variable",
]

#: When a variable is set: before the program starts; by the program before or after it has loaded a library that reads
#: thread variables.
Moment = Literal["exec", "app", "after import"]

Role = Literal["main", "forked", "spawned", "other"]

#: The variables that limit the two caches that grow with the input shapes of a model on CPU: oneDNN's compiled
#: primitives, and ideep's descriptions of them. oneDNN also reads an older name of its variable.
CAPS = (_capacities.ONEDNN, _capacities.IDEEP)


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that modelguard knows.

    Attributes:
        name: Its name.
        value: Its value.
        moment: When it is set.
        where: The place that sets it, as text for users: ``"/srv/app.py line 3"``.
    """

    name: str
    value: str
    moment: Moment
    where: str


@dataclass(frozen=True, slots=True)
class Misspelt:
    """An environment variable that nothing reads, because its name is misspelt.

    Attributes:
        name: Its name.
        meant: The name that is read.
        value: Its value, if that is a number; otherwise empty.
        where: The place that sets it, as text for users.
    """

    name: str
    meant: str
    value: str
    where: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that the service may use.

    Attributes:
        cpus: How many CPUs it may keep busy; None if unknown.
        limit: Its memory limit; None if a limit could not be seen (not Linux, or no ``/proc``).
        swapped: Bytes in swap on the whole machine; None if unknown.
        strain: How short of memory its cgroup is. For a command that was started, only what was killed since counts.
    """

    cpus: Cpus | None = None
    limit: Limit | None = None
    swapped: int | None = None
    strain: Strain | None = None


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The Python that runs the service.

    Attributes:
        version: Such as ``(3, 12)``.
        name: ``"CPython"`` or another implementation.
        free_threaded: Whether it is a build without the GIL.
        micro: The patch, 2 in 3.12.2; None if unknown.
    """

    version: tuple[int, int]
    name: str = "CPython"
    free_threaded: bool = False
    micro: int | None = None

    def __str__(self) -> str:
        build = " free-threaded" if self.free_threaded else ""
        return f"{self.name} {self.version[0]}.{self.version[1]}{build}"


@dataclass(frozen=True, slots=True)
class Guarded:
    """A guard in a process.

    Attributes:
        name: Its name.
        policy: The policy that replaces its model, as text; None if it has none.
        load_seconds: How long the load of its model took; 0 if none is loaded.
        unshared: Whether it was made with ``prefork=True``, and nothing has prepared the process for that.
    """

    name: str
    policy: str | None = None
    load_seconds: float = 0.0
    unshared: bool = False


@dataclass(frozen=True, slots=True)
class Inside:
    """What a process says of itself.

    Attributes:
        version: Its Python, such as ``(3, 14, 2)``.
        free_threaded: Whether that is a build without the GIL.
        gil_for: The module for which such a build has switched the GIL on; empty if it does not say which; None if the
            GIL is as it was chosen.
        huge_pages: Whether it was built so that Python's small objects are kept in huge pages.
        malloc: The file that serves ``malloc``; None if unknown.
        frozen: The number of objects that its garbage collector ignores, because of ``gc.freeze``.
        tracked: The number of objects that its garbage collector examines.
        pools: The number of threads of each thread pool, by library.
        cuda: Whether torch has initialised CUDA.
        guards: Its guards.
        variables: The variables that it has set since it started.
        asgi: Whether the app that gunicorn serves is an ASGI application; None if unknown.
    """

    version: tuple[int, int, int] = (0, 0, 0)
    free_threaded: bool = False
    gil_for: tuple[str, ...] | None = None
    huge_pages: bool = False
    malloc: str | None = None
    frozen: int = 0
    tracked: int = 0
    pools: tuple[tuple[str, int], ...] = ()
    cuda: bool = False
    guards: tuple[Guarded, ...] = ()
    variables: tuple[Variable, ...] = ()
    asgi: bool | None = None


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A running process of the service.

    Attributes:
        pid: Its process id.
        role: ``"main"`` for the given process, ``"forked"`` for a fork of it, ``"spawned"`` for a worker that was
            started without a fork, ``"other"`` for any other program that it has started.
        private: Bytes that only this process has written, including those in swap.
        shared: Bytes that it shares with other processes and that were written to since they were mapped.
        swap: Bytes in swap.
        threads: Its number of threads.
        torch: Whether torch's libraries are mapped.
        libraries: Libraries that compute models, as far as their compiled parts are mapped.
        isolates: Whether it has started molds, in which the models of its isolated functions are.
        cuda: Whether it holds an NVIDIA device.
        compiled: Written bytes of machine code that libraries have compiled at run time, as oneDNN does for each shape.
        grown: Bytes by which ``private`` grew during the requests; None if there were none.
        inside: What it says of itself; None if it was not asked or did not answer.
    """

    pid: int
    role: Role = "main"
    private: int = 0
    shared: int = 0
    swap: int = 0
    threads: int = 1
    torch: bool = False
    libraries: tuple[str, ...] = ()
    isolates: bool = False
    cuda: bool = False
    compiled: int = 0
    grown: int | None = None
    inside: Inside | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """The server that runs the app, with its settings as it has loaded them.

    Attributes:
        kind: ``"gunicorn"``, ``"uvicorn"`` or ``"hypercorn"``.
        workers: The number of worker processes that run; 1 if the server itself serves.
        forks: Whether workers are forks of the server's own process, and not newly started programs.
        preload: Whether the app is loaded before the workers are forked; None if unknown.
        config: The configuration file or module; empty if there is none.
        worker_class: gunicorn's worker class, such as ``"sync"``; empty if unknown.
        asgi_worker: gunicorn's own worker class for ASGI applications; empty if this version has none.
        threads: Threads of one worker that answer requests.
        max_requests: After how many requests a worker is replaced, 0 for never; None if unknown.
        jitter: The most requests by which that number differs between workers.
        reload: Whether the server restarts workers when a source file changes.
        timeout: Seconds after which a worker that gives no sign of life is killed; 0 for never, or if unknown.
        grace: Seconds that a worker gets to finish its requests when it is stopped; 0 if unknown.
    """

    kind: str
    workers: int = 1
    forks: bool = False
    preload: bool | None = None
    config: str = ""
    worker_class: str = ""
    asgi_worker: str = ""
    threads: int = 1
    max_requests: int | None = None
    jitter: int = 0
    reload: bool = False
    timeout: float = 0.0
    grace: float = 0.0

    @property
    def preforks(self) -> bool:
        """Whether workers inherit the loaded app."""
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
        server: Its server; None if there is none, or if it could not be seen.
        processes: The main process and all its descendants; empty if no service was named.
        stale_metrics: Names of files in ``PROMETHEUS_MULTIPROC_DIR`` whose process does not exist.
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
    server: Server | None = None
    processes: tuple[ServiceProcess, ...] = ()
    stale_metrics: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    misspelt: tuple[Misspelt, ...] = ()
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
