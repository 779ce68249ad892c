"""An ONNX session that gets ever larger batches: its arena keeps the memory of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def exported_model() -> bytes:
    weights = numpy_helper.from_array(np.ones((256, 256), dtype=np.float32), "weights")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 256]) for name in ("x", "z")]
    nodes = [helper.make_node("MatMul", ["x", "weights"], ["y"]), helper.make_node("Relu", ["y"], ["z"])]
    graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(exported_model(), options, providers=["CPUExecutionProvider"])


def predict(rows: int) -> float:
    scores = session.run(None, {"x": np.ones((rows, 256), dtype=np.float32)})[0]  # LEAK
    return float(scores[0, 0])


def inputs() -> Iterator[int]:
    return (8 * number for number in count(1))


EXPECTED = {
    "causes": ["onnx runtime"],
    "holders": ["arena", "session"],
    "calls": 1200,
    "libraries": ["onnxruntime", "onnx"],
}
