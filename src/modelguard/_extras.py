"""Optional libraries, and how to install each."""

from __future__ import annotations

import importlib
from typing import Any

from modelguard.errors import NotSupported

__all__ = ["load", "not_installed"]

#: What pip installs for each package, by its import name.
_PIP = {
    **{name: name for name in ("aiohttp", "celery", "django", "joblib", "litestar", "numpy")},
    "cronsim": "'modelguard-lifecycle[cron]'",
    "grpc": "grpcio",
    "opentelemetry": "'modelguard-lifecycle[opentelemetry]'",
    "prometheus_client": "'modelguard-lifecycle[prometheus]'",
    "shtab": "'modelguard-lifecycle[cli]'",
    "spacy": "'modelguard-lifecycle[spacy]'",
    "torch": "torch --index-url https://download.pytorch.org/whl/cpu (without CUDA), "
    "or pip install 'modelguard-lifecycle[torch]'",
}


def load(module: str, feature: str) -> Any:
    """Import a module for a feature that needs it, or say how to install its library."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed(error, feature) from None


def not_installed(error: ModuleNotFoundError, feature: str) -> Exception:
    """The error that says how to install a library; ``error`` itself if another module is missing."""
    library = error.name or ""
    package = library.partition(".")[0]
    if package in {"celery", "opentelemetry"}:  # the latter is a namespace package, which others may have installed
        library = package
    if library not in _PIP:
        return error
    return NotSupported(feature, reason=f"{library} is not installed; pip install {_PIP[library]}")
