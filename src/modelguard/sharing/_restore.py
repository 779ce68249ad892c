"""Repair a forked child before it does anything else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from modelguard.environment import _allocator, _openmp
from modelguard.sharing._hazards import Hazard

__all__ = ["restore"]

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
    _reseed()


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
