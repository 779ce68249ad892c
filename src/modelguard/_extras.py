"""Libraries that modelguard works with and does not depend on, and how to install each."""

from __future__ import annotations

from modelguard.errors import NotSupported

__all__ = ["not_installed"]

_COMMANDS = {
    "joblib": "pip install joblib",
    "numpy": "pip install numpy",
    "spacy": "pip install 'modelguard-lifecycle[spacy]'",
    "torch": "pip install torch --index-url https://download.pytorch.org/whl/cpu (without CUDA), "
    "or pip install 'modelguard-lifecycle[torch]'",
}


def not_installed(error: ModuleNotFoundError, feature: str) -> Exception:
    """Make the error for a library that is not installed.

    Args:
        error: What the import raised.
        feature: What needs the library.

    Returns:
        A :class:`~modelguard.errors.NotSupported` with the command that installs the library; ``error`` itself where
        something else is missing.
    """
    library = error.name
    if library not in _COMMANDS:
        return error
    return NotSupported(feature, reason=f"{library} is not installed; {_COMMANDS[library]}")
