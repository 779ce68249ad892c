"""Functions that leak through torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

torch.set_num_threads(1)
convolutions = torch.nn.Sequential(torch.nn.Conv1d(128, 192, 5), torch.nn.Conv1d(192, 192, 3))
linear = torch.nn.Linear(64, 64)
losses: list[torch.Tensor] = []


def lengths() -> Iterator[int]:
    """Lengths in an order that does not rise; none comes twice in 499."""
    yield from (20 + number * 197 % 499 for number in itertools.count())


def shapes(length: int) -> None:
    """The caches are full after 512 lengths, and growth ends there."""
    with torch.inference_mode():
        convolutions(torch.zeros(1, 128, length))


def tensors() -> Iterator[torch.Tensor]:
    yield from (torch.zeros(1, 128, length) for length in lengths())


def tensors_of_lengths(x: torch.Tensor) -> None:
    """The same as ``shapes``, with inputs that can be padded."""
    with torch.inference_mode():
        convolutions(x)


def graphs(length: int) -> None:
    losses.append(linear(torch.zeros(16, 64)).sum())
