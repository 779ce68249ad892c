"""For tests of services that use modelguard: the types of the pytest plugin's fixtures, and two assertions.

When modelguard is installed, pytest finds the fixtures ``modelguard_clock``, ``modelguard_loader``, ``modelguard_off``
and ``modelguard_env`` and the marker ``modelguard_memory``; ``modelguard docs testing`` describes them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelguard.testing._children import Env, Finished, assert_shared_after_fork
    from modelguard.testing._clock import Clock
    from modelguard.testing._loader import Loader, Model
    from modelguard.testing._no_growth import assert_no_growth

__all__ = ["Clock", "Env", "Finished", "Loader", "Model", "assert_no_growth", "assert_shared_after_fork"]

# Imported on first use, because pytest loads the plugin in every run, even if no test uses it.
_MODULES = {
    "_children": "Env Finished assert_shared_after_fork",
    "_clock": "Clock",
    "_loader": "Loader Model",
    "_no_growth": "assert_no_growth",
}
_LATER = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    value.__module__ = __name__  # tracebacks, pickles and the documentation show the module that users import
    return value
