"""Random series of memory readings whose truth is known: for ``growth_judge.py``, and for the test of the judge."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

MB = 10**6
#: Kinds of series in which nothing is leaked, and in which something is.
HEALTHY = ("flat", "step", "two steps", "fills", "teeth", "warm-up")
LEAKING = ("line", "stairs", "teeth and line", "step and line", "warm-up and line")
#: Bytes in the run: a leak of less is not asked for.
LEAST = 1.2 * MB

_Shape = Callable[[float], float]


class Series(NamedTuple):
    """Readings, and what they were made of.

    Attributes:
        kind: One of the kinds.
        leak: Bytes that are leaked in the run; 0 if nothing is.
        noise: ``"quiet"``, ``"usual"`` or ``"busy"``.
        calls: How many calls had been made at each reading.
        sizes: Bytes at each reading.
    """

    kind: str
    leak: float
    noise: str
    calls: tuple[int, ...]
    sizes: tuple[int, ...]


def series(seed: int) -> Series:
    """Make the series of a seed: of any kind, length, height, place and noise."""
    chance = random.Random(seed)
    kind = chance.choice(HEALTHY + LEAKING)
    calls = _calls(chance, chance.choice((12, 18, 24, 25, 25, 25, 40, 47)))
    leak = _leak(chance, calls[-1]) if kind in LEAKING else 0.0
    shape, noise = _shape(chance, kind, leak), chance.choice(("quiet", "usual", "busy"))
    base = chance.uniform(30, 900) * MB
    moved = zip(calls, _noise(chance, len(calls), noise), strict=True)
    sizes = tuple(max(0, int(base + shape(count / calls[-1]) + error)) for count, error in moved)
    return Series(kind, leak, noise, calls, sizes)


def _calls(chance: random.Random, readings: int) -> tuple[int, ...]:
    """Evenly, as when they are counted, or not, as when a reading is taken every few seconds."""
    each, even = chance.choice((7, 40, 300, 2500, 40_000)), chance.choice((True, False))
    steps = (each if even else max(1, int(each * chance.uniform(0.5, 1.5))) for _ in range(readings - 1))
    return (0, *itertools.accumulate(steps))


def _leak(chance: random.Random, calls: int) -> float:
    """50 bytes to 1 MB a call, but no more than 1 GB in the run."""
    leak = min(math.exp(chance.uniform(math.log(50), math.log(MB))) * calls, 1000 * MB)
    return leak if leak >= LEAST else chance.uniform(LEAST, 30 * MB)


def _height(chance: random.Random, most: float) -> float:
    return math.exp(chance.uniform(0, math.log(most))) * MB


def _shape(chance: random.Random, kind: str, leak: float) -> _Shape:
    """Bytes after a share of the calls."""
    once = {
        "step": lambda: _steps(chance, (chance.uniform(0.05, 0.97),)),
        "two steps": lambda: _steps(chance, (chance.uniform(0.03, 0.95), chance.uniform(0.03, 0.95))),
        "fills": lambda: _filling(chance.uniform(0.02, 0.35), _height(chance, 200)),
        "teeth": lambda: _teeth(chance.uniform(0.04, 0.35), chance.random(), _height(chance, 80)),
        "warm-up": lambda: _warm_up(chance.uniform(0.05, 0.85), _height(chance, 200)),
        "stairs": lambda: _stairs(chance.randint(4, 20), chance.random(), leak),
    }
    make = once.get(kind.removesuffix(" and line"))
    around: _Shape = make() if make is not None else lambda _: 0.0
    return around if kind == "stairs" else lambda share: around(share) + leak * share


def _steps(chance: random.Random, places: tuple[float, ...]) -> _Shape:
    heights = [(place, _height(chance, 300)) for place in places]
    return lambda share: sum(height for place, height in heights if share > place)


def _filling(constant: float, height: float) -> _Shape:
    return lambda share: height * (1 - math.exp(-share / constant))


def _teeth(period: float, phase: float, height: float) -> _Shape:
    return lambda share: height * ((share / period + phase) % 1)


def _warm_up(until: float, height: float) -> _Shape:
    return lambda share: height * min(1.0, share / until)


def _stairs(count: int, phase: float, leak: float) -> _Shape:
    return lambda share: leak / count * math.floor(count * share + phase)


def _noise(chance: random.Random, readings: int, kind: str) -> list[float]:
    """Bytes at each reading: of a busy machine, they hang together, and every eighth reading is a peak."""
    if kind != "busy":
        return [chance.gauss(0, (0.02 if kind == "quiet" else 0.3) * MB) for _ in range(readings)]
    found, level = [], 0.0
    for _ in range(readings):
        level = 0.6 * level + chance.gauss(0, 0.35 * MB)
        peak = chance.uniform(1, 6) * MB if chance.random() < 0.12 else 0.0  # noqa: PLR2004 - about an eighth
        found.append(level + peak)
    return found
