"""An ONNX session for each tenant; tenants come, and sessions never go."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def exported_model() -> bytes:
    weights = numpy_helper.from_array(np.full((128, 128), 0.5, dtype=np.float32), "weights")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 128]) for name in ("x", "y")]
    node = helper.make_node("MatMul", ["x", "weights"], ["y"])
    graph = helper.make_graph([node], "net", ends[:1], ends[1:], [weights])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


MODEL = exported_model()
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1


class Tenants:
    def __init__(self) -> None:
        self.sessions: dict[str, onnxruntime.InferenceSession] = {}

    def session(self, tenant: str) -> onnxruntime.InferenceSession:
        if tenant not in self.sessions:
            self.sessions[tenant] = onnxruntime.InferenceSession(MODEL, options)  # LEAK
        return self.sessions[tenant]


tenants = Tenants()


def predict(tenant: str) -> float:
    (result,) = tenants.session(tenant).run(None, {"x": np.ones((1, 128), dtype=np.float32)})
    return float(result[0, 0])


def inputs() -> Iterator[str]:
    return (f"tenant-{number}" for number in count())


EXPECTED = {
    "causes": ["onnx runtime | native memory"],
    "holders": ["tenants.sessions", "Tenants.sessions"],
    "calls": 250,
    "libraries": ["onnxruntime", "onnx"],
}
