"""MG4xx: how workers are started, and how much memory each of them has for itself."""

from __future__ import annotations

from modelguard._units import format_bytes
from modelguard.diagnosis._checks_presets import TORCH
from modelguard.diagnosis._facts import Facts, Server, ServiceProcess
from modelguard.diagnosis._findings import Check, Evidence

__all__ = ["CHECKS", "MODELS", "holds_models"]

#: Packages that show by their import that a process holds a model.
MODELS = (
    *TORCH,
    "catboost", "faster_whisper", "fasttext", "flair", "gensim", "jax", "keras", "lightgbm", "llama_cpp", "onnxruntime",
    "sklearn", "spacy", "stanza", "tensorflow", "transformers", "xgboost",
)  # fmt: skip

#: Bytes: more than the private memory of a worker without a model. FastAPI takes about 30 MB, torch 100 MB.
_HOLDS_A_MODEL = 150_000_000

_FREEZE = "def when_ready(server): gc.collect(); gc.freeze()"
_OURS = "gunicorn -c python:modelguard.frameworks.gunicorn"


def _not_frozen(facts: Facts) -> Evidence | None:
    server = facts.server
    if server is None or not server.preforks or facts.app is None or _freezes(facts):
        return None
    seen = (
        f"{server.kind} loads the app before it forks ({server.preload_by})",
        f"gc.freeze is called neither in {_files(facts)}",
        *map(_own_share, facts.running("forked")),
    )
    return Evidence(seen, f"Use {_OURS}, or add to the configuration: import gc, and {_FREEZE}")


def _copies(facts: Facts) -> Evidence | None:
    server = facts.server
    if server is None or not server.forks or server.preload is not False or not _several(server):
        return None
    fix = f"Use {_OURS}, or set preload_app = True, freeze ({_FREEZE}), and load the model in the master."
    return _one_each(facts, server, facts.running("forked"), fix)


def _spawned_copies(facts: Facts) -> Evidence | None:
    server = facts.server
    if server is None or server.forks or not _several(server):
        return None
    fix = (
        "Use gunicorn with preload_app = True and an ASGI worker (uvicorn-worker), or one worker; or map the weights "
        "from a file: modelguard.weights."
    )
    return _one_each(facts, server, facts.running("spawned"), fix)


def _two_ways_to_reload(facts: Facts) -> Evidence | None:
    server, app = facts.server, facts.app
    if server is None or not server.max_requests or app is None or app.reloads is None:
        return None
    seen = (
        f"{server.kind} replaces a worker after {server.max_requests} requests ({server.max_requests_by})",
        f"{app.reloads} makes a guard that reloads inside the worker",
    )
    fix = "Use only one: remove max_requests, or give the guard reload_on=None and let the server replace workers."
    return Evidence(seen, fix)


def _cuda(facts: Facts) -> Evidence | None:
    fix = "Use CUDA only in the workers (load in gunicorn's post_worker_init, or without preload_app)."
    main = [process for process in facts.running("main") if process.cuda]
    if main and facts.running("forked"):
        return Evidence((f"process {main[0].pid} holds an NVIDIA device, and has forked workers",), fix)
    server, app = facts.server, facts.app
    if server is None or not server.preforks or not facts.machine.cuda or app is None or app.cuda is None:
        return None
    seen = f"{app.cuda} names a CUDA device, and {server.kind} loads the app before it forks ({server.preload_by})"
    return Evidence((seen,), fix)


def _one_each(facts: Facts, server: Server, workers: tuple[ServiceProcess, ...], fix: str) -> Evidence | None:
    """Evidence that each worker holds its own model: measured, or from the source."""
    count = f"{server.kind} runs {server.workers} workers ({server.workers_by}), and each loads the app itself"
    heavy = [worker for worker in workers if worker.private > _HOLDS_A_MODEL]
    if len(heavy) > 1:
        return Evidence((count, *map(_own_share, heavy)), fix)
    imported = facts.imported(MODELS)
    if imported is None or workers:
        return None  # unknown, or the running workers hold little
    return Evidence((count, imported), fix)


def _several(server: Server) -> bool:
    return server.workers is not None and server.workers > 1


def holds_models(facts: Facts) -> bool:
    return facts.imported(MODELS) is not None


def _freezes(facts: Facts) -> bool:
    return any(source is not None and source.freezes is not None for source in (facts.app, facts.config))


def _files(facts: Facts) -> str:
    sources = [source for source in (facts.config, facts.app) if source]
    return " nor in ".join(source.files[0] for source in sources if source.files)


def _own_share(process: ServiceProcess) -> str:
    return (
        f"process {process.pid} has {format_bytes(process.private)} for itself, "
        f"and shares {format_bytes(process.shared)} with others"
    )


CHECKS = (
    Check(
        "MG401",
        "The app is loaded before the fork, but not frozen",
        "A worker's first full garbage collection writes to every object that it inherited, so all their pages are "
        "copied: 276 of 282 MB for a heap of 600,000 small objects, and nothing after gc.freeze() in the parent.",
        _not_frozen,
    ),
    Check(
        "MG402",
        "Each forked worker holds its own model",
        "Workers that load the app after the fork do not share it: N workers take N times the memory.",
        _copies,
    ),
    Check(
        "MG403",
        "The server replaces workers, and the guard reloads too",
        "A new worker loads the model, and so does the guard inside a worker. Together they load more often than "
        "either is configured to, and some loads are wasted.",
        _two_ways_to_reload,
    ),
    Check(
        "MG404",
        "Each spawned worker holds its own model",
        "These servers start their workers without a fork and have no preload, so the model is not shared: N workers "
        "take N times the memory.",
        _spawned_copies,
    ),
    Check(
        "MG405",
        "CUDA is used before the fork",
        "CUDA does not support fork: every use in the workers fails or hangs.",
        _cuda,
    ),
)
