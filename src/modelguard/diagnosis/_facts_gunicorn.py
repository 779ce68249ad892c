"""Facts about a gunicorn configuration, which is loaded as gunicorn does it: run, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelguard.diagnosis import _gunicorn_settings, _redact
from modelguard.diagnosis._deployment import gunicorn_deployment, known_variables
from modelguard.diagnosis._facts import Facts, Variable
from modelguard.diagnosis._facts_command import missing_preloads
from modelguard.diagnosis._facts_machine import machine, this_interpreter
from modelguard.diagnosis._gunicorn_settings import Setting
from modelguard.diagnosis._sources import KNOWN
from modelguard.errors import InvalidOption

__all__ = ["facts_of_gunicorn"]

_ARGUMENT = "--gunicorn"
_LOADER = Path(__file__).with_name("_gunicorn_loader.py")

#: The answer of a loader that gives none, because the configuration has called ``os._exit`` or crashed.
_ENDED: Mapping[str, Any] = {"error": "the end of the process", "line": None, "message": ""}

#: A configuration that takes longer does something that it should not, such as loading the model.
_SECONDS = 30.0


def facts_of_gunicorn(
    location: str,
    environ: Mapping[str, str] = os.environ,
    *,
    cwd: Path | None = None,
    root: Path = Path("/"),
    timeout: float = _SECONDS,
) -> Facts:
    """Load a configuration and judge it.

    Args:
        location: A file, or ``python:package.module``, as for gunicorn's own ``-c``.
        environ: The variables that gunicorn would be given.
        cwd: Where gunicorn would run, by default here.
        root: Where ``/proc``, ``/sys`` and ``/dev`` are found.
        timeout: Seconds that loading it may take.

    Raises:
        InvalidOption: It is not there, raises, takes too long, or has a value that gunicorn would refuse.
    """
    cwd = cwd or Path.cwd()
    if not location.startswith("python:") and not (cwd / location.removeprefix("file:")).is_file():
        raise InvalidOption(_ARGUMENT, location, why="does not exist", fix="Give the path of gunicorn's -c.")
    loaded = _load(location, environ, cwd, timeout)
    name = Path(loaded.file).name
    settings = {
        **_gunicorn_settings.defaults(environ),
        **{key: Setting(value, f"{key} in {name}") for key, value in loaded.settings.items()},
        **_gunicorn_settings.from_environment(environ)[0],
    }
    _require_numbers(settings, location)
    described = gunicorn_deployment(settings, Path(loaded.file), environ, cwd)
    told = {variable.name for variable in described.variables}
    computed = tuple(
        Variable(key, value, "server", f"os.environ in {name}")
        for key, value in loaded.environ.items()
        if key not in told
    )
    return Facts(
        f"the gunicorn configuration {location}",
        machine(root),
        (*known_variables(environ, "this environment"), *computed, *described.variables),
        this_interpreter(),
        tuple(missing_preloads(environ, root)),
        described.server,
        (),
        described.app,
        described.config,
        described.unknown,
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    settings: Mapping[str, object]
    environ: Mapping[str, str]
    file: str


def _load(location: str, environ: Mapping[str, str], cwd: Path, timeout: float) -> _Loaded:
    with tempfile.TemporaryDirectory(prefix="modelguard-") as folder:
        file = Path(folder, "answer.json")
        question = {
            "location": location,
            "names": _gunicorn_settings.NAMES,
            "variables": sorted(KNOWN),
            "answer": str(file),
        }
        try:
            _run([sys.executable, str(_LOADER), json.dumps(question)], environ, cwd, timeout)
        except subprocess.TimeoutExpired:
            why = f"must load quickly, and took more than {timeout:g} seconds"
            raise _refused(location, why, "Let it set values only, and load the model in the app.") from None
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    answer: dict[str, Any] = json.loads(text) if text else dict(_ENDED)
    if "error" in answer:
        raise _failed(location, answer, environ)
    return _Loaded(answer["settings"], answer["environ"], answer["file"])


def _run(command: list[str], environ: Mapping[str, str], cwd: Path, timeout: float) -> None:
    subprocess.run(  # noqa: S603 - this very Python, and a script of this package
        command,
        env=dict(environ),
        cwd=cwd,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _failed(location: str, answer: Mapping[str, Any], environ: Mapping[str, str]) -> InvalidOption:
    where = f" in line {answer['line']}" if answer["line"] else ""
    message = _redact.redact(str(answer["message"]).partition("\n")[0], environ)
    why = f"cannot be loaded: it failed{where} with {answer['error']}" + (f": {message}" if message else "")
    return _refused(location, why, "gunicorn --check-config -c CONF shows the whole error.")


def _refused(location: str, why: str, fix: str) -> InvalidOption:
    return InvalidOption(_ARGUMENT, location, why=why, fix=fix)


def _require_numbers(settings: Mapping[str, Setting], location: str) -> None:
    for name in ("max_requests", "workers"):
        text = str(settings[name].value) if name in settings else "0"
        if not text.strip().isdecimal():
            why = f"its {name} is not a whole number"
            raise _refused(location, why, f"Set {name} to one, such as 2.")
