"""Support for torch models."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from modelguard import _extras

try:
    import torch
except ModuleNotFoundError as error:
    raise _extras.not_installed(error, "modelguard.adapters.torch") from error

from modelguard.adapters._torch_bucketed import bucketed
from modelguard.adapters._torch_buckets import pad_to_bucket

__all__ = ["ADAPTER", "bucketed", "pad_to_bucket"]


class TorchAdapter:
    """Measures a model by its parameters and buffers."""

    def size(self, model: Any) -> int | None:
        """Bytes of all parameters and buffers; storage that tied weights share is counted once."""
        if not isinstance(model, torch.nn.Module):
            return None
        storages = {}
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    def gauges(self, model: Any) -> Mapping[str, int]:  # noqa: ARG002 - a torch model's figures do not change
        """No figures."""
        return MappingProxyType({})

    def released(self) -> None:
        """Nothing: a release empties the cache of GPU memory whatever the model's type."""


ADAPTER = TorchAdapter()
