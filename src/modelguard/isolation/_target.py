"""How a fresh interpreter finds the function: by its module and name, after it was made like its owner.

A function may be named instead of imported: a stub stands for it in the owner, which never imports its module.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from multiprocessing import spawn
from pkgutil import resolve_name
from typing import Any, NamedTuple

from modelguard import _units
from modelguard._function_kinds import FunctionKind
from modelguard.errors import InvalidOption

__all__ = [
    "Reference",
    "Stub",
    "become_like",
    "check_importable",
    "find",
    "find_target",
    "place_of",
    "preparation",
    "reference",
    "stub_of",
]

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
