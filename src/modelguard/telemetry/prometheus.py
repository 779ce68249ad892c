"""Events as Prometheus metrics: ``telemetry.add_hook(prometheus())``. This needs the extra ``prometheus``.

``docs/metrics.md`` lists the metrics, alert rules and a dashboard. The hook also works in prometheus_client's
multiprocess mode, where several workers write to one folder.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelguard import _extras, _units
from modelguard.errors import InvalidOption
from modelguard.telemetry import _metrics
from modelguard.telemetry._metrics import Recorder

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from modelguard.telemetry._events import Event

__all__ = ["prometheus"]

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

#: The method that writes an amount.
_WRITES = {"counter": "inc", "gauge": "set", "histogram": "observe"}

#: In multiprocess mode, the hook that writes this process's files.
_writer: weakref.ref[Recorder] | None = None


def prometheus(registry: CollectorRegistry | None = None) -> Callable[[Event], None]:
    """Make a hook that reports events as Prometheus metrics; pass it to :func:`modelguard.telemetry.add_hook`, once.

    Args:
        registry: Where the metrics are registered. Default: prometheus_client's own ``REGISTRY``. In multiprocess mode
            this is not the registry to scrape: scrape one with a ``MultiProcessCollector``.

    Returns:
        The hook: a callable with one event as its argument.

    Raises:
        NotSupported: prometheus-client is not installed.
        InvalidOption: The metrics are already in this registry, or in multiprocess mode in any registry of this
            process; ``registry`` is not one; or ``PROMETHEUS_MULTIPROC_DIR`` is not a writable folder, or was set too
            late.
    """
    global _writer
    client = _extras.load("prometheus_client", "modelguard.telemetry.prometheus")
    if registry is None:
        registry = client.REGISTRY
    kind = "a CollectorRegistry of prometheus_client"
    _units.instance(registry, "registry", client.CollectorRegistry, kind, fix="Leave it out, or give one.")
    several = _writes_files()
    if several and _writer is not None and _writer() is not None:
        why = "must not get a second set of metrics in this process, which would overwrite the first one's files"
        raise InvalidOption("registry", registry, why=why, fix="Make one hook in a process, and add it once.")
    # no series is removed from a file
    hook = Recorder(partial(_record, _register(client, registry), removes=not several), "Prometheus")
    if several:
        _writer = weakref.ref(hook)
    return hook


def _record(
    metrics: dict[str, Any], metric: _metrics.Metric, labels: tuple[str, ...], amount: float, *, removes: bool
) -> None:
    if metric.only_current and not amount and removes:
        metrics[metric.name].remove(*labels)
    else:
        getattr(metrics[metric.name].labels(*labels), _WRITES[metric.kind])(amount)


def _writes_files() -> bool:
    """Whether this process is one of several that write their values to files in one folder."""
    values = importlib.import_module("prometheus_client.values")
    several = bool(getattr(values.ValueClass, "_multiprocess", False))
    folder = os.environ.get(_FOLDER)
    if folder is not None and not several:
        why = "was set after prometheus_client had been imported, and has no effect"
        raise InvalidOption(_FOLDER, folder, why=why, fix="Set it in the environment in which the server starts.")
    if several and not (folder and Path(folder).is_dir() and os.access(folder, os.W_OK)):
        why = "is not a folder that this process can write to"
        raise InvalidOption(_FOLDER, folder, why=why, fix="Make an empty folder before the server starts.")
    return several


def _register(client: Any, registry: Any) -> dict[str, Any]:
    """Register all metrics, or none if one of the names is already in use."""
    made: dict[str, Any] = {}
    try:
        for metric in _metrics.METRICS.values():
            made[metric.name] = _make(client, metric, registry)
    except ValueError as error:
        for each in made.values():
            registry.unregister(each)
        why = f"already has metrics of these names ({error})"
        fix = "Make one hook for a registry, and add it once."
        raise InvalidOption("registry", registry, why=why, fix=fix) from None
    return made


def _make(client: Any, metric: _metrics.Metric, registry: Any) -> Any:
    more: dict[str, dict[str, Any]] = {
        "gauge": {"multiprocess_mode": metric.mode},
        "histogram": {"buckets": metric.buckets},
    }
    kind = getattr(client, metric.kind.title())
    return kind(metric.prometheus_name, metric.help, metric.labels, registry=registry, **more.get(metric.kind, {}))
