"""gunicorn's settings and where each comes from, in gunicorn's own order: file, GUNICORN_CMD_ARGS, command line.

Here a configuration file is only read. What it computes is not known then; ``modelguard doctor --gunicorn`` runs it.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from modelguard.diagnosis._argv import GUNICORN, Arguments, split
from modelguard.diagnosis._facts import Moment, Server, Variable
from modelguard.diagnosis._sources import KNOWN

__all__ = [
    "NAMES",
    "Setting",
    "Settings",
    "from_environment",
    "from_file",
    "from_words",
    "hooks",
    "server",
    "variables",
]

#: The settings that matter here.
NAMES = ("chdir", "max_requests", "preload_app", "pythonpath", "raw_env", "workers", "wsgi_app")

_OPTIONS = {
    "--chdir": "chdir",
    "--max-requests": "max_requests",
    "--preload": "preload_app",
    "--pythonpath": "pythonpath",
    "--workers": "workers",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        value: Its value; meaningless where it is not known.
        by: Who says so.
        known: Whether it could be told without running anything.
    """

    value: object
    by: str
    known: bool = True


Settings = Mapping[str, Setting]


def from_words(words: Arguments, by: str = "the command line") -> Settings:
    """Read the settings in a command line."""
    found = {
        name: Setting(words.options[option][-1], f"{option} on {by}")
        for option, name in _OPTIONS.items()
        if option in words.options
    }
    if "preload_app" in found:
        found["preload_app"] = Setting(value=True, by=found["preload_app"].by)
    if "--env" in words.options:
        found["raw_env"] = Setting(list(words.options["--env"]), f"--env on {by}")
    if words.rest:
        found["wsgi_app"] = Setting(words.rest[0], by)
    return found


def from_environment(environ: Mapping[str, str]) -> tuple[Settings, Arguments]:
    """Read the settings in ``GUNICORN_CMD_ARGS``, and those whose default comes from a variable."""
    try:
        words = split(shlex.split(environ.get("GUNICORN_CMD_ARGS", "")), GUNICORN)
    except ValueError:  # a quotation that does not end: gunicorn refuses to start
        words = Arguments({}, ())
    return from_words(words, "GUNICORN_CMD_ARGS"), words


def defaults(environ: Mapping[str, str]) -> Settings:
    """The settings whose default comes from a variable."""
    count = environ.get("WEB_CONCURRENCY")
    return {} if count is None else {"workers": Setting(count, "WEB_CONCURRENCY")}


def from_file(path: Path) -> Settings:
    """Read what a configuration file assigns, as far as it can be told without running it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, Setting] = {}
    for node, at_top in _assignments(tree):
        for name in NAMES:
            if name in _targets(node):
                found[name] = _literal(name, node.value, path, at_top=at_top)
    return found


def hooks(settings: Settings) -> dict[str, Moment]:
    """When the functions of a configuration file run (gunicorn/arbiter.py)."""
    preload = settings.get("preload_app", Setting(value=False, by=""))
    before_load: Moment = "server" if preload.known and not preload.value else "later"
    return {
        "on_starting": before_load,
        "when_ready": before_load,
        "pre_fork": before_load,
        "post_fork": before_load,
        "post_worker_init": "after import",
    }


def server(settings: Settings) -> Server:
    """Say what server the settings make."""
    workers, max_requests = settings.get("workers"), settings.get("max_requests")
    preload = settings.get("preload_app")
    return Server(
        "gunicorn",
        workers=1 if workers is None else _number(workers),
        workers_by=_by(workers),
        forks=True,
        preload=False if preload is None else bool(preload.value) if preload.known else None,
        preload_by=_by(preload),
        max_requests=0 if max_requests is None else _number(max_requests),
        max_requests_by=_by(max_requests),
    )


def variables(settings: Settings) -> tuple[Variable, ...]:
    """The variables in ``raw_env``, which gunicorn sets as it starts, before it loads the app."""
    setting = settings.get("raw_env")
    if setting is None or not setting.known or not isinstance(setting.value, list | tuple):
        return ()
    pairs = (str(entry).partition("=") for entry in setting.value)
    return tuple(Variable(name, value, "server", setting.by) for name, _, value in pairs if name in KNOWN)


def _by(setting: Setting | None) -> str:
    return "its default" if setting is None else setting.by


def _number(setting: Setting) -> int | None:
    try:
        return int(str(setting.value)) if setting.known else None
    except ValueError:
        return None


def _assignments(tree: ast.Module) -> Iterable[tuple[ast.Assign | ast.AnnAssign, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            yield node, node in tree.body


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _literal(name: str, value: ast.expr | None, path: Path, *, at_top: bool) -> Setting:
    by = f"{name} in {path.name} line {getattr(value, 'lineno', 1)}"
    try:
        return (
            Setting(ast.literal_eval(value), by, known=at_top) if value is not None else Setting(None, by, known=False)
        )
    except (ValueError, TypeError):
        return Setting(None, by, known=False)
