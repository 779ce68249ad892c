"""onnxruntime: a whole program that checks itself. docs/frameworks.md explains it."""

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from modelguard import Modified, batched, guard

inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])]
outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])]
weights = helper.make_tensor("w", TensorProto.FLOAT, [4, 1], [1, 2, 3, 4])
graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "net", inputs, outputs, [weights])
exported = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
onnx.save(exported, "model.onnx")  # stands for an export


def load() -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2  # by default one for each core of the machine
    return onnxruntime.InferenceSession("model.onnx", options, providers=["CPUExecutionProvider"])


session = guard(load, reload_on=Modified("model.onnx"), name="session")


@batched(max_size=32)
@session
def infer(model: onnxruntime.InferenceSession, rows: list[list[float]]) -> list[float]:
    (found,) = model.run(["y"], {"x": np.array(rows, dtype=np.float32)})
    return found[:, 0].tolist()


with session, infer:
    assert infer([1, 2, 3, 4]) == 30
