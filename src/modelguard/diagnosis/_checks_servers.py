"""MG4xx: how workers are started, and how much memory each of them has for itself."""

from __future__ import annotations

from modelguard._units import format_bytes
from modelguard.diagnosis._facts import Evidence, Facts, Remedy, Role, ServiceProcess, check

#: Bytes: more than the private memory of a worker without a model. FastAPI takes about 30 MB, torch 2.13 153 MB.
_HOLDS_A_MODEL = 180_000_000

#: Objects. A heap of 600,000 objects took 276 MB (CPython 3.11), so these are about 46 MB for each worker.
MANY_OBJECTS = 100_000


_FREEZE = "def when_ready(server): gc.collect(); gc.freeze()"
_OURS = ("-c", "python:modelguard.frameworks.gunicorn")

#: Seconds beyond a load, for the call that waits for it.
_ROOM = 30

#: gunicorn's own worker classes that speak WSGI only.
_KINDS_WITHOUT_ASGI = ("sync", "gthread", "gevent", "eventlet", "tornado")


@check(
    "MG401",
    "The app is loaded before the fork, but not frozen",
    "A worker's first full garbage collection writes to every object that it inherited, so all their pages are "
    "copied: 276 of 282 MB for a heap of 600,000 small objects, and nothing after gc.freeze() in the parent.",
)
def _not_frozen(facts: Facts) -> Evidence | None:
    server, main = facts.server, facts.running("main")
    if server is None or not server.preforks or not facts.running("forked") or not main or main[0].inside is None:
        return None
    inside = main[0].inside
    if inside.frozen > inside.tracked or inside.tracked < MANY_OBJECTS:  # CPython 3.12 freezes 375 at its own start
        return None
    loaded = (
        f"process {main[0].pid} has loaded the app before it forks; its collector examines {inside.tracked:,} objects, "
        "and few are frozen"
    )
    seen = (loaded, *map(_own_share, facts.running("forked")))
    fix = (
        f"With a guard, use gunicorn {' '.join(_OURS)}; without one, add to the configuration: import gc, and {_FREEZE}"
    )
    return Evidence(seen, fix, remedy=Remedy(options=_OURS) if _may_use_ours(facts) else None)


@check(
    "MG402",
    "Each forked worker holds its own model",
    "Workers that load the model after the fork do not share it: N workers take N times the memory.",
)
def _copies(facts: Facts) -> Evidence | None:
    server, heavy = facts.server, _heavy(facts, "forked")
    if server is None or not server.forks or len(heavy) <= 1 or server.preload:
        return None
    main = facts.running("main")
    if server.preload is None and any(process.private + process.shared > _HOLDS_A_MODEL for process in main):
        return None  # the app may well have been loaded before the fork
    fix = (
        f"Use gunicorn {' '.join(_OURS)}, or set preload_app = True, freeze ({_FREEZE}), and load the model on import."
    )
    remedy = Remedy(options=_OURS if _may_use_ours(facts) else ("--preload",))
    return Evidence((f"{server.kind} runs {server.workers} workers", *map(_own_share, heavy)), fix, remedy=remedy)


@check(
    "MG404",
    "Each spawned worker holds its own model",
    "These servers start their workers without a fork and have no preload, so the model is not shared: N workers "
    "take N times the memory.",
)
def _spawned_copies(facts: Facts) -> Evidence | None:
    server, heavy = facts.server, _heavy(facts, "spawned")
    if len(heavy) <= 1:
        return None
    kind = server.kind if server else "the service"
    fix = (
        "Use gunicorn with preload_app = True and an ASGI worker (uvicorn-worker), or one worker; or map the weights "
        "from a file: modelguard.weights."
    )
    count = f"{kind} runs {len(facts.running('spawned'))} workers, which it has not forked"
    return Evidence((count, *map(_own_share, heavy)), fix, remedy=Remedy(options=("--workers", "1")))


