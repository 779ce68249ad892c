"""What the replicas of test_ray.py serve: each deployment's function has to be in a module that they can import."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from modelguard import Uses, Weight, batched, guard, isolate, weights

plain = guard(dict, reload_on=None, name="plain")
worn = guard(dict, reload_on=Uses(40), name="worn")


@batched(max_size=4, deadline="20s")
@worn
def count(model: dict[str, int], texts: list[str]) -> list[tuple[int, int]]:
    """The length of a text, and who has counted."""
    time.sleep(0.01)
    return [(len(text), os.getpid()) for text in texts]


@batched(max_size=2, max_queue=4)
@plain
def slow(model: dict[str, int], texts: list[str]) -> list[str]:
    time.sleep(0.3)
    return texts


@batched(max_size=1, deadline="500ms", weight=Weight(of=abs, most=100))
@plain
def late(model: dict[str, int], texts: list[float]) -> list[float]:
    time.sleep(texts[0])
    return texts


@batched(max_size=4, threads=2, deadline="20s")
@isolate(workers=2, timeout="10s", recycle_on=Uses(40))
def apart(texts: list[str]) -> list[tuple[int, int, int]]:
    """The length of a text, who has counted, and whose child that is."""
    if "crash" in texts:
        os._exit(3)
    return [(len(text), os.getpid(), os.getppid()) for text in texts]


web = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100)
@serve.ingress(web)
class Front:
    """An application's own surface, with the batched function behind it."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    @web.get("/{text}")
    async def get(self, text: str) -> str:
        answer: str = await self.handle.remote(text)
        return answer


def _where() -> Path:
    """A folder for each node, as if each had its own disk."""
    folder = Path(os.environ["WEIGHTS"], ray.get_runtime_context().get_node_id())
    folder.mkdir(exist_ok=True)
    return folder


def _load() -> tuple[Any, str]:
    import numpy as np

    def make() -> Any:
        Path(_where(), f"made by {os.getpid()}").touch()
        return np.arange(1_000_000.0)

    path = _where() / "weights"
    weights.publish(make, path, key="1")
    return weights.load(lambda array: array, path), str(path)


mapped = guard(_load, reload_on=None, name="mapped")


@batched(max_size=4)
@mapped
def look(model: tuple[Any, str], places: list[int]) -> list[dict[str, Any]]:
    """A number of the weights, and where this process has them from."""
    array, path = model
    maps = {
        line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines() if path in line
    }
    told = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id(), "maps": sorted(maps)}
    return [told | {"value": float(array[place])} for place in places]
