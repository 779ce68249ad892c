"""Celery: pool processes that share their parent's models, and are replaced by new forks when a policy is due.

In the module with the tasks, after its guards::

    from modelguard.frameworks import celery

    celery.install()

Programs that only send tasks may import that module too: nothing happens until a worker starts. The worker prepares the
models after it has imported all tasks, and before it has a pool or connections.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from modelguard import _extras, _units
from modelguard.errors import InvalidOption
from modelguard.frameworks._workers import PreforkOptions, Workers
from modelguard.telemetry import logger

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard
    from modelguard.prefork import ForkReport

__all__ = ["install"]

#: A child's warm-up may take this many times as long as that of the trial child.
_WARM_UP_FACTOR = 5

_installed = False


def install(*guards: ModelGuard[Any], min_lifetime: _units.Duration = 10.0) -> None:
    """Make a Celery worker prepare its models before it forks its pool, and replace a process when a policy is due.

    In a process of the pool a due policy does not load anything: the current task ends, its result is delivered, the
    process exits, and the parent forks another one, which is warm before it takes a task. ``TTL``, ``Modified`` and
    ``Changed`` mean new weights: the parent loads and prepares them, and then every process is replaced. Processes are
    replaced one at a time, and no task is lost; an idle process is replaced only after its next task.

    In a pool that does not fork (solo, threads, eventlet, gevent) the guards work as in any other program, and a log
    message says so. A worker that cannot be prepared does not start: it logs the reason and exits with status 1.

    Environment variables set the options of the preparation, as for :mod:`modelguard.frameworks.gunicorn`.

    Args:
        guards: The guards whose models are shared. Default: those made with ``prefork=True``, or all if there is none.
        min_lifetime: The minimum age at which a process is replaced.

    Raises:
        NotSupported: Celery is not installed.
        InvalidOption: ``install()`` was called before, or ``min_lifetime`` is invalid.
    """
    global _installed
    if _installed:
        why = "must be given at once: install() was already called in this process"
        raise InvalidOption("guards", guards, why=why, fix="Call it once, with all guards.")
    workers = Workers(guards, PreforkOptions.read(os.environ), min_lifetime)
    signals = _celery("signals")
    signals.worker_init.connect(lambda sender, **_: _start(sender, workers), weak=False)
    _installed = True


def _celery(module: str) -> Any:
    return _extras.load(f"celery.{module}", "modelguard.frameworks.celery.install()")


# In the parent


def _start(worker: Any, workers: Workers) -> None:
    pool = _celery("concurrency").get_implementation(worker.pool_cls)
    if not issubclass(pool, _celery("concurrency.prefork").TaskPool):
        why = f"Celery's pool {pool.__module__} does not fork"
        _when_ready(lambda: logger.warning("modelguard shares no model: %s", why))
        return
    try:
        _check_start_method(worker)
        report = workers.prepare()
        _check_memory_limit(worker)
    except Exception as error:  # noqa: BLE001 - Celery would log it and start the worker anyway
        _end(error)
    _allow_warm_ups(worker.app.conf, report)
    _celery("signals").worker_process_init.connect(lambda **_: _begin(workers), weak=False)
    _when_ready(lambda: workers.log(report))


def _when_ready(log: Callable[[], None]) -> None:
    """Log when the worker is ready: Celery does not configure logging earlier."""
    _celery("signals").worker_ready.connect(lambda **_: log(), weak=False)


def _check_start_method(worker: Any) -> None:
    method = getattr(worker, "pool_start_method", "fork")
    if method != "fork":
        why = "must be 'fork': other processes share no memory with their parent"
        raise InvalidOption("worker_pool_start_method", method, why=why, fix="Set it to 'fork'.")


def _check_memory_limit(worker: Any) -> None:
    """Reject a limit below the parent's peak memory, which children inherit and Celery compares with the limit."""
    limit = worker.max_memory_per_child
    peak = importlib.import_module("billiard.compat").mem_rss()  # the figure that children compare, in KiB
    if limit and int(limit) <= peak:
        why = (
            f"is below the peak of {_units.format_bytes(peak * 1024)} that every process inherits from its parent, so "
            "each process would be replaced after every task"
        )
        fix = "Give the guard a MemoryGrowth policy instead: it counts only the private memory of a process."
        raise InvalidOption("worker_max_memory_per_child", limit, why=why, fix=fix)


def _allow_warm_ups(conf: Any, report: ForkReport) -> None:
    """Raise the time after which Celery kills a process that has not started (default 4 s), to include warm-ups."""
    needed = _WARM_UP_FACTOR * sum(report.tried.values())
    if needed > conf.worker_proc_alive_timeout:
        text = "modelguard raised worker_proc_alive_timeout to %.0f s, for the warm-ups"
        _when_ready(lambda: logger.info(text, needed))
        conf.worker_proc_alive_timeout = needed


def _end(error: Exception) -> NoReturn:
    traceback.print_exc()  # visible even if logging is not configured yet
    raise SystemExit(1) from error


# In a process of the pool


def _begin(workers: Workers) -> None:
    try:
        workers.begin()
    except Exception as error:  # noqa: BLE001 - as in the parent
        _end(error)
    processes, pools = importlib.import_module("billiard.process"), importlib.import_module("billiard.pool")
    worker = processes.current_process()._target  # noqa: SLF001 - billiard has no public access to it
    worker.wait_for_job = _ending_between_jobs(worker.wait_for_job, workers, pools.EX_RECYCLE)


def _ending_between_jobs(wait_for_job: Callable[[], Any], workers: Workers, status: int) -> Callable[[], Any]:
    """End the process between two tasks, as billiard itself does after ``worker_max_tasks_per_child``."""

    def wait_or_end() -> Any:
        if workers.must_end():
            # Billiard's worker waits until its parent has all results, and reports a regular exit.
            sys.exit(status)
        return wait_for_job()

    return wait_or_end
