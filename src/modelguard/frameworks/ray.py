"""Ray Serve: a guarded, batched function as a deployment. A replica is replaced when one of its policies is due.

In the module of the function::

    from modelguard.frameworks import ray

    count_words = ray.deployment(count, num_replicas=2)
    app = count_words.bind()  # serve run service:app, or use it in a larger application

To call it, ``await handle.remote(item)``, or send a POST request with the item as JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from http import HTTPStatus
from pkgutil import resolve_name
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote

from modelguard import _units
from modelguard.errors import InvalidOption, ModelGuardError, NotSupported, Overloaded
from modelguard.frameworks._answers import Answer, problem
from modelguard.frameworks._web import Web
from modelguard.isolation.isolate import Isolated
from modelguard.lifecycle._lease import owner_of
from modelguard.lifecycle.guard import ModelGuard
from modelguard.serving import Batched, BatchedStream, Limits
from modelguard.telemetry import logger
from modelguard.telemetry.reasons import Reason

__all__ = ["Replica", "deployment", "run"]


T = TypeVar("T")

# A lock for processes on many machines that share only a key-value store, to replace one process at a time.
#
# The lock is a series of numbered entries. Only the last entry counts: it names the process that holds the lock, or is
# empty. To make an entry, a process writes a number that does not exist yet; only one of several processes succeeds. So
# a process that dies leaves nothing locked forever. Clocks are never compared between machines: each process measures
# with its own clock how long the last entry has not changed.


class Store:
    """The key-value store of Ray's head node, which Serve uses for its own state too. Ray has no public API for it."""

    def __init__(self) -> None:
        self._kv = _ray("ray.experimental.internal_kv")

    def put_if_absent(self, key: str, value: str) -> bool:
        """Write a value, unless the key exists; returns whether it was written."""
        existed: bool = self._kv._internal_kv_put(key, value, overwrite=False, namespace=_NAMESPACE)  # noqa: SLF001 - Ray
        return not existed

    def get(self, key: str) -> str | None:
        """The value of a key; None if it does not exist."""
        value: bytes | None = self._kv._internal_kv_get(key, namespace=_NAMESPACE)  # noqa: SLF001 - Ray
        return None if value is None else value.decode()

    def delete(self, key: str) -> None:
        self._kv._internal_kv_del(key, namespace=_NAMESPACE)  # noqa: SLF001 - Ray

    def keys(self, prefix: str) -> list[str]:
        return [key.decode() for key in self._kv._internal_kv_list(prefix, namespace=_NAMESPACE)]  # noqa: SLF001 - Ray


