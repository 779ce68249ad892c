"""One tensor, padded up to the length of its bucket."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

from hypothesis import given  # noqa: E402 - torch comes first, or nothing does
from hypothesis import strategies as some  # noqa: E402

from modelguard.adapters.torch import pad_to_bucket  # noqa: E402
from modelguard.errors import InvalidOption  # noqa: E402


def padded_length(length: int, **buckets: Any) -> int:
    """The length of a tensor of ``length`` after padding."""
    return pad_to_bucket(torch.zeros(length, dtype=torch.bool), **buckets).size(0)


@pytest.mark.parametrize(
    ("buckets", "lengths", "expected"),
    [
        ({"multiple": 100}, [1, 99, 100, 101], [100, 100, 100, 200]),
        ({"sizes": (10, 50, 70)}, [1, 10, 11, 70, 71, 141], [10, 10, 50, 70, 140, 210]),
        ({"sizes": [64]}, [1, 65], [64, 128]),
        ({"growth": 2}, [1, 16, 17, 33, 500], [16, 16, 32, 64, 512]),
        ({"growth": 1.25}, [1, 17, 25, 41], [16, 24, 32, 56]),
    ],
)
def test_a_length_is_padded_up_to_its_bucket(buckets: Any, lengths: list[int], expected: list[int]) -> None:
    """Buckets are multiples, given lengths and past them multiples of the last, or lengths that grow by a factor."""
    assert expected == [padded_length(length, **buckets) for length in lengths]


@pytest.mark.parametrize("buckets", [{}, {"multiple": 100}, {"sizes": (10, 50)}, {"growth": 1.25}])
def test_what_is_empty_stays_empty(buckets: Any) -> None:
    """A tensor without positions is not made into one of padding alone."""
    assert 0 == padded_length(0, **buckets)


@given(
    length=some.integers(1, 100_000),
    buckets=some.one_of(
        some.builds(lambda multiple: {"multiple": multiple}, some.integers(1, 5_000)),
        some.builds(lambda sizes: {"sizes": sorted(sizes)}, some.sets(some.integers(1, 5_000), min_size=1)),
        some.builds(lambda growth: {"growth": growth}, some.floats(1.0, 2.0, exclude_min=True)),
        some.just({}),
    ),
)
def test_a_bucket_is_its_own(length: int, buckets: Any) -> None:
    """Padding never shortens, and what is padded already is left as it is: the lengths are few."""
    padded = padded_length(length, **buckets)
    assert length <= padded
    assert padded == padded_length(padded, **buckets)


@given(length=some.integers(64, 100_000), growth=some.sampled_from([1.125, 1.25, 1.5, 2.0]))
def test_growing_buckets_bound_the_padding(length: int, growth: float) -> None:
    """With a factor padding is a bounded share of each length, however long."""
    assert padded_length(length, growth=growth) < length * growth + 8


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_one_dimension_is_padded_at_its_end(dim: int) -> None:
    """The data stay where they were, in front, and no other dimension changes."""
    tensor = torch.arange(2 * 3 * 5).reshape(2, 3, 5)
    padded = pad_to_bucket(tensor, multiple=7, dim=dim, value=-1)
    shape = list(tensor.shape)
    shape[dim] = 7
    assert shape == list(padded.shape)
    assert torch.equal(tensor, padded.narrow(dim, 0, tensor.size(dim)))
    assert (padded.narrow(dim, tensor.size(dim), 7 - tensor.size(dim)) == -1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_the_kind_of_number_stays(dtype: Any) -> None:
    """Tokens stay whole numbers, masks stay masks."""
    padded = pad_to_bucket(torch.ones(3, dtype=dtype), multiple=5)
    assert dtype == padded.dtype
    assert [1, 1, 1, 0, 0] == padded.to(torch.int64).tolist()


def test_what_fits_is_not_copied() -> None:
    """A tensor whose length is a bucket's comes back as it is."""
    tensor = torch.ones(1, 512)
    assert tensor is pad_to_bucket(tensor, multiple=256)


def test_gradients_pass() -> None:
    """Padding is part of the graph."""
    tensor = torch.ones(3, requires_grad=True)
    pad_to_bucket(tensor, multiple=8).sum().backward()
    assert [1, 1, 1] == tensor.grad.tolist()


@pytest.mark.parametrize(
    ("shape", "dim", "expected"),
    [((2, 3), -1, (2, 4)), ((2, 5, 3), -1, (2, 4)), ((2, 3, 5), 1, (2, 4)), ((3,), -1, (4,)), ((3, 5), 0, (4,))],
)
def test_a_mask_is_made(shape: tuple[int, ...], dim: int, expected: tuple[int, ...]) -> None:
    """It is of whole numbers, (batch, length) or (length,), as tokenizers give it."""
    padded, mask = pad_to_bucket(torch.zeros(shape), multiple=4, dim=dim, mask=True)
    assert 4 == padded.size(dim)
    assert (expected, torch.int64) == (tuple(mask.shape), mask.dtype)
    assert [[1, 1, 1, 0]] == mask.reshape(-1, 4).unique(dim=0).tolist()


def test_a_mask_of_one_s_own_is_padded() -> None:
    """Where a batch was padded already, its mask says so, and padding is added to it."""
    batch = torch.tensor([[5, 6, 7], [8, 0, 0]])
    _, mask = pad_to_bucket(batch, multiple=4, mask=(batch > 0))
    assert [[1, 1, 1, 0], [1, 0, 0, 0]] == mask.to(torch.int64).tolist()


@pytest.mark.parametrize(
    "wrong",
    [
        {"multiple": 0},
        {"multiple": -8},
        {"multiple": 2.5},
        {"multiple": True},
        {"multiple": "256"},
        {"sizes": ()},
        {"sizes": (8, 4)},
        {"sizes": (8, 8)},
        {"sizes": (0, 8)},
        {"sizes": ("8",)},
        {"sizes": 8},
        {"growth": 1},
        {"growth": 0.5},
        {"growth": 3},
        {"growth": True},
        {"growth": "1.25"},
        {"growth": float("nan")},
        {"multiple": 8, "growth": 1.5},
        {"multiple": 8, "sizes": (8,)},
    ],
    ids=repr,
)
def test_buckets_that_cannot_be_meant(wrong: Any) -> None:
    """An invalid bucket is rejected under the name that the caller wrote, with what to write instead."""
    with pytest.raises(InvalidOption) as caught:
        pad_to_bucket(torch.zeros(3), **wrong)
    assert caught.value.argument in wrong
    assert caught.value.fix.startswith(("Give", "Write"))


def test_a_mask_of_another_length() -> None:
    """A mask that does not fit is rejected before it hides data."""
    with pytest.raises(InvalidOption, match="has length 2, and the tensor has length 3"):
        pad_to_bucket(torch.zeros(1, 3), mask=torch.ones(1, 2))