@check(
    "MG403",
    "The server replaces workers, and the guard reloads too",
    "A new worker loads the model, and so does the guard inside a worker. Together they load more often than "
    "either is configured to, and some loads are wasted.",
)
def _two_ways_to_reload(facts: Facts) -> Evidence | None:
    server = facts.server
    guards = [guard for process in facts.serving if process.inside for guard in process.inside.guards if guard.policy]
    if server is None or not server.max_requests or not guards:
        return None
    seen = (
        f"{server.kind} replaces a worker after {server.max_requests} requests",
        f"the guard {guards[0].name!r} replaces its model by {guards[0].policy}",
    )
    fix = "Use only one: remove max_requests, or give the guard reload_on=None and let the server replace workers."
    option = "--max-requests" if server.kind == "gunicorn" else "--limit-max-requests"
    remedy = Remedy(options=("--max-requests", "0")) if server.kind == "gunicorn" else Remedy(drop=(option,))
    return Evidence(seen, fix, remedy=remedy)


@check(
    "MG405",
    "CUDA is used before the fork",
    "CUDA does not support fork: every use in the workers fails or hangs.",
)
def _cuda(facts: Facts) -> Evidence | None:
    fix = "Use CUDA only in the workers (load in gunicorn's post_worker_init, or without preload_app)."
    main = [process for process in facts.running("main") if process.cuda or (process.inside and process.inside.cuda)]
    if not main or not facts.running("forked"):
        return None
    return Evidence((f"process {main[0].pid} uses an NVIDIA device, and has forked workers",), fix)


@check(
    "MG406",
    "An ASGI application is served by a WSGI worker",
    "These worker classes call the application with two arguments, an ASGI application takes three: every request "
    "fails with status 500.",
)
def _asgi_on_sync(facts: Facts) -> Evidence | None:
    server = facts.server
    asgi = any(process.inside and process.inside.asgi for process in facts.processes)
    if server is None or not asgi or server.worker_class not in _KINDS_WITHOUT_ASGI:
        return None
    seen = f"gunicorn serves an ASGI application with workers of the class {server.worker_class}"
    kind = server.asgi_worker or "uvicorn_worker.UvicornWorker"
    extra = "" if server.asgi_worker else ", from the package uvicorn-worker"
    return Evidence((seen,), f"Add --worker-class {kind}{extra}.", remedy=Remedy(options=("--worker-class", kind)))


