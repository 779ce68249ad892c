"""Why the demo cannot run, or has failed, and what to do about it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

FAILED = 1
CANNOT_RUN = 2

#: What each module is installed with. ja_ginza is a package of its own, beside spaCy.
PACKAGES = {
    "spacy": "spacy",
    "ja_ginza": "ja-ginza",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "matplotlib": "matplotlib",
}


class DemoFailed(Exception):
    """The demo ends here.

    Attributes:
        status: The exit status: 1 where it ran and failed, 2 where it could not run.
    """

    def __init__(self, message: str, *, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


def require_modules(modules: Iterable[str] = tuple(PACKAGES)) -> None:
    """Refuse to begin where a module is missing, naming the command that installs it."""
    missing = [PACKAGES[module] for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        packages = " ".join(missing)
        raise DemoFailed(f"The demo needs what is not installed here: pip install {packages}", status=CANNOT_RUN)


def require_apps(folder: Path, apps: Iterable[str]) -> None:
    """Refuse to begin where the two services are not to be found."""
    missing = [f"{app}.py" for app in apps if not (folder / f"{app}.py").is_file()]
    if missing:
        raise DemoFailed(
            f"There is no {' and no '.join(missing)} in {folder}. The services are no part of the installed package: "
            "run the demo in the root of modelguard's source tree, or say where they are with --app-dir.",
            status=CANNOT_RUN,
        )
