"""An alias in MLflow's registry: a program that checks itself, for docs/recipes.md."""

import atexit
import os
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import mlflow
from mlflow import MlflowClient
from mlflow.pyfunc import PyFuncModel
from stand_ins import wait_until

from modelguard import Changed, Loaded, Swap, guard

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
where = [f"--backend-store-uri=sqlite:///{Path('registry.db').absolute()}", f"--artifacts-destination={Path.cwd()}"]
server = subprocess.Popen(
    [sys.executable, "-m", "mlflow", "server", *where, "--host=127.0.0.1", f"--port={port}", "--workers=1"],
    env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
)
atexit.register(server.terminate)
url = f"http://127.0.0.1:{port}"


def is_up() -> bool:
    try:
        with urlopen(f"{url}/health", timeout=1):
            return True
    except OSError:
        return False


wait_until(is_up)

SAID = """
from pathlib import Path

from mlflow.models import set_model
from mlflow.pyfunc import PythonModel


class Said(PythonModel):
    def load_context(self, context):
        self.weights = Path(context.artifacts["weights"]).read_text()

    def predict(self, model_input: list[str], params=None) -> list[str]:
        return [f"{text}, said {self.weights}" for text in model_input]


set_model(Said())
"""
Path("said.py").write_text(SAID)


os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "5"  # seconds
os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
mlflow.set_tracking_uri(url)


def publish(weights: str) -> None:
    """What a training job does: a new version, and then the alias."""
    Path("weights.txt").write_text(weights)
    made = mlflow.pyfunc.log_model(
        name="nlp",
        python_model="said.py",
        artifacts={"weights": "weights.txt"},
        registered_model_name="nlp",
        pip_requirements=[],
    )
    MlflowClient().set_registered_model_alias("nlp", "champion", made.registered_model_version)


def alias() -> str:
    return str(MlflowClient().get_model_version_by_alias("nlp", "champion").version)


def load_champion() -> Loaded[PyFuncModel]:
    version = alias()
    return Loaded(mlflow.pyfunc.load_model(f"models:/nlp/{version}"), version=version)


publish("one")
nlp = guard(load_champion, reload_on=Changed(alias, every="200ms"), swap=Swap(defer=0), name="nlp")


@nlp
def say(model: PyFuncModel, text: str) -> str:
    return model.predict([text])[0]


with nlp:
    assert say("hello") == "hello, said one"
    publish("two")
    wait_until(lambda: nlp.version == "2")
    assert say("hello") == "hello, said two"
