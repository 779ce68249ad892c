"""``assert_shared_after_fork``: a forked worker that reads the model must not copy it."""

from __future__ import annotations

import gc
import json
import os
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from modelguard import _units
from modelguard.environment import memory
from modelguard.errors import InvalidOption, NotSupported
from modelguard.lifecycle import adapting
from modelguard.lifecycle.guard import ModelGuard

__all__ = ["assert_shared_after_fork"]

#: What a forked interpreter copies by running at all hides in this.
_LEAST = 4_000_000
_NOISE = 1_000_000
_SHARE = 0.2
#: Not a part of any model, and the way from it into everything else.
_NOT_THE_MODELS = (type, types.ModuleType, types.FunctionType, types.FrameType, types.CodeType)


def assert_shared_after_fork(
    model: Any,
    read: Callable[[Any], object],
    *,
    tolerance: int | str | None = None,
    timeout: _units.Duration = 60.0,
) -> None:
    """Fork, have the child read the model, and fail if that made a copy of it in the child.

    A :class:`~modelguard.ModelGuard` is prepared for the fork first, as a server's hook would, in a child of its own:
    this process is left as it is. Any other model is forked as it stands. Reading an ordinary Python object writes to
    it (its reference count), which copies its page; arrays and tensors are not written to.

    Args:
        model: The model, or its guard.
        read: Called with the model in the child; it should read all of it, as answering many requests would.
        tolerance: How much may be copied, such as ``"10 MB"``. Default: a fifth of the model, and at least 1 MB.
        timeout: How long the child may take. Default: a minute.

    Raises:
        AssertionError: More was copied, or the child failed or hung; with the child's words.
        InvalidOption: ``read`` cannot be called, or the model takes less than 4 MB, where nothing can be told.
        NotSupported: There is no fork here, or nothing tells what a process has written.
        LoadFailed: The guard's model could not be loaded.
    """
    __tracebackhide__ = True
    if not callable(read):
        fix = "Give a function of the model, such as lambda model: model('a text')."
        raise InvalidOption("read", read, why=f"a {type(read).__name__} cannot be called", fix=fix)
    if not sys.platform.startswith("linux"):
        raise NotSupported("assert_shared_after_fork", reason=f"it reads /proc, and this is {sys.platform}")
    allowed = None if tolerance is None else _units.size(tolerance, "tolerance")
    wait = _units.seconds(timeout, "timeout")
    taken = _size_of(model)
    if taken < _LEAST:
        why = f"it takes {_units.format_bytes(taken)}, and a forked child copies about as much by running at all"
        raise InvalidOption("model", model, why=why, fix="Test with a model of 4 MB or more.")
    bound = max(_NOISE, int(taken * _SHARE)) if allowed is None else allowed
    copied = _in_child(lambda: _prepared(model, read, wait), wait)
    if copied > bound:
        raise AssertionError(
            f"reading the model copied {_units.format_bytes(copied)} of its {_units.format_bytes(taken)} in a forked "
            f"child, and {_units.format_bytes(bound)} may be. Objects that are read are written to, and frozen or not, "
            "their pages are copied: keep large data in arrays, or run on CPython 3.12 or newer, where "
            "prefork.prepare() makes objects immortal"
        )


def _prepared(model: Any, read: Callable[[Any], object], timeout: float) -> int:
    """Runs in a child: do what a server does before it forks, and fork the one that reads."""
    if not isinstance(model, ModelGuard):
        return _copied(model, read)
    from modelguard.sharing import prefork

    prefork.prepare(model, warm_timeout=timeout)
    with model.lease() as leased:
        return _in_child(lambda: _copied(leased, read), timeout)


def _copied(model: Any, read: Callable[[Any], object]) -> int:
    gc.disable()  # a collection writes to what was not frozen, whoever reads
    memory.private(fresh=True)  # its own code and buffers are copied now
    before = memory.private(fresh=True)
    read(model)
    return max(0, memory.private(fresh=True) - before)


def _in_child(work: Callable[[], int], timeout: float) -> int:
    from modelguard.sharing import trial

    reader, writer = os.pipe()
    try:
        with warnings.catch_warnings():
            # A test's process may run threads; the child uses none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            verdict = trial.run(lambda: _tell(writer, work()), timeout)
        os.close(writer)
        writer = -1
        if not verdict.ok:
            how = f"did not end within {timeout:g} s" if verdict.hung else "failed"
            raise AssertionError(f"the forked child that reads the model {how}:\n{verdict.report}")
        with os.fdopen(os.dup(reader)) as told:
            return int(json.loads(told.readline()))
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _tell(writer: int, copied: int) -> None:
    os.write(writer, f"{json.dumps(copied)}\n".encode())


def _size_of(model: Any) -> int:
    if isinstance(model, ModelGuard):
        with model.lease() as leased:
            return _size_of(leased)
    told = adapting.find(model).size(model) or 0
    return max(told, _graph(model))


def _graph(model: Any) -> int:
    """Bytes of all objects that belong to the model, as far as they tell."""
    seen: set[int] = set()
    waiting, total = [model], 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _NOT_THE_MODELS):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one, 0)
        waiting.extend(gc.get_referents(one))
    return total
