"""The answers of the probe, as facts. They come from another program, so nothing in them is taken for granted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelguard.diagnosis import _redact
from modelguard.diagnosis._facts import Guarded, Inside, Moment, Server, Variable

__all__ = ["inside", "server"]


def inside(answer: Mapping[str, Any]) -> Inside:
    """Read what a process has said of itself."""
    version = (*(int(each) for each in answer.get("version", ())), 0, 0, 0)[:3]
    return Inside(
        version=(version[0], version[1], version[2]),
        free_threaded=bool(answer.get("free_threaded")),
        gil_for=None if (gil_for := answer.get("gil_for")) is None else tuple(map(str, gil_for)),
        huge_pages=bool(answer.get("huge_pages")),
        malloc=answer.get("malloc"),
        frozen=int(answer.get("frozen", 0)),
        tracked=int(answer.get("tracked", 0)),
        pools=tuple((str(name), int(count)) for name, count in dict(answer.get("pools", {})).items()),
        cuda=bool(answer.get("cuda")),
        guards=tuple(_guard(each) for each in answer.get("guards", ())),
        variables=tuple(_variable(*each) for each in answer.get("variables", ())),
        asgi=answer.get("asgi"),
    )


def server(answer: Mapping[str, Any]) -> Server | None:
    """Read the server's own settings; None if the process runs in no server that the probe knows."""
    found = answer.get("server")
    if not isinstance(found, dict):
        return None
    return Server(
        str(found["kind"]),
        workers=int(found.get("workers") or 1),
        forks=found["kind"] == "gunicorn",
        preload=found.get("preload_app", False if found["kind"] != "gunicorn" else None),
        config=_config(found.get("config")),
        worker_class=str(found.get("worker_class_str", "")),
        asgi_worker=str(found.get("asgi_worker", "")),
        threads=int(found.get("threads") or 1),
        max_requests=int(found.get("max_requests") or found.get("limit_max_requests") or 0),
        jitter=int(found.get("max_requests_jitter") or found.get("limit_max_requests_jitter") or 0),
        reload=bool(found.get("reload") or found.get("should_reload")),
        timeout=float(found.get("timeout") or 0),
        grace=float(found.get("graceful_timeout") or 0),
    )


def _config(name: object) -> str:
    """The configuration's name: gunicorn gives that of its default file whether or not it exists."""
    text = str(name or "")
    return "" if text == "./gunicorn.conf.py" else _redact.redact(text, {})


def _guard(given: Mapping[str, Any]) -> Guarded:
    policy = given.get("policy")
    loaded = float(given.get("load_seconds") or 0)
    unshared = bool(given.get("unshared"))
    return Guarded(str(given.get("name", "?")), None if policy is None else str(policy), loaded, unshared)


def _variable(name: str, value: str, moment: str, where: str) -> Variable:
    kind: Moment = "after import" if moment == "after import" else "app"
    return Variable(name, value, kind, _redact.redact(where, {}))
