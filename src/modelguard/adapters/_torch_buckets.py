"""Pad varying lengths to a few: for each new shape oneDNN makes a new kernel, and needs memory to keep it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, overload

import torch

from modelguard.errors import InvalidOption

__all__ = ["batch", "length_of", "masked", "pad", "pad_to_bucket", "rounding"]

#: From a length to the length of its bucket.
RoundUp: TypeAlias = Callable[[int], int]

#: Each bucket is an eighth longer than the one before: there are about six from one length to its double, and 6 % of
#: padding on average, for short and long lengths alike. With texts of 5 to 120 tokens BERT took 4 % longer with these
#: buckets, and three times as long with multiples of 256; with lengths from 50 to 4,000 Conv1d took the same time with
#: either (benchmarks/torch_dynamic_shapes.py).
_GROWTH = 1.125
#: Buckets that grow by a factor begin here, and are multiples of ``_STEP``, which suits the kernels.
_SHORTEST, _STEP = 16, 8


@overload
def pad_to_bucket(
    tensor: torch.Tensor,
    *,
    multiple: int | None = None,
    sizes: Sequence[int] | None = None,
    growth: float | None = None,
    dim: int = -1,
    value: float = 0,
    mask: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def pad_to_bucket(
    tensor: torch.Tensor,
    *,
    multiple: int | None = None,
    sizes: Sequence[int] | None = None,
    growth: float | None = None,
    dim: int = -1,
    value: float = 0,
    mask: Literal[True] | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def pad_to_bucket(
    tensor: torch.Tensor,
    *,
    multiple: int | None = None,
    sizes: Sequence[int] | None = None,
    growth: float | None = None,
    dim: int = -1,
    value: float = 0,
    mask: bool | torch.Tensor = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Pad one dimension at its end, to the length of its bucket.

    ``multiple``, ``sizes`` and ``growth`` each define the buckets; at most one of them may be given.

    Args:
        tensor: A tensor with a varying length.
        multiple: Buckets are the multiples of this many positions, such as 256. Gives few buckets if the longest length
            is known.
        sizes: Buckets are these lengths, in rising order; beyond the last one, its multiples.
        growth: Each bucket is this many times as long as the one before, rounded up to a multiple of 8; the first is
            16. Default: 1.125, so that padding is at most about an eighth of any length.
        dim: The dimension to pad.
        value: The value of the padding.
        mask: True to return a mask too: integers that are 1 for data and 0 for padding. Its shape is (batch, length),
            or (length,) if ``dim`` is the first dimension. A given mask, with its length in its last dimension, is
            padded with 0 instead.

    Returns:
        The padded tensor, and with ``mask`` also the mask. A tensor that already has the length of a bucket is returned
        unchanged.

    Raises:
        InvalidOption: The buckets are invalid, the tensor has no dimension ``dim``, or the lengths of ``mask`` and the
            tensor differ.
    """
    up = rounding(multiple, sizes, growth)
    length = length_of(tensor, dim)
    padded = pad(tensor, up(length), dim, value)
    if mask is False:
        return padded
    return padded, masked(tensor, dim, up(length), None if mask is True else mask)


# Buckets


def rounding(multiple: int | None, sizes: Sequence[int] | None, growth: float | None) -> RoundUp:
    """Make the buckets that one of the arguments defines; see :func:`pad_to_bucket`."""
    given = {"multiple": multiple, "sizes": sizes, "growth": growth}
    chosen = [name for name, value in given.items() if value is not None]
    if len(chosen) > 1:
        why = f"must not be given together with {chosen[0]}: each of them defines the buckets"
        raise InvalidOption(chosen[1], given[chosen[1]], why=why, fix="Give one of them.")
    if sizes is not None:
        return _up_to_sizes(sizes)
    if multiple is not None:
        return _up_to_multiple(multiple)
    return _up_by_growth(_GROWTH if growth is None else growth)


def _up_to_multiple(multiple: int) -> RoundUp:
    if not _is_length(multiple):
        why = "must be a positive number of positions"
        raise InvalidOption("multiple", multiple, why=why, fix="Give a positive whole number such as 256.")
    return lambda length: -(-length // multiple) * multiple


def _up_to_sizes(sizes: Sequence[int]) -> RoundUp:
    try:
        buckets = tuple(sizes)
    except TypeError:
        buckets = ()
    if not buckets or not all(map(_is_length, buckets)) or list(buckets) != sorted(set(buckets)):
        why = "must be a rising sequence of lengths"
        raise InvalidOption("sizes", sizes, why=why, fix="Give positive whole numbers, rising: (128, 256, 512).")
    last = buckets[-1]

    def up(length: int) -> int:
        if length > last:
            return -(-length // last) * last
        return buckets[bisect_left(buckets, length)] if length else 0

    return up


def _up_by_growth(growth: float) -> RoundUp:
    if isinstance(growth, bool) or not isinstance(growth, int | float) or not 1 < growth <= 2:  # noqa: PLR2004
        why = "must be above 1 and at most 2"
        raise InvalidOption("growth", growth, why=why, fix="Give a number above 1 and up to 2, such as 1.25.")

    def up(length: int) -> int:
        bucket = _SHORTEST if length else 0
        while bucket < length:
            bucket = max(bucket + _STEP, math.ceil(bucket * growth / _STEP) * _STEP)
        return bucket

    return up


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# Padding


def length_of(tensor: torch.Tensor, dim: int) -> int:
    """The number of positions along ``dim``."""
    if not -tensor.dim() <= dim < tensor.dim():
        why = f"is not a dimension of a tensor of shape {tuple(tensor.shape)}"
        raise InvalidOption("dim", dim, why=why, fix="Give the dimension that has the length.")
    return tensor.size(dim)


def pad(tensor: torch.Tensor, padded: int, dim: int, value: float) -> torch.Tensor:
    """Pad one dimension at its end, to the length ``padded``."""
    missing = padded - tensor.size(dim)
    if not missing:
        return tensor
    after = tensor.dim() - 1 - dim % tensor.dim()  # pad() counts from the last dimension, with two numbers for each
    return torch.nn.functional.pad(tensor, (0, 0) * after + (0, missing), value=value)


def masked(tensor: torch.Tensor, dim: int, padded: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Make or pad the mask of a tensor that is padded along ``dim``."""
    length = tensor.size(dim)
    if mask is None:
        mask = torch.ones((*batch(tensor, dim), length), dtype=torch.long, device=tensor.device)
    elif (given := mask.size(-1) if mask.dim() else 0) != length:
        why = f"has length {given}, and the tensor has length {length}"
        raise InvalidOption(
            "mask", tuple(mask.shape), why=why, fix="Give a mask with the length in its last dimension."
        )
    return pad(mask, padded, -1, 0)


def batch(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    """The shape of a value per sequence: (batch,), or () if ``dim``, the dimension of the length, is the first one."""
    return tuple(tensor.shape[:1]) if dim % tensor.dim() else ()
