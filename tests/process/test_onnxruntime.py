"""onnxruntime with inputs of random sizes: what the advice of ``modelguard diagnose`` and of the page saves."""

from __future__ import annotations

import sys

import pytest
from tests.process.harness import run_python

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="written memory is read from /proc"),
]

PROGRAM = """
import json, random
import numpy as np, onnx, onnxruntime
from onnx import TensorProto, helper, numpy_helper
from modelguard import memory

weights, nodes, joined = [], [], ["x"]
for i in range(10):
    if i:
        nodes.append(helper.make_node("Concat", list(joined), [f"joined{i}"], axis=1))
    weights.append(numpy_helper.from_array(np.full((64, 64 * len(joined), 1), 0.01, np.float32), f"w{i}"))
    nodes.append(helper.make_node("Conv", [f"joined{i}" if i else "x", f"w{i}"], [f"c{i}"]))
    nodes.append(helper.make_node("Tanh", [f"c{i}"], [f"y{i}"]))
    joined.append(f"y{i}")
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 64, "n"]) for name in ("x", "y9"))
graph = helper.make_graph(nodes, "net", [x], [y], weights)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.enable_mem_pattern, options.enable_cpu_mem_arena = PATTERN, ARENA
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
call = lambda batch, length: session.run(["y9"], {"x": np.zeros((batch, 64, length), np.float32)})
call(1, 100)
before, sizes = memory.private(fresh=True), random.Random(1)
for _ in range(200):
    call(sizes.randint(1, 8), sizes.randint(20, 600))
print(json.dumps(memory.private(fresh=True) - before))
"""


def grown(*, pattern: bool, arena: bool) -> int:
    answer = run_python(PROGRAM.replace("PATTERN", str(pattern)).replace("ARENA", str(arena)), 120)
    assert isinstance(answer, int)
    return answer


def test_patterns_are_what_grows_and_the_arena_is_not() -> None:
    """Without patterns it grows least; without the arena alone, as advice found on the web has it, twice as much."""
    for module in ("onnx", "onnxruntime"):
        pytest.importorskip(module)
    advised = grown(pattern=False, arena=True)
    assert advised < grown(pattern=True, arena=True)
    assert 1.5 * advised < grown(pattern=True, arena=False)
