"""What modelguard knows about torch models."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch adapter needs torch")

from modelguard import guard  # noqa: E402 - torch comes first, or nothing does
from modelguard.adapters.torch import ADAPTER  # noqa: E402
from modelguard.lifecycle import _models  # noqa: E402

MATRIX = 10 * 10 * 4
VECTOR = 10 * 4


def tied() -> Any:
    """Two layers that share one matrix, as embeddings and outputs of language models do."""
    first, second = torch.nn.Linear(10, 10), torch.nn.Linear(10, 10)
    second.weight = first.weight
    return torch.nn.Sequential(first, second)


def a_view() -> Any:
    """A layer whose weight is a part of a larger matrix."""
    layer = torch.nn.Linear(10, 10, bias=False)
    layer.weight = torch.nn.Parameter(torch.zeros(30, 10)[:10])
    return layer


def beside(tensor: Any) -> Any:
    """A layer, and a buffer that has no storage of its own."""
    layer = torch.nn.Linear(10, 10)
    layer.register_buffer("other", tensor)
    return layer


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: torch.nn.Linear(10, 10), MATRIX + VECTOR),
        (lambda: torch.nn.Linear(10, 10).half(), (MATRIX + VECTOR) // 2),
        (lambda: torch.nn.BatchNorm1d(10), 4 * VECTOR + 8),  # running mean and variance, and a count
        (tied, MATRIX + 2 * VECTOR),
        (a_view, 3 * MATRIX),
        (torch.nn.ReLU, 0),
        (lambda: torch.nn.Linear(10, 10, device="meta"), 0),
        (lambda: beside(torch.eye(10).to_sparse()), MATRIX + VECTOR),
        (lambda: beside(torch.eye(10).to_mkldnn()), MATRIX + VECTOR),
        (lambda: torch.nn.LazyLinear(10), 0),
    ],
    ids=["parameters", "half", "buffers", "tied", "view", "empty", "meta", "sparse", "mkldnn", "lazy"],
)
def test_a_model_is_as_large_as_its_storages(make: Any, size: int) -> None:
    """Parameters and buffers count, each storage once however many tensors share it, and what is not there not."""
    assert size == ADAPTER.size(make())


def test_what_is_no_module_has_no_size() -> None:
    """Nothing is known of objects that are no torch modules."""
    assert ADAPTER.size({"weight": torch.zeros(3)}) is None


def test_modules_find_their_adapter() -> None:
    """A module of any class is known by its base, and has no figures to tell."""
    model = tied()
    assert _models.find(model) is ADAPTER
    assert {} == dict(ADAPTER.gauges(model))


def test_a_guard_loads_a_model_with_sparse_tensors() -> None:
    """A layer with a sparse matrix, such as a graph's, is served like any other."""
    with (
        guard(lambda: beside(torch.eye(10).to_sparse()), reload_on=None, name="sparse") as graph,
        graph.lease() as model,
    ):
        assert model.other.is_sparse


def test_a_guard_tells_the_size_of_a_small_model() -> None:
    """Where memory's growth is lost in noise, the event still has the size of the parameters, as a lower bound."""
    with guard(lambda: torch.nn.Linear(1000, 1000), reload_on=None) as model:
        assert 1000 * 1000 * 4 <= (model.status().model_bytes or 0)
