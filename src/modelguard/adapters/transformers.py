"""A transformers pipeline as a batched function, with little padding.

::

    from modelguard.adapters.transformers import batched_pipeline

    nlp = guard(lambda: pipeline("feature-extraction", FOLDER), reload_on=None)
    embed = batched_pipeline(nlp, max_size=32, deadline="2s")
    vectors = await embed.aio("text")

transformers itself is not imported here: the code that makes the pipeline imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelguard import _units
from modelguard.errors import InvalidOption, WrongResults
from modelguard.lifecycle.guard import ModelGuard
from modelguard.serving import AutoSize, Batched, batched

__all__ = ["batched_pipeline"]

#: The cost of one more run of the model, in tokens. MiniLM on one CPU takes 5 ms for a run and 0.27 ms for a token; of
#: 16, 32, 64 and 128 this value was the best for batches of 32 mixed texts.
_RUN_ON_CPU = 32
#: On other devices a run costs more than any padding: a batch is cut only if ``tokens`` requires it.
_RUN_ELSEWHERE = 10**9


def batched_pipeline(
    pipe: Any,
    *,
    max_size: int | AutoSize,
    tokens: int | None = None,
    length: Callable[[Any], float] | None = None,
    call: Mapping[str, Any] | None = None,
    **options: Any,
) -> Batched[Any, Any]:
    """Turn a pipeline into a function of one item that is computed in batches; see :func:`modelguard.batched`.

    A batch is sorted by length and passed to the pipeline in portions of similar length, because on a CPU padding costs
    as much as text. The model runs once for each portion. Portions are chosen to minimise the total cost of padding and
    runs.

    The result of an item is the pipeline's result for this item in a list. With ``"feature-extraction"`` it has as many
    positions as the item: the pipeline itself does not remove the positions of the padding, so the result for a text
    would depend on its neighbours. Otherwise padding only changes the rounding of floats, provided that the model
    respects its attention mask.

    If a pipeline cannot pad, because its tokenizer has no pad token, the items of a batch are computed one at a time.
    To change this, set ``pipe.tokenizer.pad_token_id`` in the loader.

    Args:
        pipe: A pipeline, or a guard of one. With a guard, each batch runs on one generation.
        max_size: The largest number of items in a batch; an ``AutoSize`` to have it chosen.
        tokens: The largest number of tokens in one run of the model, including padding; a longer item runs alone.
            Default: no limit. If ``length`` is given, its unit is used. Items that are not text also need ``length``.
        length: The length of an item, at least 0; also the default of ``weight``. Default: the number of tokens of a
            text, counted on the batch's thread; items that are not text are not sorted.
        call: Keyword arguments for every call of the pipeline, such as ``{"truncation": True}``. Those of a single
            item, ``f(item, top_k=3)``, are added to them; items with different arguments do not share a batch.
        options: ``max_wait``, ``max_queue``, ``deadline`` and all other options of :func:`modelguard.batched`. Leave
            ``threads`` at 1: tokenizers are not thread-safe. Default of ``name``: the guard's name, or the pipeline's
            task.

    Returns:
        A :class:`modelguard.Batched`.

    Raises:
        InvalidOption: An argument is invalid; the message contains its value and the fix.
    """
    guarded = isinstance(pipe, ModelGuard)
    if not guarded and (isinstance(pipe, type) or not (callable(pipe) and hasattr(pipe, "preprocess"))):
        why = "must be a pipeline, or a guard of one"
        raise InvalidOption("pipe", pipe, why=why, fix="Write: pipe = guard(lambda: pipeline(...), reload_on=None).")
    if length is not None:
        _units.function(length, "length", "one item", fix="Write length=len, for the characters of a text.")
    max_tokens = math.inf if tokens is None else _units.whole_number(tokens, "tokens")
    options.setdefault("name", pipe.name if guarded else getattr(pipe, "task", None) or type(pipe).__name__)
    if length is not None:
        options.setdefault("weight", length)
    compute = _Compute(options["name"], max_tokens, length, _checked(call))

    def run(model: Any, items: list[Any], **extras: Any) -> list[Any]:
        return compute(model, items, extras)

    def run_alone(items: list[Any], **extras: Any) -> list[Any]:
        return compute(pipe, items, extras)

    return batched(max_size=max_size, **options)(pipe(run) if guarded else run_alone)


def _checked(call: Mapping[str, Any] | None) -> dict[str, Any]:
    given = {} if call is None else call
    if not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
        why = "must be a dict of the pipeline's keyword arguments"
        raise InvalidOption("call", call, why=why, fix='Write call={"truncation": True}.')
    if given.keys() & {"batch_size", "num_workers"}:
        why = "must not contain batch_size or num_workers, which batched_pipeline sets"
        raise InvalidOption("call", call, why=why, fix="Leave them out; see max_size and tokens.")
    return dict(given)


@dataclass(frozen=True, slots=True)
class _Compute:
    """The options of :func:`batched_pipeline`, and how a batch is computed with them."""

    name: str
    max_tokens: float
    length: Callable[[Any], float] | None
    call: dict[str, Any]

    def __call__(self, pipe: Any, items: list[Any], extras: dict[str, Any]) -> list[Any]:
        given = {**self.call, **extras}
        if not _can_pad(pipe):
            return self._run(pipe, items, 1, given)
        # To cut results back, the number of all positions is needed; to sort, the number of tokens is enough.
        positions = _positions(pipe, items, given) if pipe.task == "feature-extraction" else None
        lengths = self._lengths(pipe, items, positions)
        if lengths is None:
            return self._run(pipe, items, len(items), given)
        order = sorted(range(len(items)), key=lengths.__getitem__, reverse=True)
        cost = _RUN_ON_CPU if pipe.device.type == "cpu" else _RUN_ELSEWHERE
        results: list[Any] = [None] * len(items)
        for first, end in portions([lengths[at] for at in order], cost, self.max_tokens):
            portion = order[first:end]
            found = self._run(pipe, [items[at] for at in portion], len(portion), given)
            if positions is not None:
                padded = max(positions[at] for at in portion)
                left = pipe.tokenizer.padding_side == "left"
                pairs = zip(portion, found, strict=True)
                found = [_cut(result, positions[at], padded, left=left) for at, result in pairs]
            for at, result in zip(portion, found, strict=True):
                results[at] = result
        return results

    def _run(self, pipe: Any, items: list[Any], size: int, given: dict[str, Any]) -> list[Any]:
        # Some pipelines unpack the result of a list with one item, but none unpacks that of a generator.
        inputs = items if len(items) > 1 else (item for item in items)
        results = list(pipe(inputs, batch_size=size, **_fresh(given)))
        if len(results) != len(items):
            why = f"the pipeline returned {len(results)} results for {len(items)} items"
            raise WrongResults(self.name, why, size=len(items))
        return results

    def _lengths(self, pipe: Any, items: list[Any], positions: list[int] | None) -> Sequence[float] | None:
        if self.length is not None:
            return [self.length(item) for item in items]
        if positions is not None:
            return positions
        if all(isinstance(item, str) for item in items):
            tokenizer = pipe.tokenizer
            # Not verbose: the model rejects a text that is too long, without a warning from the tokenizer.
            return [len(tokenizer(item, verbose=False)["input_ids"]) if tokenizer else len(item) for item in items]
        if self.max_tokens == math.inf:
            return None
        raise TypeError("tokens= needs length= for items that are not text")


def portions(lengths: Sequence[float], cost: float, max_tokens: float) -> list[tuple[int, int]]:
    """Cut lengths, longest first, into portions with the lowest total cost: indices of the first and after the last.

    A run costs ``cost``, plus its number of items times the largest length among them, which ``max_tokens`` limits.
    """
    least, begins = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        begin, found = 0, math.inf
        for first in range(end - 1, -1, -1):
            tokens = (end - first) * lengths[first]
            if tokens > max_tokens and first < end - 1:
                break  # with an earlier start there would be even more
            if least[first] + cost + tokens < found:
                begin, found = first, least[first] + cost + tokens
        least.append(found)
        begins.append(begin)
    cuts, end = [], len(lengths)
    while end:
        cuts.append((begins[end], end))
        end = begins[end]
    return cuts[::-1]


def _can_pad(pipe: Any) -> bool:
    """Whether the pipeline can take several items in one run."""
    if pipe.tokenizer is not None:
        return pipe.tokenizer.pad_token_id is not None
    return any(getattr(pipe, name, None) is not None for name in ("feature_extractor", "image_processor"))


def _positions(pipe: Any, items: list[Any], given: dict[str, Any]) -> list[int]:
    """The number of positions that each item has alone, with the arguments of this call."""
    how = {**pipe._preprocess_params, **pipe._sanitize_parameters(**_fresh(given))[0]}  # noqa: SLF001 - as its __call__ does
    return [pipe.preprocess(item, **how)["input_ids"].shape[-1] for item in items]


def _fresh(given: dict[str, Any]) -> dict[str, Any]:
    """Copy for one call: pipelines write into ``tokenize_kwargs``, and reject their own additions in the next call."""
    return {name: dict(value) if isinstance(value, dict) else value for name, value in given.items()}


def _cut(result: Any, length: int, padded: int, *, left: bool) -> Any:
    """Remove the positions of the padding from a result of shape (1, padded, width), a tensor or lists."""
    inside = slice(padded - length, None) if left else slice(length)
    if length == padded or len(result[0]) != padded:  # nothing to cut, or positions that are not the input's
        return result
    if isinstance(result, list):
        return [rows[inside] for rows in result]
    return result[:, inside].clone()  # a view would keep the whole batch in memory
