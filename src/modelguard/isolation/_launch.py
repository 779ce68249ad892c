"""Start a fresh interpreter that becomes a mold."""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import spawn
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, TypedDict

from modelguard import _units
from modelguard._function_kinds import FunctionKind
from modelguard.errors import InvalidOption
from modelguard.isolation import _supervisor
from modelguard.isolation._channel import Channel, pair

# Which code a mold runs: the files of its modules, so that nobody is served by the code of another time.


#: Path to size in bytes and time of change in nanoseconds.
Files = dict[str, tuple[int, int]]

#: Files of this process's modules, as they were soon after their import.
imported: Files = {}


def files() -> Files:
    """The files of the modules of this process that were found on ``sys.path``, without Python's own.

    Others are generated while the program runs, and may change or disappear.
    """
    own = sysconfig.get_path("stdlib") + os.sep
    places = tuple(os.path.abspath(one) + os.sep for one in sys.path if one is not None)  # noqa: PTH100 - "" is here
    found: Files = {}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.startswith(places):
            continue
        if path.startswith(own) and not path.startswith((own + "site-packages", own + "dist-packages")):
            continue
        stamp = _stamp(path)
        if stamp is not None:
            found[path] = stamp
    return found


def note_imported() -> None:
    """Add the modules that have been imported since to :data:`imported`."""
    for path, stamp in files().items():
        imported.setdefault(path, stamp)


def changed(known: Files, now: Files | None = None) -> str | None:
    """The first of these files that is not as it was; None if there is none.

    Args:
        known: How they were.
        now: How they are, as far as that is not to be read from the disk.
    """
    now = now or {}
    return next((path for path, was in known.items() if (now.get(path) or _stamp(path)) != was), None)


def check_unchanged(known: Files | None) -> None:
    """Check that the files on the disk are these.

    Raises:
        RuntimeError: One has changed.
    """
    path = None if known is None else changed(known)
    if path is not None:
        raise RuntimeError(f"{path} has changed since this server imported it; restart the server")


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - thousands of them
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


# How a fresh interpreter finds the function: by its module and name, after it was made like its owner.
#
# A function may be named instead of imported: a stub stands for it in the owner, which never imports its module.


#: Module and qualified name.
Reference = tuple[str, str]

#: Of multiprocessing's data, what makes an interpreter resemble its owner; the rest concerns multiprocessing itself.
_KEYS = ("dir", "init_main_from_name", "init_main_from_path", "orig_dir", "sys_argv", "sys_path")

#: A parameter's name, the number of its kind, and whether it has a default.
Parameter = tuple[str, int, bool]

_IMPORT_FIX = "Move it to the top level of a module that can be imported, and isolate it there."


#: What the annotation of a stub's result says of the function's kind, where ``def`` does not.
_STREAMS: Mapping[str, FunctionKind] = {
    "Iterator": "generator",
    "Generator": "generator",
    "AsyncIterator": "async generator",
    "AsyncGenerator": "async generator",
}


class Stub(NamedTuple):
    """A function that stands for one of a module that this process does not import.

    Attributes:
        place: Its name, file and line, for errors.
        kind: What a call of it gives.
        shown: Its signature as text.
        parameters: Its parameters.
        recycle_on: When to replace workers or the mold, if the function has no guard.
    """

    place: str
    kind: FunctionKind
    shown: str
    parameters: tuple[Parameter, ...]
    recycle_on: Any

    def fits(self, parameters: tuple[Parameter, ...]) -> bool:
        """Whether each call that the stub takes is one that these parameters take."""
        own = len(self.parameters)
        pairs = zip(self.parameters, parameters, strict=False)
        return (
            len(parameters) >= own
            and all(one[:2] == other[:2] and one[2] <= other[2] for one, other in pairs)
            and all(has_default for _, _, has_default in parameters[own:])
        )


def parameters_of(function: Any) -> tuple[Parameter, ...]:
    """The parameters of a function; those that take any number of arguments count as having a default."""
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(
        (one.name, int(one.kind), one.default is not one.empty or one.kind in any_number)
        for one in inspect.signature(function).parameters.values()
    )


