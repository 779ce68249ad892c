"""The libraries behind the hooks. Each comes with an extra."""

from __future__ import annotations

import importlib
from typing import Any

from modelguard.errors import NotSupported


def load(module: str, *, distribution: str, extra: str) -> Any:
    """Import a module for the hook that has the same name as its extra.

    Raises:
        NotSupported: Its distribution is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in {module, module.partition(".")[0]}:
            raise
        why = f"{distribution} is not installed; pip install 'modelguard-lifecycle[{extra}]'"
        raise NotSupported(f"modelguard.telemetry.{extra}", reason=why) from None
