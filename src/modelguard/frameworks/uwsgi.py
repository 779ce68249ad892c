"""uWSGI: workers that share the master's models, and are forked afresh when a policy is due.

At the end of the module that uWSGI loads, after the application and its guards::

    from modelguard.frameworks import uwsgi

    uwsgi.install()

and in the configuration::

    master = true
    py-call-uwsgi-fork-hooks = true
    need-app = true
    skip-atexit-teardown = true

uWSGI loads the application in the master and forks the workers next, so the end of that module is the last moment
before the first fork.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from modelguard.errors import InvalidOption, ModelGuardWarning, NotSupported
from modelguard.frameworks._prefork_options import PreforkOptions
from modelguard.frameworks._workers import Workers

if TYPE_CHECKING:
    from modelguard import _units
    from modelguard.lifecycle.guard import ModelGuard
    from modelguard.prefork import ForkReport

__all__ = ["install"]

#: What uWSGI calls a worker that could not load its application; it forks another one, with pauses if they die fast.
_NO_APP = 22

#: PreforkOptions without which it goes on, but not as well.
_ADVICE = {
    "need-app": "else uWSGI serves on without the application if install() raises",
    "skip-atexit-teardown": "else each worker that ends frees the model object by object, which copies it first",
}


def install(*guards: ModelGuard[Any], min_lifetime: _units.Duration = 10.0) -> ForkReport:
    """Prepare the master, and have each worker recycled when a policy is due. Call it last in the application's module.

    In a worker a due policy loads nothing: the current request is answered, the worker ends, and the master forks
    another one, which is warm before it accepts. ``TTL`` and ``Modified`` mean new weights: the master loads and
    prepares them, and then every worker is replaced. Workers leave one at a time, and no request is lost on the way; an
    idle worker is replaced after its next request.

    How to prepare is told by environment variables; see ``_prefork_options.PreforkOptions``.

    Args:
        guards: Whose models to share. Default: those made with ``prefork=True``, or all if none is marked so.
        min_lifetime: No worker is recycled before it is so old.

    Returns:
        What was found and done.

    Raises:
        NotSupported: This is no uWSGI server, or one that runs coroutines.
        InvalidOption: uWSGI was started with options that cannot share a model; or as ``prefork.prepare`` raises it.
        ForkOrder, ForkUnsafe, LoadFailed: As ``prefork.prepare`` raises them.
    """
    server = _server()
    _refuse_unfit(server)
    workers = Workers(guards, PreforkOptions.read(os.environ), min_lifetime)
    report = workers.prepare()
    _advise(server.opt)
    _chain(server, "post_fork_hook", lambda: _begin(workers))
    _chain(server, "after_req_hook", lambda: _end_if_due(workers))
    return report


def _server() -> Any:
    """The module that exists inside a uWSGI server only."""
    try:
        server = importlib.import_module("uwsgi")
        server.masterpid  # noqa: B018 - a stub of that name has nothing to tell
    except (ImportError, AttributeError):
        why = (
            "this process is no uWSGI server; start it with 'uwsgi --module app', or call install() under "
            "'if \"uwsgi\" in sys.modules:'"
        )
        raise NotSupported("modelguard.frameworks.uwsgi.install()", reason=why) from None
    return server


def _refuse_unfit(server: Any) -> None:
    if not server.masterpid():
        why = "without a master the first worker is the parent of the others"
        raise InvalidOption("master", False, why=why, fix="Add 'master = true' to uWSGI's configuration.")  # noqa: FBT003
    if server.worker_id() > 0:
        why = "each worker loads the application by itself, after the fork, so there is nothing to share"
        raise InvalidOption("lazy-apps", True, why=why, fix="Remove 'lazy-apps' (and 'lazy').")  # noqa: FBT003
    if "py-call-uwsgi-fork-hooks" not in server.opt:
        why = "without it Python is not told of forks: locks and threads would be left as they are in the master"
        raise InvalidOption("py-call-uwsgi-fork-hooks", False, why=why, fix="Set it to true (uWSGI 2.0.24 or newer).")  # noqa: FBT003
    if server.loop or "async" in server.opt:
        why = "in its asynchronous modes uWSGI ends a worker in the middle of its requests; use processes and threads"
        raise NotSupported(f"recycling under uWSGI's loop {server.loop or 'async'!r}", reason=why)


def _advise(options: dict[str, object]) -> None:
    for name, why in _ADVICE.items():
        if name not in options:
            warnings.warn(f"uWSGI: set '{name} = true', {why}", ModelGuardWarning, stacklevel=3)


def _chain(server: Any, name: str, hook: Callable[[], None]) -> None:
    """Add to what is called there already, as by uwsgidecorators."""
    earlier = getattr(server, name, None)

    def both() -> None:
        hook()
        if earlier is not None:
            earlier()

    setattr(server, name, both)


def _begin(workers: Workers) -> None:
    """In each worker, mule and spooler, just after the fork."""
    try:
        workers.begin()
    except Exception:  # noqa: BLE001 - whatever a warm-up raised; uWSGI would print it and serve all the same
        traceback.print_exc()  # into uWSGI's log, whether or not the application has configured logging
        sys.stderr.flush()
        os._exit(_NO_APP)


def _end_if_due(workers: Workers) -> None:
    """In a worker, when a request has been answered and counts as under way still."""
    if workers.leaves():
        # uWSGI's own handler: the worker ends after this request, and the master forks another one. Not from another
        # thread, and by no other: there the handler could run when the next request has just been accepted.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)
