"""Libraries that are not installed: the error says how to install them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelguard import weights
from modelguard._extras import not_installed
from modelguard.errors import NotSupported

CPU = "pip install torch --index-url https://download.pytorch.org/whl/cpu"

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "{library}":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing())
try:
    import modelguard.adapters.{adapter}
except RuntimeError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("library", "adapter", "command"),
    [("torch", "torch", CPU), ("spacy", "spacy", "pip install 'modelguard-lifecycle[spacy]'")],
)
def test_an_adapter_without_its_library(library: str, adapter: str, command: str) -> None:
    """Importing the adapter gives NotSupported with the command that installs the library."""
    program = WITHOUT.format(library=library, adapter=adapter)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.startswith(f"NotSupported modelguard.adapters.{adapter} is not supported here: "), done.stderr
    assert f"{library} is not installed; {command}" in done.stdout


class Module:
    """Passes for a torch module, as far as its class is concerned."""


def test_publishing_a_torch_module_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the build of torch for CPUs, and nothing is published."""
    monkeypatch.setattr(Module, "__module__", "torch.nn.modules.module")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "modelguard.adapters._torch_weights", raising=False)
    with pytest.raises(NotSupported, match="torch is not installed") as caught:
        weights.publish(Module(), tmp_path / "net")
    assert CPU in str(caught.value)
    assert [] == list(tmp_path.iterdir())


def test_another_missing_module_is_not_hidden() -> None:
    """If a library itself lacks something, its own error passes."""
    error: Any = ModuleNotFoundError("No module named 'torch._C'", name="torch._C")
    assert error is not_installed(error, "anything")
