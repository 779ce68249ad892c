"""Optional libraries, and how to install each."""

from __future__ import annotations

import importlib
from typing import Any

from modelguard.errors import NotSupported

__all__ = ["load", "not_installed"]

#: The install command for each package, by its import name.
_COMMANDS = {
    "aiohttp": "pip install aiohttp",
    "celery": "pip install celery",
    "cronsim": "pip install 'modelguard-lifecycle[cron]'",
    "django": "pip install django",
    "grpc": "pip install grpcio",
    "joblib": "pip install joblib",
    "litestar": "pip install litestar",
    "numpy": "pip install numpy",
    "opentelemetry": "pip install 'modelguard-lifecycle[opentelemetry]'",
    "prometheus_client": "pip install 'modelguard-lifecycle[prometheus]'",
    "shtab": "pip install 'modelguard-lifecycle[cli]'",
    "spacy": "pip install 'modelguard-lifecycle[spacy]'",
    "torch": "pip install torch --index-url https://download.pytorch.org/whl/cpu (without CUDA), "
    "or pip install 'modelguard-lifecycle[torch]'",
}

#: What a package is called, where that is not its import name.
_NAMES = {"celery": "Celery", "django": "Django", "grpc": "grpcio", "litestar": "Litestar"}


def load(module: str, feature: str) -> Any:
    """Import a module for a feature that needs it.

    Raises:
        NotSupported: The module's library is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise not_installed(error, feature) from None


def not_installed(error: ModuleNotFoundError, feature: str) -> Exception:
    """Make the error for a library that is not installed.

    Args:
        error: The error that the import raised.
        feature: The feature that needs the library.

    Returns:
        A :class:`~modelguard.errors.NotSupported` with the command that installs the library; ``error`` itself if
        another module is missing.
    """
    library = error.name or ""
    for package in ("celery", "opentelemetry"):  # the latter is a namespace package, which others may have installed
        if library.startswith(f"{package}."):
            library = package
    if library not in _COMMANDS:
        return error
    return NotSupported(feature, reason=f"{_NAMES.get(library, library)} is not installed; {_COMMANDS[library]}")