def place_of(function: Any) -> str:
    """A function's name, file and line, as far as they are known."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    where = "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}{where}"


def reference(function: Any) -> Reference:
    """Module and qualified name of a function."""
    return function.__module__, function.__qualname__


def check_importable(function: Any, *, stub: bool = False) -> None:
    """Check that another interpreter can find the function. Nobody looks for a stub, which may stand anywhere.

    Raises:
        InvalidOption: It cannot be found by its name, or is not a function.
    """
    why, fix = "", _IMPORT_FIX
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    in_class = name is not None and "." in name and "<" not in name and not isinstance(function, staticmethod)
    if isinstance(function, type) or not (callable(function) or isinstance(function, classmethod)):
        why, fix = f"must be a function, not {_units.kind_of(function)}", "Decorate: def predict(model, text): ..."
    elif isinstance(function, classmethod) or in_class:
        why = "is a method, and a change of its object or class in a worker would be lost"
        fix = "Isolate a function, and call it in the method; or a static method, with @staticmethod next to the def."
    elif stub:
        pass
    elif module is None or name is None:
        why = "has no module and name by which a worker process could import it"
    elif "<lambda>" in name:
        why = "is a lambda, which a worker process cannot import by name"
    elif "<locals>" in name:
        why = "is defined inside another function, where a worker process cannot import it"
    elif module == "__main__" and not _has_main_file():
        why = "is defined in a notebook or an interactive session, which a worker process cannot import"
        fix = "Write it to a file, as with %%writefile predict.py, and import it from there."
    elif module == "__main__" and _runs_as_package():
        why = "is defined in the __main__.py of an archive, a folder or a package, which a worker process cannot import"
        fix = "Move it to another module beside that, and import it in __main__.py."
    if why:
        raise InvalidOption("function", function, why=why, fix=fix)


def _has_main_file() -> bool:
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (path is not None and os.path.exists(path))  # noqa: PTH110


def _runs_as_package() -> bool:
    """Whether the main module is a ``__main__.py``, which :mod:`multiprocessing` leaves alone: to import it runs it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.rpartition(".")[2] == "__main__"


# In the owner


def stub_of(function: Any, target: Any, recycle_on: Any) -> tuple[Reference, Stub]:
    """What stands for the function that ``target`` names, and where that is.

    Raises:
        InvalidOption: It is no stub, or there is no such module.
    """
    module, _, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    why, fix = "", ""
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        why, fix = "must name a function of a module", "Write for example target='pipeline:entities'."
    elif module in {function.__module__, "__main__"}:
        why = "is in a module that this process imports"
        fix = "Move it to a module of its own, which nothing here imports."
    elif _is_missing(module):
        why, fix = f"cannot be imported: there is no module {module}", "Correct the name, or sys.path."
    elif not _is_empty(function):
        why = f"is what runs, and {place_of(function)} has a body of its own, which never would"
        fix = "Let the body be ... or raise NotImplementedError."
    if why:
        raise InvalidOption("target", target, why=why, fix=fix)
    kind: FunctionKind = "coroutine" if inspect.iscoroutinefunction(function) else _kind_by_result(function)
    shown = str(inspect.signature(function))
    return (module, name), Stub(place_of(function), kind, shown, parameters_of(function), recycle_on)


def _kind_by_result(function: Any) -> FunctionKind:
    result = getattr(function, "__annotations__", {}).get("return")
    text = result if isinstance(result, str) else getattr(result, "__name__", "")
    return _STREAMS.get(text.partition("[")[0].rpartition(".")[2].strip(), "function")


def _is_missing(module: str) -> bool:
    """Whether there is certainly no such module. Imports nothing, its packages neither."""
    path: Iterable[str] | None = None
    if module in sys.modules:
        return False
    for name in accumulate(module.split("."), "{}.{}".format):
        try:
            specs = (finder.find_spec(name, path) for finder in sys.meta_path)  # type: ignore[arg-type]
            spec = next((one for one in specs if one is not None), None)
        except Exception:  # noqa: BLE001 - of a finder that needs the package imported; the mold will tell
            return False
        if spec is None:
            return True
        path = spec.submodule_search_locations
        if path is None:
            return name != module
    return False


