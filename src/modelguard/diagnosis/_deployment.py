"""What a launch says of the service it makes: its server, its app's source, and the variables set on the way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from modelguard.diagnosis import _gunicorn_settings, _sources
from modelguard.diagnosis._argv import GUNICORN, UVICORN, OptionTable, split
from modelguard.diagnosis._commands import Command
from modelguard.diagnosis._facts import Server, Source, Variable
from modelguard.diagnosis._gunicorn_settings import Settings

__all__ = ["Deployment", "deployment_of", "gunicorn_deployment", "known_variables"]

_COMPUTED = "is computed in the configuration; give it to modelguard doctor --gunicorn, which runs it"


@dataclass(frozen=True, slots=True)
class Deployment:
    """What a launch says, each field as in :class:`modelguard.diagnosis._facts.Facts`."""

    server: Server | None = None
    app: Source | None = None
    config: Source | None = None
    variables: tuple[Variable, ...] = ()
    unknown: tuple[str, ...] = ()


def known_variables(environ: Mapping[str, str], where: str) -> tuple[Variable, ...]:
    """Keep of an environment what modelguard knows."""
    return tuple(Variable(name, environ[name], "exec", where) for name in sorted(_sources.KNOWN & environ.keys()))


def deployment_of(launch: Command, cwd: Path) -> Deployment:
    """Read off a launch what it makes.

    Args:
        launch: What is started.
        cwd: Where.
    """
    return _KINDS.get(launch.kind, _unknown)(launch, cwd)


def gunicorn_deployment(settings: Settings, config: Path | None, environ: Mapping[str, str], cwd: Path) -> Deployment:
    """Read off gunicorn's settings what they make.

    Args:
        settings: All of them.
        config: The configuration file, None if there is none.
        environ: What gunicorn is started with.
        cwd: Where.
    """
    folder = cwd / str(_known(settings, "chdir", "."))
    extra = str(_known(settings, "pythonpath", "") or "").split(",")
    folders = [folder, *(folder / path for path in extra if path), *_python_path(environ, cwd)]
    server = _gunicorn_settings.server(settings)
    read = None
    if config is not None:
        read = _sources.read_source([config], folders, moment="server", hooks=_gunicorn_settings.hooks(settings))
    app, unknown = _app(_known(settings, "wsgi_app", None), folders)
    computed = [f"{name} {_COMPUTED}" for name, setting in settings.items() if not setting.known]
    set_by_config = read.variables if read else ()
    variables = (*set_by_config, *_gunicorn_settings.variables(settings), *(app.variables if app else ()))
    return Deployment(server, app, read, variables, (*computed, *unknown))


def _gunicorn(launch: Command, cwd: Path) -> Deployment:
    words = split(launch.words, GUNICORN)
    from_environment, more = _gunicorn_settings.from_environment(launch.environ)
    name = words.last("--config") or more.last("--config")
    config = cwd / (name or "gunicorn.conf.py").removeprefix("file:")
    unknown: tuple[str, ...] = ()
    if name and name.startswith("python:"):
        found = _sources.find_module(name.removeprefix("python:"), [cwd, *_python_path(launch.environ, cwd)])
        config = found[-1] if found else cwd / name
    if name and not config.is_file():
        unknown = (f"gunicorn's configuration {name} was not found in {cwd}",)
    exists = config.is_file()
    settings = {
        **_gunicorn_settings.defaults(launch.environ),
        **(_gunicorn_settings.from_file(config) if exists else {}),
        **from_environment,
        **_gunicorn_settings.from_words(words),
    }
    described = gunicorn_deployment(settings, config if exists else None, launch.environ, cwd)
    return _with_unknown(described, unknown)


def _uvicorn(launch: Command, cwd: Path) -> Deployment:
    words = split(launch.words, UVICORN)
    folders = [cwd / (words.last("--app-dir") or "."), *_python_path(launch.environ, cwd)]
    target = words.rest[0] if words.rest else launch.environ.get("UVICORN_APP")
    app, unknown = _app(target, folders)
    counts = {
        "--workers on the command line": words.last("--workers"),
        "UVICORN_WORKERS": launch.environ.get("UVICORN_WORKERS"),
        "WEB_CONCURRENCY": launch.environ.get("WEB_CONCURRENCY"),
    }
    if "--env-file" in words.options:
        unknown = (*unknown, "the file given by --env-file was not read")
    return Deployment(_spawning("uvicorn", counts), app, None, app.variables if app else (), unknown)


def _other_server(launch: Command, cwd: Path) -> Deployment:
    """Both hypercorn and granian start their workers afresh, and have --workers and -w."""
    words = split(launch.words, OptionTable(frozenset({"--reload", "--factory", "--access-log"}), {"-w": "--workers"}))
    app, unknown = _app(words.rest[0] if words.rest else None, [cwd, *_python_path(launch.environ, cwd)])
    server = _spawning(launch.kind, {"--workers on the command line": words.last("--workers")})
    return Deployment(server, app, None, app.variables if app else (), unknown)


def _python(launch: Command, cwd: Path) -> Deployment:
    name = launch.words[0]
    if launch.kind == "script":
        files = [cwd / name] if (cwd / name).is_file() else []
        folders = [(cwd / name).parent, *_python_path(launch.environ, cwd)]
    else:
        folders = [cwd, *_python_path(launch.environ, cwd)]
        files = _sources.find_module(name, folders) or _sources.find_module(f"{name}.__main__", folders)
    if not files:
        return Deployment(unknown=(f"the source of {name} was not found in {cwd}, so what it imports is not known",))
    app = _sources.read_source(files, folders)
    return Deployment(None, app, None, app.variables, app.unknown)


def _unknown(launch: Command, _cwd: Path) -> Deployment:
    return Deployment(unknown=("what this program starts is not known to modelguard",) if launch.kind else ())


def _app(target: object, folders: Sequence[Path]) -> tuple[Source | None, tuple[str, ...]]:
    """The source of an app that is given as ``package.module:name``."""
    if not isinstance(target, str) or not target:
        return None, ("which app is served is not said here, so its source was not read",)
    module = target.partition(":")[0]
    files = _sources.find_module(module, folders)
    if not files:
        return None, (f"the source of the app's module {module} was not found in {folders[0]}",)
    source = _sources.read_source(files, folders)
    return source, source.unknown


def _spawning(kind: str, counts: Mapping[str, str | None]) -> Server:
    for by, count in counts.items():
        if count is not None:
            return Server(kind, workers=int(count) if count.isdecimal() else None, workers_by=by)
    return Server(kind)


def _known(settings: Settings, name: str, default: object) -> object:
    setting = settings.get(name)
    return default if setting is None or not setting.known else setting.value


def _python_path(environ: Mapping[str, str], cwd: Path) -> list[Path]:
    return [cwd / part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _with_unknown(described: Deployment, unknown: tuple[str, ...]) -> Deployment:
    return Deployment(
        described.server, described.app, described.config, described.variables, (*unknown, *described.unknown)
    )


_KINDS = {
    "granian": _other_server,
    "gunicorn": _gunicorn,
    "hypercorn": _other_server,
    "module": _python,
    "script": _python,
    "uvicorn": _uvicorn,
}
