"""What is read from source: literal values only, in the order in which they would run."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelguard.diagnosis._facts import Moment, Source
from modelguard.diagnosis._sources import find_module, read_source


def read(folder: Path, text: str, **others: str) -> Source:
    (folder / "app.py").write_text(text, encoding="utf-8")
    for name, other in others.items():
        (folder / f"{name}.py").write_text(other, encoding="utf-8")
    return read_source([folder / "app.py"], [folder])


def moments(source: Source) -> list[tuple[str, str | None, Moment]]:
    return [(variable.name, variable.value, variable.moment) for variable in source.variables]


@pytest.mark.parametrize(
    "line",
    [
        'os.environ["LRU_CACHE_CAPACITY"] = "8"',
        'os.environ.setdefault("LRU_CACHE_CAPACITY", "8")',
        'os.environ.update(LRU_CACHE_CAPACITY="8")',
        'os.environ.update({"LRU_CACHE_CAPACITY": "8"})',
        'os.environ |= {"LRU_CACHE_CAPACITY": "8"}',
        'os.putenv("LRU_CACHE_CAPACITY", "8")',
        'from os import environ\nenviron["LRU_CACHE_CAPACITY"] = "8"',
        'import os as system\nsystem.environ["LRU_CACHE_CAPACITY"] = "8"',
        'if True:\n    os.environ["LRU_CACHE_CAPACITY"] = "8"',
    ],
)
def test_every_way_to_set_a_variable(tmp_path: Path, line: str) -> None:
    """However it is written, it is a variable that the app sets."""
    assert [("LRU_CACHE_CAPACITY", "8", "app")] == moments(read(tmp_path, f"import os\n{line}\n"))


def test_a_value_that_is_computed_is_not_known(tmp_path: Path) -> None:
    """That it is set is known, to what is not."""
    source = read(tmp_path, 'import os\nos.environ["OMP_NUM_THREADS"] = str(2 * 3)\n')
    assert [("OMP_NUM_THREADS", None, "app")] == moments(source)


def test_other_variables_are_left_out(tmp_path: Path) -> None:
    """What modelguard does not work with is never kept, secrets least of all."""
    assert () == read(tmp_path, 'import os\nos.environ["API_KEY"] = "secret"\n').variables


def test_before_and_after_the_import_of_a_library(tmp_path: Path) -> None:
    """The order in the file decides."""
    text = 'import os\nos.environ["OMP_NUM_THREADS"] = "1"\nimport torch\nos.environ["MKL_NUM_THREADS"] = "1"\n'
    expected = [("OMP_NUM_THREADS", "1", "app"), ("MKL_NUM_THREADS", "1", "after import")]
    assert expected == moments(read(tmp_path, text))


def test_a_library_that_a_module_beside_the_app_imports(tmp_path: Path) -> None:
    """Modules of the project are followed where they are imported."""
    text = 'import os\nfrom net import model\nos.environ["OMP_NUM_THREADS"] = "1"\n'
    source = read(tmp_path, text, net="import torch\n")
    assert [("OMP_NUM_THREADS", "1", "after import")] == moments(source)
    assert "net.py line 1 imports torch" == source.imported(["torch"])


def test_inside_a_function_the_time_is_not_known(tmp_path: Path) -> None:
    """It is unknown when a function runs, and what it imports is not loaded yet."""
    text = """
import os
def setup():
    import torch
    os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
"""
    expected = [("MKL_NUM_THREADS", "1", "app"), ("OMP_NUM_THREADS", "1", "later")]
    assert expected == moments(read(tmp_path, text))


def test_hooks_run_when_the_server_says(tmp_path: Path) -> None:
    """The functions of a configuration have their moments."""
    config = tmp_path / "conf.py"
    config.write_text('import os\ndef post_fork(server, worker):\n    os.environ["OMP_NUM_THREADS"] = "1"\n')
    source = read_source([config], [tmp_path], moment="server", hooks={"post_fork": "after import"})
    assert [("OMP_NUM_THREADS", "1", "after import")] == moments(source)


@pytest.mark.parametrize(
    "text",
    [
        'from modelguard import presets\npresets.get("torch-cpu-dynamic").apply()\n',
        'import modelguard\nmodelguard.presets.get("low-memory").apply()\n',
        'from modelguard import presets\n(presets.get("prefork") | presets.get("torch-cpu-dynamic")).apply()\n',
    ],
)
def test_a_preset_that_is_applied(tmp_path: Path, text: str) -> None:
    """It counts as the variables that it sets."""
    names = {variable.name for variable in read(tmp_path, text).variables}
    assert names & {"LRU_CACHE_CAPACITY", "MALLOC_ARENA_MAX"}


@pytest.mark.parametrize("name", ["NAME", '"torch-cpu-dynamci"'])
def test_a_preset_whose_name_is_not_known(tmp_path: Path, name: str) -> None:
    """Then nothing is claimed about variables, and the report says why."""
    source = read(tmp_path, f"from modelguard import presets\npresets.get({name}).apply()\n")
    assert "app.py line 2" == source.applies
    assert "cannot be told" in source.unknown[0]


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("import gc\ngc.freeze()\n", "freezes", "app.py line 2"),
        ("from modelguard import prefork\nprefork.prepare()\n", "freezes", "app.py line 2"),
        ("from modelguard.frameworks.gunicorn import *\n", "freezes", "app.py line 1"),
        ("from modelguard.frameworks import gunicorn as sharing\n", "freezes", "app.py line 1"),
        ("from gc import freeze\ndef when_ready(server):\n    freeze()\n", "freezes", "app.py line 3"),
        ("from modelguard import guard\nnlp = guard(load, reload_on=TTL('1h'))\n", "reloads", "app.py line 2"),
        ("from modelguard import guard\nnlp = guard(load, reload_on=None)\n", "reloads", None),
        ("import modelguard as mg\n@mg.guard(load, reload_on=x)\ndef f(m): ...\n", "reloads", "app.py line 2"),
        ("import torch\nmodel = load().to('cuda:1')\n", "cuda", "app.py line 2"),
        ("import torch\nmodel = load().cuda()\n", "cuda", "app.py line 2"),
        ("import torch\nmodel = load(device='cuda')\n", "cuda", "app.py line 2"),
        ("import torch\nif torch.cuda.is_available(): ...\n", "cuda", None),
        ("import torch\ntorch.set_num_threads(3)\n", "threads", 3),
        ("import torch\ntorch.set_num_threads(count)\n", "threads", None),
    ],
)
def test_calls_that_matter(tmp_path: Path, text: str, field: str, expected: object) -> None:
    """Each is found by what the name refers to, not by its spelling."""
    assert expected == getattr(read(tmp_path, text), field)


def test_packages_and_relative_imports(tmp_path: Path) -> None:
    """A package's own modules are followed, each once, also in a circle."""
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("import gc\n")
    (package / "api.py").write_text("from . import model\nfrom .model import load\nimport shop.api\n")
    (package / "model.py").write_text("import spacy\nfrom shop import api\n")
    source = read_source(find_module("shop.api", [tmp_path]), [tmp_path])
    assert "model.py line 1 imports spacy" == source.imported(["torch", "spacy"])
    assert 3 == len(source.files)


def test_a_file_that_is_no_python(tmp_path: Path) -> None:
    """It is named among what is not known."""
    assert ("app.py could not be read: SyntaxError",) == read(tmp_path, "def\n").unknown


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    """Nothing is found, and nothing is raised."""
    assert [] == find_module("no.such", [tmp_path])
