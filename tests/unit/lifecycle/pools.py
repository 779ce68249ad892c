"""What the tests of pools share."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.lifecycle.world import MB, TIMEOUT, Model, World, outcome

from modelguard import ModelPool


class Sizes:
    """A loader whose models have chosen sizes; counts its loads."""

    def __init__(self, world: World, **sizes: int) -> None:
        self._world = world
        self.sizes = sizes
        self.loads: list[Any] = []

    def __call__(self, key: Any) -> Model:
        self.loads.append(key)
        self._world.model_size = self.sizes[key] * MB
        return Model(self._world, len(self.loads), key)


def use(pool: ModelPool[Any, Any], *keys: Hashable) -> list[Any]:
    """Use the models one after the other; their keys as the models know them."""
    used = []
    for key in keys:
        with pool.lease(key) as model:
            used.append(model.key)
    return used


def loaded(pool: ModelPool[Any, Any]) -> dict[Any, int]:
    """Each loaded model and its size in MB."""
    return {key: size // MB for key, size in pool.status().models.items()}


@contextmanager
def in_use(world: World, pool: ModelPool[Any, Any], *keys: Hashable) -> Iterator[None]:
    """Let other threads use models during a block."""
    done = threading.Event()

    def hold(key: Hashable, held: threading.Event) -> None:
        with pool.lease(key):
            held.set()
            assert done.wait(TIMEOUT)

    holders = []
    for key in keys:
        held = threading.Event()
        holders.append(world.spawn(hold, key, held))
        assert held.wait(TIMEOUT)
    try:
        yield
    finally:
        done.set()
        for holder in holders:
            outcome(holder)