def _is_empty(function: Any) -> bool:
    """Whether the body of a function is ``...``, or what type checkers take for it, under a docstring or none."""
    code, text = getattr(function, "__code__", None), getattr(function, "__doc__", None)
    for body in ("...", "raise NotImplementedError", "raise NotImplementedError()"):
        made: dict[str, Any] = {}
        kind = "async def" if inspect.iscoroutinefunction(function) else "def"
        exec(f"{kind} f():\n {text!r}\n {body}" if text else f"{kind} f():\n {body}", made)  # noqa: S102 - our own text
        twin = made["f"].__code__
        if code is not None and (code.co_code, code.co_consts) == (twin.co_code, twin.co_consts):
            return bool(code.co_names == twin.co_names)
    return False


def preparation() -> dict[str, Any]:
    """What :func:`become_like` needs: path, arguments and main module of this process, as ``multiprocessing`` sends."""
    data: Mapping[str, Any] = spawn.get_preparation_data("modelguard")
    chosen = {key: data[key] for key in _KEYS if key in data}
    main = chosen.get("init_main_from_path")
    if main is not None and _is_of_a_server(os.path.abspath(main)):  # noqa: PTH100
        del chosen["init_main_from_path"]
    return chosen


def _is_of_a_server(main: str) -> bool:
    """Whether the main script is a console script, or belongs to an installed program that runs one's functions.

    There is nothing of the application in it. To import Ray's again would take a second.
    """
    if os.path.dirname(main) == sysconfig.get_path("scripts"):  # noqa: PTH120
        return True
    return main.endswith(os.path.join("ray", "_private", "workers", "default_worker.py"))  # noqa: PTH118


# In the fresh interpreter


def become_like(owner: Mapping[str, Any], *, main: bool) -> None:
    """Take over path, arguments, working directory of the owner, and its main module if the function may be there."""
    spawn.prepare({key: value for key, value in owner.items() if main or not key.startswith("init_main")})


def find(where: Reference, is_isolated: Callable[[Any], bool]) -> Any:
    """Import a function, and find the isolated one below other decorators.

    Raises:
        InvalidOption: There is no isolated function by that name.
    """
    module, name = where
    importlib.import_module(module)
    found = _below(resolve_name(f"{module}:{name}"), is_isolated)
    if found is None:
        why = "is not isolated where a worker process imports it"
        raise InvalidOption("function", f"{module}.{name}", why=why, fix="Decorate it where it is defined.")
    return found


def find_target(where: Reference, stub: Stub, is_isolated: Callable[[Any], bool]) -> Any:
    """Import what a stub stands for; the isolated function below other decorators, if there is one.

    Raises:
        InvalidOption: There is no such function, or the stub does not fit it.
        BaseException: Whatever its module raises.
    """
    module, name = where
    target, fix = ":".join(where), "Correct the name."
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of something that it imports
        why = f"cannot be imported: there is no module {error.name}; {stub.place} stands for it"
        raise InvalidOption("target", target, why=why, fix=fix) from None
    found = getattr(imported, name, None)
    if not callable(found) or isinstance(found, type):
        what = f"has no {name}" if found is None else f"has {_units.kind_of(found)} of this name, and no function"
        why = f"is not there: {getattr(imported, '__file__', module)} {what}; {stub.place} stands for it"
        raise InvalidOption("target", target, why=why, fix=fix)
    if not stub.fits(parameters := parameters_of(found)):
        why = f"does not fit: {stub.place} takes {stub.shown}, and {place_of(found)} takes {inspect.signature(found)}"
        fix = "Let both have the same parameters."
        if stub.fits(parameters[1:]):
            fix = f"Decorate it with the guard of its model in {module}: so far nothing gives it its first argument."
        raise InvalidOption("target", target, why=why, fix=fix)
    return _below(found, is_isolated) or found


def _below(found: Any, is_isolated: Callable[[Any], bool]) -> Any:
    while found is not None and not is_isolated(found):
        found = getattr(found, "__wrapped__", None)
    return found


# What a new mold is told.


