"""The facts about a service that the checks examine, as plain frozen data.

Facts come from this machine, a running process, a gunicorn configuration or a command. What could not be read is left
out and listed in ``unknown``. Facts never contain secrets: only the environment variables that modelguard knows are
kept, and command lines are redacted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from modelguard.environment import _capacities
from modelguard.environment._allocator_kinds import Problem
from modelguard.environment._cpus import Cpus
from modelguard.environment._limits import Limit

__all__ = [
    "CAPS",
    "Facts",
    "Interpreter",
    "Machine",
    "Moment",
    "Role",
    "Server",
    "ServiceProcess",
    "Source",
    "Variable",
]

#: When a variable is set: before the program starts; by the server before it imports the app; by the app before or
#: after it imports the library that reads the variable; or inside a function, at an unknown time.
Moment = Literal["exec", "server", "app", "after import", "later"]

Role = Literal["main", "forked", "spawned", "other"]

#: The variables that limit the two caches that grow with the input shapes of a model on CPU: oneDNN's compiled
#: primitives, and ideep's descriptions of them. oneDNN also reads an older name of its variable.
CAPS = (_capacities.ONEDNN, _capacities.IDEEP)


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable that modelguard knows.

    Attributes:
        name: Its name.
        value: Its value; None if the source computes it.
        moment: When it is set.
        where: The place that sets it, as text for users: ``"raw_env in gunicorn.conf.py"``.
    """

    name: str
    value: str | None
    moment: Moment
    where: str


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that the service may use.

    Attributes:
        cpus: How many CPUs it may keep busy; None if unknown.
        affinity: How many CPUs it may run on, the number that thread pools use; None if unknown.
        limit: Its memory limit; None if a limit could not be seen (not Linux, or no ``/proc``).
        swapped: Bytes in swap on the whole machine; None if unknown.
        cuda: Whether the machine has an NVIDIA device.
    """

    cpus: Cpus | None = None
    affinity: int | None = None
    limit: Limit | None = None
    swapped: int | None = None
    cuda: bool = False


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
        cuda: Whether it holds an NVIDIA device.
        compiled: Bytes of machine code that libraries have compiled at run time, as oneDNN does for each shape.
    """

    pid: int
    role: Role = "main"
    private: int = 0
    shared: int = 0
    swap: int = 0
    threads: int = 1
    torch: bool = False
    cuda: bool = False
    compiled: int = 0


@dataclass(frozen=True, slots=True)
class Server:
    """The server that runs the app.

    Attributes:
        kind: ``"gunicorn"``, ``"uvicorn"``, ...
        workers: The number of worker processes; None if unknown.
        workers_by: The setting with this number.
        forks: Whether workers are forks of the server's own process, and not newly started programs.
        preload: Whether the app is loaded before the workers are forked; None if unknown.
        preload_by: The setting that determines this.
        max_requests: After how many requests a worker is replaced, 0 for never; None if unknown.
        max_requests_by: The setting with this number.
    """

    kind: str
    workers: int | None = 1
    workers_by: str = "its default"
    forks: bool = False
    preload: bool | None = False
    preload_by: str = "its default"
    max_requests: int | None = 0
    max_requests_by: str = "its default"

    @property
    def preforks(self) -> bool:
        """Whether workers inherit the loaded app."""
        return self.forks and bool(self.preload)


@dataclass(frozen=True, slots=True)
class Source:
    """The facts from the source of an app or a configuration. The source was read, but not executed.

    Attributes:
        files: The files that were read, the app's own file first.
        imports: Each package that is imported anywhere in them, and where: ``{"torch": "app.py line 3"}``.
        variables: The variables that it sets.
        freezes: Where ``gc.freeze`` is called, by the app or by modelguard.
        reloads: Where a guard is made that reloads in the process.
        cuda: Where a CUDA device is named.
        applies: Where a preset is applied with a computed name.
        threads: The number of threads that is passed to ``torch.set_num_threads``.
        threads_by: Where this is called.
        unknown: What could not be determined from it.
    """

    files: tuple[str, ...] = ()
    imports: tuple[tuple[str, str], ...] = ()
    variables: tuple[Variable, ...] = ()
    freezes: str | None = None
    reloads: str | None = None
    cuda: str | None = None
    applies: str | None = None
    threads: int | None = None
    threads_by: str = ""
    unknown: tuple[str, ...] = ()

    def imported(self, packages: Iterable[str]) -> str | None:
        """Describe the first of these packages that is imported, and where."""
        where = dict(self.imports)
        return next((f"{where[name]} imports {name}" for name in packages if name in where), None)


@dataclass(frozen=True, slots=True)
class Facts:
    """All known facts about a service.

    Attributes:
        subject: What is examined, as text for users.
        machine: The resources that it may use.
        variables: The variables that modelguard knows, in the order in which they are set.
        interpreter: Its Python; None if unknown.
        problems: The problems of its allocator.
        server: Its server; None if there is none, or if modelguard does not know it.
        processes: The main process and all its descendants; empty if nothing is running yet.
        app: The facts from the app's source; None if it was not found.
        config: The facts from the server's configuration; None if there is none.
        unknown: What could not be determined, in sentences.
    """

    subject: str
    machine: Machine = Machine()
    variables: tuple[Variable, ...] = ()
    interpreter: Interpreter | None = None
    problems: tuple[Problem, ...] = ()
    server: Server | None = None
    processes: tuple[ServiceProcess, ...] = ()
    app: Source | None = None
    config: Source | None = None
    unknown: tuple[str, ...] = ()

    def named(self, *names: str) -> tuple[Variable, ...]:
        """The variables of these names, in the order in which they are set."""
        return tuple(variable for variable in self.variables if variable.name in names)

    def last(self, *names: str) -> Variable | None:
        """The one of these variables that is set last, and takes effect."""
        return next(reversed(self.named(*names)), None)

    def running(self, role: Role) -> tuple[ServiceProcess, ...]:
        """The processes with this role."""
        return tuple(process for process in self.processes if process.role == role)

    def imported(self, packages: Iterable[str]) -> str | None:
        """Describe the first of these packages that the app imports, and where."""
        return self.app.imported(packages) if self.app else None
