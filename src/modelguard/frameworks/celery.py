"""Celery: prefork workers that share their parent's models, and are forked afresh when a policy is due.

In the module with the tasks, after its guards::

    from modelguard.frameworks import celery

    celery.install()

Programs that only send tasks may import that module too: nothing happens before a worker starts. There the models are
prepared when the worker has imported all tasks and has neither pool nor connection yet.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from modelguard import _units
from modelguard.errors import InvalidOption, NotSupported
from modelguard.frameworks._prefork_options import PreforkOptions
from modelguard.frameworks._workers import Workers
from modelguard.telemetry import logger

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard
    from modelguard.prefork import ForkReport

__all__ = ["install"]

#: A child that warms up for so many times as long as the throw-away child did is still left alone.
_PATIENCE = 5
_KIB = 1024

_installed = False


def install(*guards: ModelGuard[Any], min_lifetime: _units.Duration = 10.0) -> None:
    """Have a Celery worker prepare before it forks its pool, and replace a process when a policy is due.

    In a process of the pool a due policy loads nothing: the current task ends and its result is handed over, the
    process leaves, and the parent forks another one, which is warm before it takes a task. ``TTL`` and ``Modified``
    mean new weights: the parent loads and prepares them, and then every process is replaced. Processes leave one at a
    time, and no task is lost on the way; an idle one may be replaced after its next task only.

    In a pool that does not fork (solo, threads, eventlet, gevent) the guards work as in any other program, and the log
    says so. A worker that cannot be prepared does not start: it logs why and exits with status 1.

    How to prepare is told by environment variables; see ``_prefork_options.PreforkOptions``.

    Args:
        guards: Whose models to share. Default: those made with ``prefork=True``, or all if none is marked so.
        min_lifetime: No process is replaced before it is so old.

    Raises:
        NotSupported: Celery is not installed.
        InvalidOption: ``install()`` was called before, or ``min_lifetime`` cannot be meant.
    """
    global _installed
    if _installed:
        why = "install() was called before in this process"
        raise InvalidOption("guards", guards, why=why, fix="Call it once, with all guards.")
    workers = Workers(guards, PreforkOptions.read(os.environ), min_lifetime)
    signals = _celery("signals")
    signals.worker_init.connect(lambda sender, **_: _start(sender, workers), weak=False)
    _installed = True


def _celery(module: str) -> Any:
    try:
        return importlib.import_module(f"celery.{module}")
    except ImportError:
        why = "Celery is not installed; 'pip install celery', or do not call install() here"
        raise NotSupported("modelguard.frameworks.celery.install()", reason=why) from None


# In the parent


def _start(worker: Any, workers: Workers) -> None:
    pool = _celery("concurrency").get_implementation(worker.pool_cls)
    if not issubclass(pool, _celery("concurrency.prefork").TaskPool):
        _log_when_ready(logging.WARNING, f"shares no model: Celery's pool {pool.__module__} does not fork")
        return
    try:
        _refuse_unfit(worker)
        report = workers.prepare()
        _refuse_limit(worker)
    except Exception as error:  # noqa: BLE001 - Celery would log it and start the worker all the same
        _end(error)
    _allow_warm_ups(worker.app.conf, report)
    _celery("signals").worker_process_init.connect(lambda **_: _begin(workers), weak=False)
    _log_when_ready(logging.INFO, str(report))


def _log_when_ready(level: int, text: str) -> None:
    """Celery has not configured logging before."""
    _celery("signals").worker_ready.connect(lambda **_: logger.log(level, "modelguard %s", text), weak=False)


def _refuse_unfit(worker: Any) -> None:
    method = getattr(worker, "pool_start_method", "fork")
    if method != "fork":
        why = "its processes start from nothing, so there is no memory to share"
        raise InvalidOption("worker_pool_start_method", method, why=why, fix="Set it to 'fork'.")


def _refuse_limit(worker: Any) -> None:
    """A child is born with its parent's peak, and Celery's limit is compared with the peak."""
    limit = worker.max_memory_per_child
    peak = importlib.import_module("billiard.compat").mem_rss()  # what the children compare with it, in KiB
    if limit and int(limit) <= peak:
        why = (
            f"every process is born with its parent's peak of {_units.format_bytes(peak * _KIB)}, so it would be "
            "replaced after each task"
        )
        fix = "Give the guard a MemoryGrowth policy instead: it counts what a process has for itself."
        raise InvalidOption("worker_max_memory_per_child", limit, why=why, fix=fix)


def _allow_warm_ups(conf: Any, report: ForkReport) -> None:
    """Celery kills a process that is not up in time (4 s, unless set), and warm-ups come before that."""
    least = _PATIENCE * sum(report.tried.values())
    if least > conf.worker_proc_alive_timeout:
        _log_when_ready(logging.INFO, f"raised worker_proc_alive_timeout to {least:.0f} s, for the warm-ups")
        conf.worker_proc_alive_timeout = least


def _end(error: Exception) -> NoReturn:
    traceback.print_exc()  # seen whether or not logging is configured yet
    raise SystemExit(1) from error


# In a process of the pool


def _begin(workers: Workers) -> None:
    try:
        workers.begin()
    except Exception as error:  # noqa: BLE001 - the same
        _end(error)
    processes, pools = importlib.import_module("billiard.process"), importlib.import_module("billiard.pool")
    worker = processes.current_process()._target  # noqa: SLF001 - billiard hands it out nowhere else
    worker.wait_for_job = _leaving(worker.wait_for_job, workers, pools.EX_RECYCLE)


def _leaving(wait_for_job: Callable[[], Any], workers: Workers, status: int) -> Callable[[], Any]:
    """Leave between two tasks, as billiard itself does after ``worker_max_tasks_per_child``."""

    def wait_or_leave() -> Any:
        if workers.leaves():
            # Billiard's worker waits until its parent has every result, and tells it that this was no accident.
            sys.exit(status)
        return wait_for_job()

    return wait_or_leave