@check(
    "MG407",
    "All workers are replaced at the same time",
    "Requests are spread evenly, so without a jitter all workers reach max_requests together and load together.",
)
def _in_step(facts: Facts) -> Evidence | None:
    server = facts.server
    if server is None or not server.max_requests or server.jitter or server.workers <= 1:
        return None
    jitter = max(1, server.max_requests // 10)
    seen = f"{server.kind} replaces each of {server.workers} workers after exactly {server.max_requests} requests"
    option = "--max-requests-jitter" if server.kind == "gunicorn" else "--limit-max-requests-jitter"
    return Evidence((seen,), f"Add {option} {jitter}.", remedy=Remedy(options=(option, str(jitter))))


@check(
    "MG408",
    "The server restarts when a source file changes",
    "It watches all source files, keeps one more process for that, and a deployment that copies files over the old "
    "ones restarts the service amid the copy. uvicorn runs a single worker then.",
)
def _restarts_on_changes(facts: Facts) -> Evidence | None:
    server = facts.server
    if server is None or not server.reload:
        return None
    fix = "Remove --reload (or reload=True) where the service runs for users."
    return Evidence((f"{server.kind} watches its source files",), fix, remedy=Remedy(drop=("--reload",)))


@check(
    "MG409",
    "A load takes longer than the server waits",
    "While a model is replaced by drain_first, calls wait for the load. A sync worker that waits gives no sign of "
    "life, and gunicorn kills it after the timeout, with its load; the next worker begins the same load. A worker "
    "that is stopped is killed after graceful_timeout, with the calls that wait.",
)
def _loads_too_long(facts: Facts) -> Evidence | None:
    """A call that waits for a load keeps a sync worker from giving its sign of life, and a stop from being graceful."""
    server = facts.server
    guards = [guard for process in facts.serving if process.inside for guard in process.inside.guards if guard.policy]
    if server is None or server.kind != "gunicorn" or not guards:
        return None
    slowest = max(guards, key=lambda guard: guard.load_seconds)
    silent = server.worker_class == "sync" and 0 < server.timeout <= slowest.load_seconds
    cut_off = 0 < server.grace <= slowest.load_seconds
    if not silent and not cut_off:
        return None
    enough = int(slowest.load_seconds) + _ROOM
    options = ("--timeout", str(enough)) if silent else ("--graceful-timeout", str(enough))
    seen = (
        f"the guard {slowest.name!r} has taken {slowest.load_seconds:.0f} s to load, and reloads by {slowest.policy}",
        f"gunicorn's timeout is {server.timeout:g} s, its graceful_timeout {server.grace:g} s",
    )
    return Evidence(seen, f"Add {' '.join(options)}.", "fault" if silent else "note", remedy=Remedy(options=options))


@check(
    "MG410",
    "prefork=True has no effect under this server",
    "A model is shared only if the process that forks the workers has loaded and prepared it before. Without that "
    "each worker loads its own.",
)
def _unshared(facts: Facts) -> Evidence | None:
    server = facts.server
    guards = [guard for process in facts.serving if process.inside for guard in process.inside.guards if guard.unshared]
    if server is None or server.workers <= 1 or not guards:
        return None
    seen = (
        f"the guard {guards[0].name!r} has prefork=True, and nothing has prepared its model to be shared",
        f"{server.kind} runs {server.workers} workers",
    )
    if not server.forks:
        fix = f"{server.kind} forks no workers, so there is nothing to share: use gunicorn {' '.join(_OURS)}."
        return Evidence(seen, fix)
    fix = (
        f"Use gunicorn {' '.join(_OURS)}; in a configuration of your own: from modelguard.frameworks.gunicorn import *"
    )
    return Evidence(seen, fix, remedy=Remedy(options=_OURS) if _may_use_ours(facts) else None)


@check(
    "MG411",
    "A process imports libraries that it does not use",
    "An isolated function's model is in a mold, which imports the libraries for itself. A server that imports them "
    "too, because the function stands in its own modules, holds them once more.",
)
def _unused_imports(facts: Facts) -> Evidence | None:
    owners = [one for one in facts.processes if one.isolates and one.libraries and not _has_models(one)]
    seen = (
        f"process {one.pid} has imported {', '.join(one.libraries)} and holds {format_bytes(one.private)} of its own; "
        "the models of its isolated functions are in other processes"
        for one in owners
    )
    fix = (
        "Unless it uses these libraries itself, move the isolated functions to a module that it does not import, and "
        "name them there: @isolate(target='module:function')."
    )
    return Evidence(tuple(seen), fix, "note") if owners else None


def _has_models(process: ServiceProcess) -> bool:
    return process.inside is not None and any(guard.load_seconds for guard in process.inside.guards)


def _may_use_ours(facts: Facts) -> bool:
    """Whether our configuration can take the place of the service's: it has none, and it has a guard to share."""
    guarded = any(process.inside and process.inside.guards for process in facts.processes)
    return guarded and facts.server is not None and not facts.server.config


def _heavy(facts: Facts, role: Role) -> list[ServiceProcess]:
    return [process for process in facts.running(role) if process.private > _HOLDS_A_MODEL]


def _own_share(process: ServiceProcess) -> str:
    return (
        f"process {process.pid} has written {format_bytes(process.private)} for itself, "
        f"and shares {format_bytes(process.shared)} of written memory with others"
    )


# MG5xx: what the interpreter itself does to memory.

_IMMORTAL = (3, 12)  # the first version of CPython with immortal objects

#: The first release that can keep small objects in huge pages.
_HUGE_PAGES = (3, 15)

#: The patches of CPython 3.14 whose garbage collector worked in increments. 3.14.5 went back to that of 3.13.
_INCREMENTAL = (3, 14), range(5)


@check(
    "MG501",
    "This Python has no immortal objects",
    "Reading an object changes its reference count, which copies its page in the worker, even if it is frozen. "
    "Since CPython 3.12, objects can be made immortal, and reading them then writes nothing. Tensors and arrays "
    "are not affected: their data has no reference counts.",
)
def _no_immortal_objects(facts: Facts) -> Evidence | None:
    python, server, main = facts.interpreter, facts.server, facts.running("main")
    if python is None or server is None or not server.preforks or not facts.running("forked") or not main:
        return None
    objects = main[0].inside.frozen + main[0].inside.tracked if main[0].inside else 0
    if objects < MANY_OBJECTS:
        return None
    if python.name == "CPython" and python.version >= _IMMORTAL and not python.free_threaded:
        return None
    fix = "If the model consists of many Python objects, use CPython 3.12 or newer, with the GIL."
    return Evidence((f"workers share {objects:,} objects on {python}",), fix, "note")


@check(
    "MG502",
    "This Python's garbage collector lets memory grow",
    "It looks at a part of the heap at a time, so objects in reference cycles stay longer, and memory grows more "
    "before they are freed. Traces, requests and models with cycles look like a leak.",
)
def _incremental_collector(facts: Facts) -> Evidence | None:
    python = facts.interpreter
    version, patches = _INCREMENTAL
    if python is None or python.name != "CPython" or python.free_threaded:
        return None
    if python.version != version or python.micro not in patches:
        return None
    seen = f"the service runs on CPython 3.14.{python.micro}, whose garbage collector works in increments"
    return Evidence((seen,), "Use CPython 3.14.5 or newer.", "note")


@check(
    "MG503",
    "Python keeps small objects in huge pages, and workers are forked",
    "A page that a worker writes to must be copied. If no huge page is free at that moment, the kernel ends the "
    "worker with SIGBUS.",
)
def _huge_pages(facts: Facts) -> Evidence | None:
    setting = facts.last("PYTHON_PYMALLOC_HUGEPAGES")
    built = [process for process in facts.running("forked") if process.inside and process.inside.huge_pages]
    if not built or built[0].inside is None or built[0].inside.version < _HUGE_PAGES or setting is None:
        return None
    if setting.value in ("", "0"):
        return None
    seen = f"{setting.where} sets {setting.name}={setting.value}, and process {built[0].pid} is a fork"
    return Evidence((seen,), f"Remove {setting.name}.", remedy=Remedy(unset=(setting.name,)))


@check(
    "MG504",
    "Python's allocator runs with its debug checks",
    "It adds 24 to 32 bytes to every block, fills blocks when they are made and freed, and checks them: more "
    "memory and time for every object. It is meant to find faults of extensions.",
)
def _debug_allocator(facts: Facts) -> Evidence | None:
    setting = facts.last("PYTHONMALLOC")
    if setting is None or setting.moment != "exec" or not setting.value.endswith("debug"):
        return None
    seen = f"{setting.where} sets {setting.name}={setting.value}"
    return Evidence((seen,), f"Remove {setting.name}.", remedy=Remedy(unset=(setting.name,)))


@check(
    "MG505",
    "An extension has switched the GIL back on",
    "A Python without the GIL switches it on when it imports an extension module that does not say that it needs "
    "none. From then on one thread runs at a time, and what the build costs in speed and memory buys nothing.",
)
def _gil_switched_on(facts: Facts) -> Evidence | None:
    found = [process for process in facts.serving if process.inside and process.inside.gil_for is not None]
    if not found or found[0].inside is None:
        return None
    names = ", ".join(found[0].inside.gil_for or ())
    seen = f"process {found[0].pid} is free-threaded, and has switched the GIL on to load {names or 'an extension'}"
    what = names or "the extension that Python's RuntimeWarning names at its import"
    fix = f"Use a release of {what} that supports Python without the GIL, or the ordinary build of Python."
    return Evidence((seen,), fix)
