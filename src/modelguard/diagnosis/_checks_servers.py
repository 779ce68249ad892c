"""MG4xx and MG5xx: how workers are started, and what each of them holds."""

from __future__ import annotations

from modelguard._units import format_bytes
from modelguard.diagnosis._checks_presets import TORCH
from modelguard.diagnosis._facts import Facts, Server, ServiceProcess
from modelguard.diagnosis._findings import Check, Evidence

__all__ = ["CHECKS"]

#: Packages whose import shows that a process holds a model.
_MODELS = (
    *TORCH,
    "catboost", "faster_whisper", "fasttext", "flair", "gensim", "jax", "keras", "lightgbm", "llama_cpp", "onnxruntime",
    "sklearn", "spacy", "stanza", "tensorflow", "transformers", "xgboost",
)  # fmt: skip

#: Bytes: more than a worker of a web framework holds alone. With FastAPI it is about 30 MB, with torch imported 100.
_HOLDS_A_MODEL = 150_000_000

_IMMORTAL = (3, 12)

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
    fix = "Keep one: remove max_requests, or give the guard reload_on=None and leave recycling to the server."
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


def _no_immortal_objects(facts: Facts) -> Evidence | None:
    python, server = facts.interpreter, facts.server
    if python is None or server is None or not server.preforks or not _holds_models(facts):
        return None
    if python.name == "CPython" and python.version >= _IMMORTAL and not python.free_threaded:
        return None
    fix = "Run it on CPython 3.12 or newer, with the GIL, where the model is made of many Python objects."
    return Evidence((f"the app is forked on {python}", str(facts.imported(_MODELS))), fix, "note")


def _one_each(facts: Facts, server: Server, workers: tuple[ServiceProcess, ...], fix: str) -> Evidence | None:
    """Evidence that each worker holds a model of its own: measured, or from the source."""
    count = f"{server.kind} runs {server.workers} workers ({server.workers_by}), and each loads the app for itself"
    heavy = [worker for worker in workers if worker.private > _HOLDS_A_MODEL]
    if len(heavy) > 1:
        return Evidence((count, *map(_own_share, heavy)), fix)
    imported = facts.imported(_MODELS)
    if imported is None or workers:
        return None  # unknown, or the running workers hold little
    return Evidence((count, imported), fix)


def _several(server: Server) -> bool:
    return server.workers is not None and server.workers > 1


def _holds_models(facts: Facts) -> bool:
    return facts.imported(_MODELS) is not None


def _freezes(facts: Facts) -> bool:
    return any(source is not None and source.freezes is not None for source in (facts.app, facts.config))


def _files(facts: Facts) -> str:
    sources = [source for source in (facts.config, facts.app) if source]
    return " nor in ".join(source.files[0] for source in sources if source.files)


def _own_share(process: ServiceProcess) -> str:
    return (
        f"process {process.pid} alone holds {format_bytes(process.private)}, "
        f"and shares {format_bytes(process.shared)} with others"
    )


CHECKS = (
    Check(
        "MG401",
        "The app is loaded before the fork, and not frozen",
        "A worker's first full garbage collection writes to every object that it inherited, so all of those pages "
        "are copied: 276 of 282 MB for a heap of 600,000 small objects, none of it after gc.freeze() in the parent.",
        _not_frozen,
    ),
    Check(
        "MG402",
        "Each forked worker holds a model of its own",
        "Workers that load the app after the fork share nothing of it: N workers take N times the memory.",
        _copies,
    ),
    Check(
        "MG403",
        "Workers are recycled, and reload as well",
        "A recycled worker loads the model again, and so does the guard inside it. Together they load more often than "
        "either was set to, and the second load makes the first one useless.",
        _two_ways_to_reload,
    ),
    Check(
        "MG404",
        "Each spawned worker holds a model of its own",
        "These servers start their workers afresh and have no preload, so nothing of the model is shared: N workers "
        "take N times the memory.",
        _spawned_copies,
    ),
    Check(
        "MG405",
        "CUDA is used before the fork",
        "CUDA does not support fork: in the workers every use of it fails or hangs.",
        _cuda,
    ),
    Check(
        "MG501",
        "This Python has no immortal objects",
        "Reading an object counts a reference in it, which copies its page in the worker, frozen or not. From "
        "CPython 3.12 on, objects can be made immortal, and reading them then writes nothing. Tensors and arrays are "
        "not affected: their data has no reference counts.",
        _no_immortal_objects,
    ),
)
