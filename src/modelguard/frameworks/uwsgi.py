"""uWSGI: workers that share the master's models, and are replaced by new forks when a policy is due.

At the end of the module that uWSGI loads, after the application and its guards::

    from modelguard.frameworks import uwsgi

    uwsgi.install()

and in the configuration::

    master = true
    py-call-uwsgi-fork-hooks = true
    need-app = true
    skip-atexit-teardown = true

uWSGI loads the application in the master and then forks the workers, so the end of that module is the last point before
the first fork.
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
from modelguard.frameworks._workers import PreforkOptions, Workers

if TYPE_CHECKING:
    from modelguard import _units
    from modelguard.lifecycle.guard import ModelGuard
    from modelguard.prefork import ForkReport

__all__ = ["install"]

#: The exit status of a worker that could not load its application. uWSGI forks another, with pauses if they end early.
_NO_APP = 22

#: Recommended uWSGI options.
_ADVICE = {
    "need-app": "otherwise uWSGI keeps running without the application if install() raises",
    "skip-atexit-teardown": "otherwise each worker that ends frees the model object by object, which copies it first",
}


def install(*guards: ModelGuard[Any], min_lifetime: _units.Duration = 10.0) -> ForkReport:
    """Prepare the master, and replace each worker when a policy is due. Call it last in the application's module.

    In a worker a due policy does not load anything: the current request is answered, the worker ends, and the master
    forks another one, which is warm before it accepts requests. ``TTL``, ``Modified`` and ``Changed`` mean new weights:
    the master loads and prepares them, and then every worker is replaced. Workers are replaced one at a time, and no
    request is lost; an idle worker is replaced after its next request.

    Environment variables set the options of the preparation, as for :mod:`modelguard.frameworks.gunicorn`.

    Args:
        guards: The guards whose models are shared. Default: those made with ``prefork=True``, or all if there is none.
        min_lifetime: The minimum age at which a worker is replaced.

    Returns:
        What was found and done.

    Raises:
        NotSupported: This is not a uWSGI server, or one that runs coroutines.
        InvalidOption: uWSGI was started with options that prevent sharing a model; or as in ``prefork.prepare``.
        ForkOrder, ForkUnsafe, LoadFailed: As in ``prefork.prepare``.
    """
    server = _server()
    _check_configuration(server)
    workers = Workers(guards, PreforkOptions.read(os.environ), min_lifetime)
    report = workers.prepare()
    _advise(server.opt)
    _chain(server, "post_fork_hook", lambda: _begin(workers))
    _chain(server, "after_req_hook", lambda: _end_if_due(workers))
    return report


def _server() -> Any:
    """Import the module that exists only inside a uWSGI server."""
    try:
        server = importlib.import_module("uwsgi")
        server.masterpid  # noqa: B018 - a stub package of that name does not have it
    except (ImportError, AttributeError):
        why = (
            "this process is not a uWSGI server; start it with 'uwsgi --module app', or call install() under "
            "'if \"uwsgi\" in sys.modules:'"
        )
        raise NotSupported("modelguard.frameworks.uwsgi.install()", reason=why) from None
    return server


def _check_configuration(server: Any) -> None:
    if not server.masterpid():
        why = "must be true: without a master the first worker is the parent of the others"
        raise InvalidOption("master", False, why=why, fix="Add 'master = true' to uWSGI's configuration.")  # noqa: FBT003
    if server.worker_id() > 0:
        why = "must be false: each worker would load the application by itself, after the fork, and share nothing"
        raise InvalidOption("lazy-apps", True, why=why, fix="Remove 'lazy-apps' (and 'lazy').")  # noqa: FBT003
    if "py-call-uwsgi-fork-hooks" not in server.opt:
        why = "must be true: without it Python does not notice forks, and locks and threads are not repaired in workers"
        raise InvalidOption("py-call-uwsgi-fork-hooks", False, why=why, fix="Set it to true (uWSGI 2.0.24 or newer).")  # noqa: FBT003
    if server.loop or "async" in server.opt:
        why = "in its asynchronous modes uWSGI ends a worker during its requests; use processes and threads"
        raise NotSupported(f"recycling under uWSGI's loop {server.loop or 'async'!r}", reason=why)


def _advise(options: dict[str, object]) -> None:
    for name, why in _ADVICE.items():
        if name not in options:
            warnings.warn(f"uWSGI: set '{name} = true', {why}", ModelGuardWarning, stacklevel=3)


def _chain(server: Any, name: str, hook: Callable[[], None]) -> None:
    """Add a hook, and keep an existing one, such as that of uwsgidecorators."""
    earlier = getattr(server, name, None)

    def both() -> None:
        hook()
        if earlier is not None:
            earlier()

    setattr(server, name, both)


def _begin(workers: Workers) -> None:
    """Run in each worker, mule and spooler, just after the fork."""
    try:
        workers.begin()
    except Exception:  # noqa: BLE001 - any error of a warm-up; uWSGI would print it and serve anyway
        traceback.print_exc()  # to uWSGI's log, even if the application has not configured logging
        sys.stderr.flush()
        os._exit(_NO_APP)


def _end_if_due(workers: Workers) -> None:
    """Run in a worker when a request has been answered, but still counts as running."""
    if workers.must_end():
        # uWSGI's own handler ends the worker after this request, and the master forks another one. It must run now, in
        # the main thread: later it could interrupt the next request.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)
