"""MLflow's pyfunc: a whole program that checks itself. docs/frameworks.md explains it."""

from pathlib import Path

import mlflow
from mlflow.pyfunc import PyFuncModel

from modelguard import batched, guard

WORDS = """
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class Words(PythonModel):
    def predict(self, model_input: list[str], params=None) -> list[int]:
        return [len(text.split()) for text in model_input]


set_model(Words())
"""
Path("words.py").write_text(WORDS)
mlflow.pyfunc.save_model("words", python_model="words.py", pip_requirements=[])  # stands for a training job

words = guard(lambda: mlflow.pyfunc.load_model("words"), reload_on=None, name="words")


@batched(max_size=32)
@words
def predict(model: PyFuncModel, texts: list[str]) -> list[int]:
    return model.predict(texts)


with words, predict:
    assert predict("two words") == 2


GUARDED = """
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE
from mlflow.pyfunc import PythonModel

from modelguard import MemoryGrowth, guard
from modelguard.errors import LoadFailed, Overloaded


class Model:
    def __init__(self, path):
        self.ending = Path(path).read_text()

    def __call__(self, texts):
        return [text + self.ending for text in texts]


class Guarded(PythonModel):
    def load_context(self, context):
        path = context.artifacts["ending"]
        self.nlp = guard(lambda: Model(path), reload_on=MemoryGrowth("1 GB"), name="nlp")
        self.nlp.load()

    def predict(self, model_input: list[str], params=None) -> list[str]:
        try:
            with self.nlp.lease() as model:
                return model(model_input)
        except (Overloaded, LoadFailed) as error:  # no model now
            raise MlflowException(str(error), error_code=TEMPORARILY_UNAVAILABLE) from error


set_model(Guarded())
"""
Path("guarded.py").write_text(GUARDED)
Path("ending.txt").write_text("!")
mlflow.pyfunc.save_model(
    "guarded", python_model="guarded.py", artifacts={"ending": "ending.txt"}, pip_requirements=["modelguard-lifecycle"]
)

loaded = mlflow.pyfunc.load_model("guarded")
assert loaded.predict(["two words"]) == ["two words!"]
inside = loaded.unwrap_python_model().nlp
assert inside.status().state == "ready"
inside.close()
