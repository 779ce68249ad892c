"""The program that tries one remedy on a function, in a process of its own. Started by :mod:`._trials`."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelguard import memory
from modelguard.diagnosis import _census, _target
from modelguard.diagnosis._target import Say, Target
from modelguard.facts import _proc
from modelguard.isolation.isolate import Isolated, isolate
from modelguard.lifecycle._wrappers import owner_of
from modelguard.lifecycle.guard import guard
from modelguard.lifecycle.model_guard import ModelGuard
from modelguard.lifecycle.policies import Policy, Uses

__all__ = ["READINGS", "isolated_function", "main"]

READINGS = 24
_PAUSE = 0.01
#: The module that this program writes, so that worker processes can import the function.
_MODULE = "modelguard_tried"


def main() -> None:
    """Try what the configuration describes."""
    _target.run_program(_try)


def _try(config: dict[str, Any], say: Say) -> None:
    plain = _target.load(config["target"])
    function, around = _with_remedy(plain, config)
    given = _target.inputs({**config, "inputs": config["inputs"]}, _to_fit(plain, config))
    target = Target(function, given, asynchronous=_target.is_async(plain), around=around)
    until = time.monotonic() + config["limit"]
    say(phase="warm-up")
    target.run(config["warm"], until)
    gc.collect()
    target.forget()
    target.timed = True
    _settle(function, until)
    size = max(1, config["calls"] // READINGS)
    calls, private, cpu = [0], [_private()], _cpu()
    say(phase="try")
    while len(calls) <= READINGS and time.monotonic() < until:
        target.run(size, until)
        _settle(function, until)
        calls.append(target.calls)
        private.append(_private())
    seconds = sorted(target.seconds)
    say(
        calls=target.calls,
        readings=[calls, private],
        cpu=(_cpu() - cpu) / max(1, target.calls),
        p99=seconds[int(0.99 * (len(seconds) - 1))] if seconds else 0.0,
        held=private[-1],
        failures=target.failures,
        errors=list(target.errors)[:3],
        whole=len(calls) > READINGS,
        done=True,
    )


def _settle(function: Any, until: float) -> None:
    """Wait for the replacement that is due: on a busy machine it comes late, and memory is judged, not time."""
    owner = owner_of(function)
    while time.monotonic() < until:
        if isinstance(function, Isolated):
            due = any(worker.worn for worker in function.status().workers)
        else:
            due = isinstance(owner, ModelGuard) and owner.engine.loading
        if not due:
            return
        time.sleep(_PAUSE)


# The remedies

_Around = Callable[[], contextlib.AbstractContextManager[object]]


def _with_remedy(plain: Callable[..., Any], config: dict[str, Any]) -> tuple[Callable[..., Any], _Around]:
    """The function with a remedy, and the context of each call."""
    act, options = config["act"], config["options"]
    function = _guarded(plain, config, None) if config["load"] else plain
    if act == "trim":
        memory.trim_every(options["trim_every"])
        return function, contextlib.nullcontext
    if act == "zones":
        return function, _Zones()
    if act == "reload":
        return _guarded(plain, config, Uses(options["uses"])), contextlib.nullcontext
    if act == "isolate":
        return _isolated(config), contextlib.nullcontext
    if act == "bucketed":
        from modelguard.adapters.torch import bucketed

        return bucketed(*options["bucketed"], cut=None)(function), contextlib.nullcontext
    return function, contextlib.nullcontext


class _Zones:
    """Makes the context of a call: a memory zone in each pipeline. They are looked for after the first call."""

    def __init__(self) -> None:
        self._pipelines: list[Any] | None = None
        self._called = False

    def __call__(self) -> contextlib.AbstractContextManager[object]:
        if self._pipelines is None and self._called:
            self._pipelines = _census.pipelines()
        self._called = True
        stack = contextlib.ExitStack()
        for nlp in self._pipelines or ():
            stack.enter_context(nlp.memory_zone())
        return stack


def _guarded(plain: Any, config: dict[str, Any], policy: Policy | None) -> Any:
    """The function with a guard that has another policy, and does not wait for a pause between calls."""
    if config["load"]:
        return guard(_target.load(config["load"]), reload_on=policy, defer=0)(plain)
    owner = owner_of(plain)
    if not isinstance(owner, ModelGuard):
        raise TypeError(f"{config['target']} has no guard")
    context = owner.engine.guard
    options = dataclasses.replace(context.options, reload_on=policy, defer=0.0)
    return ModelGuard(options, context.runtime)(plain.__wrapped__)


def _to_fit(plain: Any, config: dict[str, Any]) -> Any:
    """What inputs have to fit: the function as its callers see it."""
    return _guarded(plain, config, None) if config["load"] else plain


def _isolated(config: dict[str, Any]) -> Any:
    """The function in a worker process. Workers import it from a module that is written beside the answer."""
    folder = Path(config["answer"]).parent
    chosen = {name: config[name] for name in ("target", "load", "options")}
    text = f"from modelguard.diagnosis import _tried\ncall = _tried.isolated_function({chosen!r}, __name__)\n"
    (folder / f"{_MODULE}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    return importlib.import_module(_MODULE).call


def isolated_function(config: dict[str, Any], module: str) -> Isolated[..., Any]:
    """Make the isolated function, in this process and in its workers.

    Args:
        config: What to isolate.
        module: The module in which it is found under the name ``call``.
    """
    plain = _target.load(config["target"])
    policy = Uses(config["options"]["uses"])
    if config["load"] or isinstance(owner_of(plain), ModelGuard):
        return isolate(workers=1, timeout=None)(_named(_guarded(plain, config, policy), module))

    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    async def acall(*args: Any, **kwargs: Any) -> Any:
        return await plain(*args, **kwargs)

    chosen = acall if _target.is_async(plain) else call
    return isolate(workers=1, timeout=None, recycle_on=policy)(_named(chosen, module))


def _named(function: Any, module: str) -> Any:
    function.__module__, function.__qualname__ = module, "call"
    return function


# What a run costs


def _processes() -> list[int]:
    return [each.pid for each in _proc.descendants(os.getpid(), _proc.processes())]


def _private() -> int:
    """Private memory of this process and of all that it has started."""
    return _target.private_of(_processes())


def _cpu() -> float:
    """CPU seconds of this process and of all that it has started, those that have ended included."""
    return sum(_proc.if_readable(_proc.cpu_seconds, pid) or 0.0 for pid in _processes())


if __name__ == "__main__":
    main()
