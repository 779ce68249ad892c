"""MLflow's own server of models with the pyfunc of examples/frameworks whose context makes a guard."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from examples._driver import free_port
from tests.process.harness import Server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow"),
    pytest.mark.timeout(240),
]

PROGRAM = Path(__file__).parents[2] / "examples" / "frameworks" / "mlflow_model.py"

#: Saves the pyfunc, as the program does.
SAVE = """
import sys
import mlflow
from pathlib import Path

Path("ending.txt").write_text("!")
artifacts = {"ending": "ending.txt"}
mlflow.pyfunc.save_model("guarded", python_model="guarded.py", artifacts=artifacts, pip_requirements=[])
"""


def guarded() -> str:
    """The module that the program writes."""
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="GUARDED")], value=ast.Constant(value=str(code))):
                return code
    raise AssertionError("the program does not write it any more")


def test_a_refusal_inside_a_pyfunc_is_503(tmp_path: Path) -> None:
    """`mlflow models serve` answers by the guarded model, and 503 where the guard has none to lend."""
    refuses = 'if model_input == ["no model"]: raise Overloaded("none")\n            with self.nlp.lease'
    code = guarded().replace("with self.nlp.lease", refuses)
    (tmp_path / "guarded.py").write_text(code)
    folder = Path(sys.executable).parent
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    with Server(tmp_path, "-c", SAVE, environment=environment) as saving:
        assert 0 == saving.process.wait(120), saving.log
    port = free_port()
    serve = ("-m", "mlflow", "models", "serve", "-m", "guarded", "--env-manager", "local", "-w", "1")
    with Server(tmp_path, *serve, "-h", "127.0.0.1", "-p", str(port), environment=environment) as server:
        server.wait_until_serving("/ping")
        headers = {"Content-Type": "application/json"}
        asked = [json.dumps({"inputs": [text]}) for text in ("two words", "no model")]
        answered, refused = [server.ask("/invocations", body, headers=headers) for body in asked]
        assert (200, ["two words!"]) == (answered.status, answered.json["predictions"])
        assert (503, "TEMPORARILY_UNAVAILABLE") == (refused.status, refused.json["error_code"])
