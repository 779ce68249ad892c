"""Repair a forked child before it does anything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from modelguard.environment import _allocator, _openmp
from modelguard.lifecycle import _adapters
from modelguard.sharing._hazards import Hazard

__all__ = ["restore", "with_childrens_threads"]

_SEED_BYTES = 4


def restore(found: Iterable[Hazard]) -> None:
    """Repair what the fork broke.

    Args:
        found: The hazards that were found in the parent.
    """
    kinds = {hazard.kind for hazard in found}
    if "thread pool" in kinds:
        _use_one_thread()
    if "allocator threads" in kinds:
        _allocator.restart_threads()
    for compiler in _adapters.compilers():  # whatever was found: it may have begun to compile since
        compiler.renew_in_child()
    _reseed()


@contextmanager
def with_childrens_threads(found: Iterable[Hazard]) -> Iterator[bool]:
    """In the block, torch computes on as many threads as children that :func:`restore` has repaired.

    Args:
        found: The hazards that were found.

    Yields:
        Whether that is another number.
    """
    torch = sys.modules.get("torch")
    before = 1 if torch is None else torch.get_num_threads()
    if torch is None or before == 1 or all(hazard.kind != "thread pool" for hazard in found):
        yield False
        return
    torch.set_num_threads(1)
    try:
        yield True
    finally:
        torch.set_num_threads(before)


def _use_one_thread() -> None:
    """Use one thread, which needs no pool: the pool of the forking thread does not exist in the child."""
    _openmp.cap_openmp(1)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)  # this also sets the number of threads of MKL inside torch


def _reseed() -> None:
    """Give each child its own random numbers. Python's ``random`` does this by itself."""
    for module in ("numpy.random", "torch"):
        library = sys.modules.get(module)
        if library is not None:
            seed = int.from_bytes(os.urandom(_SEED_BYTES))
            (library.manual_seed if module == "torch" else library.seed)(seed)