class ReplacementLock:
    """The lock of one group of processes. Its holder may be replaced; its replacement releases the lock.

    After ``timeout`` another process takes it: by then the holder's replacement has failed, or there is none.
    """

    def __init__(
        self, store: Store, group: str, me: str, *, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        # Quoted, so that no group's prefix is a prefix of another's.
        self._prefix = f"replacement/{quote(group, safe='')}/"
        self._me = me
        self._timeout = timeout
        self._clock = clock
        self._seen = (0, clock())  # the last entry, and when it was first seen

    def acquire(self) -> bool:
        """Acquire or keep the lock; True for one process at a time."""
        number, holder = self._last()
        if holder == self._me:
            return True
        if number != self._seen[0]:
            self._seen = (number, self._clock())
        if holder and self._clock() - self._seen[1] < self._timeout:
            return False
        return self._write(number, self._me)

    def release(self) -> None:
        """Release the lock, because this process has started in place of the holder.

        If this process was started for another reason, the holder has to acquire the lock again.
        """
        number, holder = self._last()
        if holder:
            self._write(number, "")

    def _last(self) -> tuple[int, str]:
        while numbers := self._numbers():
            number = max(numbers)
            if (value := self._store.get(self._key(number))) is not None:
                return number, value
            # deleted in the meantime, because there is a later one
        return 0, ""

    def _write(self, after: int, value: str) -> bool:
        number = after + 1
        if not self._store.put_if_absent(self._key(number), value):
            return False
        numbers = self._numbers()
        outdated = max(numbers, default=number) > number  # the number was used before, and deleted after a later one
        for existing in numbers:
            if existing < number or (outdated and existing == number):
                self._store.delete(self._key(existing))
        return not outdated

    def _key(self, number: int) -> str:
        return f"{self._prefix}{number}"

    def _numbers(self) -> list[int]:
        return [int(key.removeprefix(self._prefix)) for key in self._store.keys(self._prefix)]


#: Seconds that Ray waits for running requests before it kills a replica, and seconds to add to a deadline.
_DRAIN, _SPARE = 20.0, 5.0
#: Serve checks a replica's health once while the replica starts. At the second check it already sends requests.
_SERVING_SINCE_CHECK = 2

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

    Each replica imports the function's module, loads the model, warms it up, and then serves. A due policy does not
    reload the model there. Instead the replica's health check fails: Serve stops sending it requests, lets it finish
    its running requests, and starts another replica. Replicas are replaced one at a time. If there is only one replica,
    requests wait at their callers until its replacement has started.

    Over an isolated function (``@batched`` above ``@isolate``) a replica has a mold and workers of its own, which
    ``isolate`` replaces when a policy is due; so the replica stays.

    The limits are those of ``batched``. A replica accepts more requests than its queue holds, so that the queue can
    refuse them immediately, with a time to try again: callers of a handle get
    ``ray.serve.exceptions.BackPressureError``, HTTP clients get 503 with ``Retry-After``. While there is no replica,
    requests wait at their callers: at each caller as many as a replica accepts, which is twice the capacity of its
    queue and its batches. The deadline counts from the arrival at the replica; ``handle.remote(item, timeout=...)`` and
    the header ``Request-Timeout`` shorten it. When it has passed, callers of a handle get ``DeadlineExceeded``, HTTP
    clients get 504.

    Args:
        function: Made by ``batched`` over a guard's decorator or over ``isolate``, at the top of a module that the
            replicas can import.
        name: The deployment's name. Default: the function's name.
        min_lifetime: The minimum age at which a replica is replaced.
        replace_timeout: How long to wait for the replacement of a replica before the next one may be replaced.
        options: Other options of ``serve.deployment``: ``num_replicas``, ``ray_actor_options``,
            ``autoscaling_config``... They override those that are derived from the function's limits. A replica is
            stopped after three failed health checks, ``health_check_period_s`` apart (Ray's default is 10).

    Returns:
        A ``ray.serve.Deployment``.

    Raises:
        InvalidOption: ``function`` is not batched, not guarded or cannot be imported by replicas; or an option is
            invalid.
        NotSupported: Ray Serve is not installed.
    """
    reference = _reference(function)
    body = {
        "__doc__": function.__doc__,
        "reference": reference,
        "min_lifetime": _units.seconds(min_lifetime, "min_lifetime", zero=True),
        "replace_timeout": _units.seconds(replace_timeout, "replace_timeout"),
    }
    serve_options = _serve_options(function) | options
    _check_ongoing(function, serve_options["max_ongoing_requests"])
    title = reference.partition(":")[2]
    serve = _ray("ray.serve")
    try:
        return serve.deployment(type(title, (Replica,), body), name=name or title, **serve_options)
    except (TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
        why = f"are rejected by Ray Serve: {error}"
        raise InvalidOption("options", options, why=why, fix="See serve.deployment for its options.") from error


def run(
    function: Batched[Any, Any], *, app_name: str = "default", route_prefix: str | None = "/", **options: Any
) -> Any:
    """Deploy a batched function as a separate application, and wait until it serves.

    Args:
        function: See :func:`deployment`.
        app_name: The application's name; an existing application of that name is replaced.
        route_prefix: Its path for HTTP; None for handles only.
        options: See :func:`deployment`.

    Returns:
        A ``ray.serve.handle.DeploymentHandle``.

    Raises:
        InvalidOption: See :func:`deployment`.
        NotSupported: Ray Serve is not installed, or Ray is not initialised: Serve would start its own Ray on this
            machine, with all processors.
    """
    made = deployment(function, **options)
    if not _ray("ray").is_initialized():
        why = "Ray is not initialised in this process; call ray.init() for a local one, or ray.init('auto') to join one"
        raise NotSupported("modelguard.frameworks.ray.run()", reason=why)
    return _ray("ray.serve").run(made.bind(), name=app_name, route_prefix=route_prefix)


class Replica:
    """One replica of a deployment. Ray makes it, from a subclass that :func:`deployment` defines.

    Attributes:
        reference: Where the function is, as ``module:name``.
        min_lifetime: The minimum age at which a replica is replaced, in seconds.
        replace_timeout: Seconds to wait for the replacement of a replica.
    """

    reference: ClassVar[str]
    min_lifetime: ClassVar[float]
    replace_timeout: ClassVar[float]

    async def __init__(self) -> None:  # type: ignore[misc] # Serve awaits it
        """Load the model."""
        context = _ray("ray.serve").get_replica_context()
        self._started = time.monotonic()
        self._name = context.replica_tag
        self._function: Batched[Any, Any] = resolve_name(self.reference)
        self._model: ModelGuard[Any] | Isolated[..., Any] = _model(self._function)
        self._due: tuple[int, tuple[Reason, ...]] | None = None
        self._web = Web()
        self._request: type[Any] = importlib.import_module("starlette.requests").Request
        self._replacement = ReplacementLock(
            Store(), f"{context.app_name}/{context.deployment}", context.replica_tag, timeout=self.replace_timeout
        )
        if isinstance(self._model, ModelGuard):
            self._model.recycle_here(self._policy_due)
        self._checks = 0
        await self._model.aload()

    async def __call__(self, item: Any, *, timeout: _units.Duration | None = None, **extras: Any) -> Any:
        """Compute one item.

        Args:
            item: An element of the list that the batch function gets; or Serve's request, with the item as JSON.
            timeout: The longest time that it may take.
            extras: Further keyword arguments of the batch function.

        Raises:
            BackPressureError: There is no capacity now; ``retry_after_s`` says when to try again.
            DeadlineExceeded: The item was not computed in time.
            Exception: The error that the function raised for this item.
        """
        if isinstance(item, self._request):
            return await self._answer(item)
        try:
            return await self._function.aio(item, timeout=timeout, **extras)
        except Overloaded as error:
            raise self._back_pressure(error) from error

    def status(self) -> dict[str, Any]:
        """This replica's name, the status of its guard and of its queue, and why it should be replaced.

        With an isolated function, ``"isolated"`` has its status instead of ``"guard"``.
        """
        return {
            "replica": self._name,
            "guard" if isinstance(self._model, ModelGuard) else "isolated": asdict(self._model.status()),
            "queue": asdict(self._function.status()),
            "due": tuple(map(str, self._reasons())),
        }

    async def check_health(self) -> None:
        """Report to Serve whether to keep this replica.

        Raises:
            RuntimeError: It should be replaced.
        """
        self._checks += 1
        if self._checks == _SERVING_SINCE_CHECK:
            await self._on_lock("release", self._replacement.release)
        reasons = self._reasons()
        if not reasons or time.monotonic() - self._started < self.min_lifetime:
            return
        if await self._on_lock("acquire", self._replacement.acquire):
            raise RuntimeError(f"replica {self._name} must be replaced: {', '.join(map(str, reasons))}")

    async def _on_lock(self, what: str, do: Callable[[], T]) -> T | None:
        try:
            return await asyncio.to_thread(do)
        except Exception:  # noqa: BLE001 - it can serve without the store; a next replacement waits for replace_timeout
            logger.exception("modelguard: replica %s could not %s the replacement lock", self._name, what)
            return None

    def _policy_due(self, reasons: tuple[Reason, ...]) -> None:
        self._due = (self._model.status().generation, reasons)

    def _reasons(self) -> tuple[Reason, ...]:
        """Why it should be replaced; empty if the model was reloaded since."""
        due = self._due
        return due[1] if due is not None and due[0] == self._model.status().generation else ()

    def _back_pressure(self, error: Overloaded) -> Exception:
        status, limit = self._function.status(), self._function.limits.max_queue
        kind = _ray("ray.serve.exceptions").BackPressureError
        made: Exception = kind(status.waiting, limit, int(HTTPStatus.SERVICE_UNAVAILABLE), error.retry_after)
        made.add_note(str(error))
        return made

    async def _answer(self, request: Any) -> Any:
        answer = self._web.timeout(request.headers.get)
        if not isinstance(answer, Answer):
            timeout = answer
            try:
                item = json.loads(await request.body())
            except (ValueError, RecursionError):
                answer = problem(HTTPStatus.BAD_REQUEST, "The body must be one item as JSON.")
            else:
                try:
                    return await self._function.aio(item, timeout=timeout)
                except ModelGuardError as error:
                    answer = self._web.answer_or_raise(error)
        kind = importlib.import_module("starlette.responses").Response
        return kind(answer.body, status_code=answer.status, headers=answer.headers)


def _ray(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        why = f"Ray Serve cannot be imported ({error}); pip install 'modelguard-lifecycle[ray]'"
        raise NotSupported("modelguard.frameworks.ray", reason=why) from error


def _model(function: Any) -> Any:
    """Its guard or isolated function; None if it has neither."""
    below = function.__wrapped__
    found = below if isinstance(below, Isolated) else owner_of(below)
    return found if isinstance(found, ModelGuard | Isolated) else None


def _reference(function: Any) -> str:
    """Where replicas find the function."""
    if isinstance(function, BatchedStream):
        why = "yields its results in parts, and a deployment returns whole ones"
        fix = "Write a class for @serve.deployment with a method that iterates over f.stream(item)."
        raise InvalidOption("function", function, why=why, fix=fix)
    fix = "Put @batched(max_size=...) above the guard's decorator, and pass the decorated function."
    _units.instance(function, "function", Batched, "a batched function", fix=fix)
    module, name = str(function.__module__), str(function.__qualname__)
    if _model(function) is None:
        why = "is not decorated by a guard, so its replicas would never be replaced"
        fix = "Put the guard's decorator between @batched(...) and the function, or use @serve.deployment alone."
    elif "." in name:  # a method, or a function inside a function
        why = "must be at the top of a module: replicas find a function by its name in a module"
        fix = "Write it at the top of a module."
    elif module == "__main__":
        why = "is in the program's main script, which replicas cannot import"
        fix = "Move it into a module, and import it from there."
    elif getattr(sys.modules.get(module), name, None) is not function:
        why = f"cannot be found by replicas: {module}.{name} is another object"
        fix = "Use different names for the deployment and the function."
    else:
        return f"{module}:{name}"
    raise InvalidOption("function", function, why=why, fix=fix)


def _capacity(limits: Limits) -> int:
    return limits.max_queue + limits.threads * limits.max_size


def _serve_options(function: Batched[Any, Any]) -> dict[str, Any]:
    """The limits of a batched function as options of Serve."""
    limits = function.limits
    shutdown = _DRAIN if limits.deadline == math.inf else max(_DRAIN, limits.deadline + _SPARE)
    return {
        # The queue can refuse only requests that reach it. Serve would let them wait, regardless of their deadlines.
        "max_ongoing_requests": 2 * _capacity(limits),
        # Not less, because Serve counts requests on their way to a replica as waiting.
        "max_queued_requests": 2 * _capacity(limits),
        "backpressure_config": {"retry_after_s": 1.0},
        "graceful_shutdown_timeout_s": shutdown,
    }


def _check_ongoing(function: Batched[Any, Any], ongoing: Any) -> None:
    limits = function.limits
    if isinstance(ongoing, int) and ongoing < limits.threads * limits.max_size:
        why = f"is too small for a full batch, with max_size={limits.max_size} and threads={limits.threads}"
        fix = f"Leave it out, which means {2 * _capacity(limits)}."
        raise InvalidOption("max_ongoing_requests", ongoing, why=why, fix=fix)
