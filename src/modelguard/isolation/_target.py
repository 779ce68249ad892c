"""How a fresh interpreter finds the function: by its module and name, after it was made like its owner."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Mapping
from multiprocessing import spawn
from pkgutil import resolve_name
from typing import Any

from modelguard import _units
from modelguard.errors import InvalidOption

__all__ = [
    "Reference",
    "become_like",
    "check_importable",
    "find",
    "preparation",
    "reference",
]

#: Module and qualified name.
Reference = tuple[str, str]

#: Of multiprocessing's data, what makes an interpreter resemble its owner; the rest concerns multiprocessing itself.
_KEYS = ("dir", "init_main_from_name", "init_main_from_path", "orig_dir", "sys_argv", "sys_path")

_IMPORT_FIX = "Move it to the top level of a module that can be imported, and isolate it there."


def reference(function: Any) -> Reference:
    """Module and qualified name of a function."""
    return function.__module__, function.__qualname__


def check_importable(function: Any) -> None:
    """Check that another interpreter can find the function.

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


def become_like(owner: Mapping[str, Any]) -> None:
    """Take over path, arguments, working directory and main module of the owner."""
    spawn.prepare(dict(owner))


def find(where: Reference, is_isolated: Callable[[Any], bool]) -> Any:
    """Import a function, and find the isolated one below other decorators.

    Raises:
        InvalidOption: There is no isolated function by that name.
    """
    module, name = where
    importlib.import_module(module)
    found = resolve_name(f"{module}:{name}")
    while found is not None and not is_isolated(found):
        found = getattr(found, "__wrapped__", None)
    if found is None:
        why = "is not isolated where a worker process imports it"
        raise InvalidOption("function", f"{module}.{name}", why=why, fix="Decorate it where it is defined.")
    return found
