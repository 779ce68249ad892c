"""Ray Serve: a guarded, batched function as a deployment, whose replicas are replaced when a policy is due.

In the module with the function::

    from modelguard.frameworks import ray

    count_words = ray.deployment(count, num_replicas=2)
    app = count_words.bind()  # serve run service:app, or a part of a larger application

Elsewhere, ``await handle.remote(item)``; over HTTP, a POST with the item as JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
import time
from dataclasses import asdict
from http import HTTPStatus
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from modelguard import _units
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported, Overloaded
from modelguard.frameworks._answers import Answer, WebOptions, problem
from modelguard.frameworks._turns import Turns
from modelguard.lifecycle.guard import guard_of
from modelguard.serving.doors import Batched
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

if TYPE_CHECKING:
    from modelguard.lifecycle.guard import ModelGuard

__all__ = ["Replica", "deployment", "run"]

#: What Ray waits for requests under way before it kills a replica, in seconds; and what is given beyond a deadline.
_DRAIN, _SPARE = 20.0, 5.0
#: Serve checks a replica's health once while it starts, and again when it is among those that requests go to.
_RUNS = 2

_NAMESPACE = "modelguard"


def deployment(
    function: Batched[Any, Any],
    *,
    name: str | None = None,
    min_lifetime: _units.Duration = "1m",
    replace_timeout: _units.Duration = "5m",
    **options: Any,
) -> Any:
    """Make a Serve deployment of a batched function over a guard.

    Each replica imports the function's module, loads the model, warms it up, and then serves. A policy that becomes
    due loads nothing there: the replica's health check fails, and Serve stops sending it requests, lets it end those
    that it has, and starts another one. One replica leaves at a time. With a single one, requests wait at their
    callers until its successor is up.

    The bounds are those of ``batched``. A replica takes in more than its queue holds, so that it is the queue that
    refuses, at once, knowing when to try again: callers of a handle get ``ray.serve.exceptions.BackPressureError``,
    clients over HTTP 503 with ``Retry-After``. While no replica is there, requests wait at their callers, as many at
    each as a replica takes in, which is twice what fits its queue and its batches. The deadline counts from the arrival
    at the replica; ``handle.remote(item, timeout=...)`` and the header ``Request-Timeout`` shorten it. When it has
    passed, callers of a handle get ``DeadlineExceeded``, clients 504.

    Args:
        function: Made by ``batched`` over a guard's decorator, at the top of a module that the replicas can import.
        name: The deployment's name. Default: the function's.
        min_lifetime: No replica is replaced before it is so old.
        replace_timeout: After so long a replica that was to be replaced is not waited for, and the next one may leave.
        options: Whatever ``serve.deployment`` takes: ``num_replicas``, ``ray_actor_options``, ``autoscaling_config``...
            They win over what is carried over from the function. A replica leaves after three failed health checks,
            ``health_check_period_s`` apart (Ray's default is 10).

    Returns:
        A ``ray.serve.Deployment``.

    Raises:
        InvalidOption: ``function`` is not batched, not guarded or cannot be imported by replicas; or an option cannot
            be meant.
        NotSupported: Ray Serve is not installed.
    """
    reference = _reference(function)
    body = {
        "__doc__": function.__doc__,
        "reference": reference,
        "least": _units.seconds(min_lifetime, "min_lifetime", zero=True),
        "patience": _units.seconds(replace_timeout, "replace_timeout"),
    }
    carried = _carried(function) | options
    _check_ongoing(function, carried["max_ongoing_requests"])
    title = reference.partition(":")[2]
    serve = _ray("ray.serve")
    try:
        return serve.deployment(type(title, (Replica,), body), name=name or title, **carried)
    except (TypeError, ValueError) as error:  # among them pydantic's
        why = f"Ray Serve refuses them: {error}"
        raise InvalidOption("options", options, why=why, fix="See serve.deployment for what it takes.") from error


def run(
    function: Batched[Any, Any], *, app_name: str = "default", route_prefix: str | None = "/", **options: Any
) -> Any:
    """Deploy a batched function as an application of its own, and wait until it serves.

    Args:
        function: See :func:`deployment`.
        app_name: The application's name; one of that name is replaced.
        route_prefix: Where it is found over HTTP; None for handles alone.
        options: See :func:`deployment`.

    Returns:
        A ``ray.serve.handle.DeploymentHandle``.

    Raises:
        InvalidOption: See :func:`deployment`.
        NotSupported: Ray Serve is not installed, or Ray is not initialised: left to itself Serve would start a Ray of
            its own on this machine, with all its processors.
    """
    made = deployment(function, **options)
    if not _ray("ray").is_initialized():
        why = "Ray is not initialised in this process; call ray.init() for a local one, or ray.init('auto') to join one"
        raise NotSupported("modelguard.frameworks.ray.run()", reason=why)
    return _ray("ray.serve").run(made.bind(), name=app_name, route_prefix=route_prefix)


class Replica:
    """One replica of a deployment. Made by Ray, of the class that :func:`deployment` gives it.

    Attributes:
        reference: Where the function is, as ``module:name``.
        least: Seconds that a replica lives at least.
        patience: Seconds after which a replica that has left is no longer waited for.
    """

    reference: ClassVar[str]
    least: ClassVar[float]
    patience: ClassVar[float]

    async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
        """Load the model."""
        context = _ray("ray.serve").get_replica_context()
        self._born = time.monotonic()
        self._name = context.replica_tag
        self._function: Batched[Any, Any] = resolve_name(self.reference)
        self._guard = _guard(self._function)
        self._due: tuple[int, tuple[Reason, ...]] | None = None
        self._web = WebOptions()
        self._request: type[Any] = importlib.import_module("starlette.requests").Request
        self._turns = Turns(
            _Store(), f"{context.app_name}/{context.deployment}", context.replica_tag, patience=self.patience
        )
        self._guard.recycle_here(self._ask)
        self._checks = 0
        await self._guard.aload()

    async def __call__(self, item: Any, *, timeout: _units.Duration | None = None, **extras: Any) -> Any:
        """Compute one item.

        Args:
            item: What the batch function gets one of its list from; or Serve's request, with the item as JSON.
            timeout: How long it may take at most.
            extras: Further keyword arguments of the batch function.

        Raises:
            BackPressureError: There is no room now; ``retry_after_s`` tells when there may be.
            DeadlineExceeded: The time ran out.
            Exception: What the function raised for this item.
        """
        if isinstance(item, self._request):
            return await self._answer(item)
        try:
            return await self._function.aio(item, timeout=timeout, **extras)
        except Overloaded as error:
            raise self._pressure(error) from error

    def status(self) -> dict[str, Any]:
        """What this replica tells of itself: its name, the guard's status and the queue's."""
        return {
            "replica": self._name,
            "guard": asdict(self._guard.status()),
            "queue": asdict(self._function.status()),
            "due": tuple(map(str, self._reasons())),
        }

    async def check_health(self) -> None:
        """Tell Serve whether to keep this replica.

        Raises:
            RuntimeError: It is to be replaced.
        """
        self._checks += 1
        if self._checks == _RUNS:
            await self._arrive()
        reasons = self._reasons()
        if not reasons or time.monotonic() - self._born < self.least:
            return
        try:
            mine = await asyncio.to_thread(self._turns.take)
        except Exception:  # noqa: BLE001 - an unreachable store is no reason to end what serves
            logger.exception("modelguard: replica %s could not ask for its turn to leave", self._name)
            return
        if mine:
            raise RuntimeError(f"replica {self._name} asks to be replaced, by {', '.join(map(str, reasons))}")

    async def _arrive(self) -> None:
        """Let the next replica leave that has to."""
        try:
            await asyncio.to_thread(self._turns.arrive)
        except Exception:  # noqa: BLE001 - it can serve; the next one to leave waits out its patience
            logger.exception("modelguard: replica %s could not say that it has arrived", self._name)

    def _ask(self, reasons: tuple[Reason, ...]) -> None:
        self._due = (self._guard.status().generation, reasons)

    def _reasons(self) -> tuple[Reason, ...]:
        """Why it is to be replaced; nothing, if somebody has reloaded the model since."""
        due = self._due
        return due[1] if due is not None and due[0] == self._guard.status().generation else ()

    def _pressure(self, error: Overloaded) -> Exception:
        status, limit = self._function.status(), self._function._settings.limits.max_queue  # noqa: SLF001
        kind = _ray("ray.serve.exceptions").BackPressureError
        made: Exception = kind(status.waiting, limit, int(HTTPStatus.SERVICE_UNAVAILABLE), error.retry_after)
        made.add_note(str(error))
        return made

    async def _answer(self, request: Any) -> Any:
        bound = self._web.bound(request.headers.get(self._web.timeout_header))
        if isinstance(bound, Answer):
            return _response(bound)
        try:
            item = json.loads(await request.body())
        except ValueError:
            return _response(problem(HTTPStatus.BAD_REQUEST, "The body must be one item as JSON."))
        try:
            return await self._function.aio(item, timeout=bound)
        except ModelGuardError as error:
            answer = self._web.answer(error)
            if answer is None:
                raise
            return _response(answer)


class _Store:
    """The key-value store of Ray's head node, which Serve keeps its own state in as well."""

    def __init__(self) -> None:
        self._kv = _ray("ray.experimental.internal_kv")

    def put_if_absent(self, key: str, value: str) -> bool:
        there: bool = self._kv._internal_kv_put(key, value, overwrite=False, namespace=_NAMESPACE)  # noqa: SLF001
        return not there

    def get(self, key: str) -> str | None:
        value: bytes | None = self._kv._internal_kv_get(key, namespace=_NAMESPACE)  # noqa: SLF001
        return None if value is None else value.decode()

    def delete(self, key: str) -> None:
        self._kv._internal_kv_del(key, namespace=_NAMESPACE)  # noqa: SLF001

    def keys(self, prefix: str) -> list[str]:
        return [key.decode() for key in self._kv._internal_kv_list(prefix, namespace=_NAMESPACE)]  # noqa: SLF001


def _ray(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = f"Ray Serve cannot be imported ({error}); pip install 'modelguard-lifecycle[ray]'"
        raise NotSupported("modelguard.frameworks.ray", reason=why) from error


def _response(answer: Answer) -> Any:
    kind = importlib.import_module("starlette.responses").Response
    return kind(answer.body, status_code=answer.status, headers=dict(answer.headers))


def _guard(function: Any) -> ModelGuard[Any]:
    return guard_of(function.__wrapped__)


def _reference(function: Any) -> str:
    """Where replicas find the function."""
    if not isinstance(function, Batched):
        why = f"a batched function is needed, and this is a {type(function).__name__}"
        fix = "Put @batched(max_size=...) over @the_guard, and give the name that it decorates."
        raise InvalidOption("function", function, why=why, fix=fix)
    try:
        _guard(function)
    except InvalidOption:
        why = "no guard decorates it, so nothing would ever replace its replicas"
        fix = "Put @the_guard between @batched(...) and the function, or use @serve.deployment alone."
        raise InvalidOption("function", function, why=why, fix=fix) from None
    module, name = str(function.__module__), str(function.__qualname__)  # type: ignore[attr-defined]
    if function._method is not None or "<locals>" in name:  # noqa: SLF001
        why = "replicas find a function by its name in a module, and this one has none there"
        raise InvalidOption("function", function, why=why, fix="Write it at the top of a module.")
    if module == "__main__":
        why = "it is in the script that runs, which replicas cannot import"
        raise InvalidOption("function", function, why=why, fix="Move it into a module, and import it from there.")
    if getattr(sys.modules.get(module), name, None) is not function:
        why = f"{module}.{name} is something else, which replicas would find instead"
        raise InvalidOption("function", function, why=why, fix="Give the deployment another name than the function.")
    return f"{module}:{name}"


def _capacity(function: Batched[Any, Any]) -> int:
    """Items that its queue and its workers hold together."""
    limits = function._settings.limits  # noqa: SLF001
    return limits.max_queue + limits.workers * limits.max_size


def _carried(function: Batched[Any, Any]) -> dict[str, Any]:
    """The bounds of a batched function in Serve's words."""
    deadline = function._settings.deadline  # noqa: SLF001
    return {
        # The queue has to see a request in order to refuse it. Serve would let it wait, out of sight of its deadline.
        "max_ongoing_requests": 2 * _capacity(function),
        # Not less: Serve counts those on their way to a replica among those that wait for one.
        "max_queued_requests": 2 * _capacity(function),
        "backpressure_config": {"retry_after_s": 1.0},
        "graceful_shutdown_timeout_s": _DRAIN if deadline == math.inf else max(_DRAIN, deadline + _SPARE),
    }


def _check_ongoing(function: Batched[Any, Any], ongoing: Any) -> None:
    limits = function._settings.limits  # noqa: SLF001
    least = limits.workers * limits.max_size
    if isinstance(ongoing, int) and ongoing < least:
        why = f"no batch would ever be full, with max_size={limits.max_size} and workers={limits.workers}"
        fix = f"Leave it out, which means {2 * _capacity(function)}."
        raise InvalidOption("max_ongoing_requests", ongoing, why=why, fix=fix)
