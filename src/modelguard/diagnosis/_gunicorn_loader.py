"""Loads a gunicorn configuration as gunicorn does, and prints what it says as JSON. Run as a script, never imported.

Only standard library, so that it runs under any Python, also one without modelguard. Whatever the configuration
prints goes nowhere: the answer has a file of its own.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path


def _load(location: str) -> dict[str, object]:
    if location.startswith("python:"):
        return vars(importlib.import_module(location.removeprefix("python:")))
    name = "__config__"
    loader = importlib.machinery.SourceFileLoader(name, location.removeprefix("file:"))
    spec = importlib.util.spec_from_file_location(name, location.removeprefix("file:"), loader=loader)
    assert spec is not None  # noqa: S101 - a loader was given
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return vars(module)


def _failure(error: BaseException, location: str) -> dict[str, object]:
    """What went wrong. Other errors' messages may hold what the configuration was computing with, such as secrets."""
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == location]
    line = error.lineno if isinstance(error, SyntaxError) else own[-1] if own else None
    tells = isinstance(error, ImportError | NameError | SyntaxError)
    return {"error": type(error).__name__, "line": line, "message": str(error) if tells else ""}


def _answer(location: str, names: list[str], variables: list[str]) -> dict[str, object]:
    sys.path.insert(0, str(Path.cwd()))
    before = dict(os.environ)
    try:
        loaded = _load(location)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a configuration may raise anything
        return _failure(error, location.removeprefix("file:"))
    settings = {name: loaded[name] for name in names if name in loaded}
    changed = {name: os.environ[name] for name in variables if os.environ.get(name) not in (None, before.get(name))}
    return {"settings": settings, "environ": changed, "file": str(loaded.get("__file__") or location)}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    answer = _answer(given["location"], given["names"], given["variables"])
    Path(given["answer"]).write_text(json.dumps(answer, default=str), encoding="utf-8")