class Instructions(TypedDict):
    """What the owner sends to a new mold.

    Attributes:
        owner: Its process id.
        preparation: How to resemble it.
        function: Where the function is.
        stub: What stands for it in the owner, if that does not import it.
        key: Of the pool's model that it loads; None if its function has no pool.
        levels: Of the owner's loggers.
        name: The isolated function's name.
        max_bytes: The largest answer of a worker.
        beside_calls: Whether calls run while it loads.
        forks: Whether it forks workers; if not, it becomes one itself.
        code: What files its modules must have; None for any.
        shared: Whether its owner serves callers of other processes, and knows nothing of their modules.
    """

    owner: int
    preparation: dict[str, Any]
    function: Reference
    stub: Stub | None
    key: Any
    levels: dict[str, int]
    name: str
    max_bytes: int
    beside_calls: bool
    forks: bool
    code: Files | None
    shared: bool


class Origin(NamedTuple):
    """The process that calls an isolated function, which its molds resemble.

    Attributes:
        preparation: How to resemble it.
        levels: Of its loggers.
    """

    preparation: dict[str, Any]
    levels: dict[str, int]


if sys.platform != "win32":
    import fcntl


#: Where this package is imported from: the fresh interpreter finds it there before it knows the owner's path.
_PACKAGES = str(Path(__file__).parents[2])

_PROGRAM = (
    "import sys; sys.path.insert(0, {packages!r}); from modelguard.isolation.{module} import main; main({numbers})"
)

#: The highest of the descriptors for input, output and errors.
_STANDARD = 2


@dataclass(frozen=True, slots=True)
class Launched:
    """A mold that has been started, and has not loaded yet.

    Attributes:
        process: Its process, the leader of a process group of its own.
        control: The channel to it.
        news: Receives records and events of it and of its workers.
    """

    process: subprocess.Popen[bytes]
    control: Channel
    news: socket.socket

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors. Takes no lock."""
        self.process.returncode = 0  # it is no child of this process, and must not warn when it is dropped
        self.control.close()
        self.news.close()


def launch(instructions: Instructions) -> Launched:
    """Start a mold. It dies with the calling thread, so that must be one that lives as long as this process.

    Raises:
        OSError: No process or no descriptor is left.
    """
    control, its_control = pair()
    try:
        news, its_news = _supervisor.pair()
    except BaseException:
        control.close()
        its_control.close()
        raise
    try:
        words = "mold", ".".join(instructions["function"])
        process = start_interpreter("_mold", (its_control.fileno(), its_news.fileno()), *words, process_group=0)
    except BaseException:
        control.close()
        news.close()
        raise
    finally:
        its_control.close()
        its_news.close()
    channel = Channel(control)
    channel.send(instructions)
    return Launched(process, channel, news)


def start_interpreter(
    module: str,
    fds: Sequence[int],
    *words: str,
    prints: bool = True,
    process_group: int | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a fresh interpreter like this one, which runs the ``main`` of a module of this package.

    Where this process has closed its own input or output, or something else has the number, the new one gets
    ``/dev/null``: what it prints must not reach a descriptor of another purpose.

    Args:
        module: Its name.
        fds: Descriptors that are passed on; ``main`` gets their numbers.
        words: What lists of processes show.
        prints: Whether it may print to this process's output; without, it does not hold that open either.
        process_group: As for ``Popen``.
        start_new_session: As for ``Popen``.

    Raises:
        OSError: No process or no descriptor is left.
    """
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001 - as multiprocessing
    executable = os.fsdecode(spawn.get_executable() or sys.executable)
    with ExitStack() as copies:
        passed = [_above_standard(fd, copies) for fd in fds]
        numbers = ", ".join(map(str, passed))
        program = _PROGRAM.format(packages=_PACKAGES, module=module, numbers=numbers)
        command = [executable, *flags, "-c", program, *words]
        return subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if prints and _is_inherited(1) else subprocess.DEVNULL,
            stderr=None if prints and _is_inherited(2) else subprocess.DEVNULL,
            pass_fds=passed,
            process_group=process_group,
            start_new_session=start_new_session,
        )


def _is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:  # it is closed
        return False


def _above_standard(fd: int, copies: ExitStack) -> int:
    """The descriptor, or a copy that leaves room for input and output, where this process has closed its own."""
    if fd > _STANDARD:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _STANDARD + 1)
    copies.callback(os.close, copy)
    return copy
