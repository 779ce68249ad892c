"""Functions that leak through libraries; each imports its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

kept: list[object] = []


def words() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield " ".join(f"word{number}x{part}" for part in range(40))


@functools.lru_cache(maxsize=1)
def nlp() -> Any:
    import spacy

    return spacy.blank("en")


def strings(text: str) -> None:
    nlp()(text)


@functools.lru_cache(maxsize=1)
def counter() -> Any:
    from prometheus_client import Counter

    return Counter("requests", "Requests", ["text"])


def labels(text: str) -> None:
    counter().labels(text).inc()


def clients(text: str) -> None:
    import httpx

    kept.append(httpx.Client())


@functools.lru_cache(maxsize=1)
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], cache_capacity=10_000_000))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def tokens(text: str) -> None:
    tokenizer().encode(text)


def rows() -> Iterator[int]:
    """Ever larger batches."""
    number = 0
    while True:
        number += 1
        yield 8 * number


@functools.lru_cache(maxsize=1)
def session() -> Any:
    import numpy as np
    import onnx
    import onnxruntime

    nodes = [onnx.helper.make_node("MatMul", ["x", "w"], ["y"]), onnx.helper.make_node("Relu", ["y"], ["z"])]
    places = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 256]) for name in "xz"]
    weights = onnx.numpy_helper.from_array(np.ones((256, 256), "float32"), "w")
    graph = onnx.helper.make_graph(nodes, "graph", places[:1], places[1:], [weights])
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])


def arena(count: int) -> None:
    import numpy as np

    session().run(None, {"x": np.ones((count, 256), "float32")})
