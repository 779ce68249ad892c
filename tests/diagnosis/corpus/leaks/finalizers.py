"""A finalizer per request on an object that lives as long as the service."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from itertools import count


class Workspace:
    def __init__(self, folder: str) -> None:
        self.folder = folder


workspace = Workspace("/nonexistent/workspace")


def clean_up(folder: str, files: list[str]) -> None:
    for file in files:
        shutil.rmtree(f"{folder}/{file}", ignore_errors=True)


def predict(name: str) -> int:
    files = [f"{name}-{part}.png" for part in range(30)]  # LEAK
    weakref.finalize(workspace, clean_up, workspace.folder, files).atexit = False  # LEAK
    return len(files)


def inputs() -> Iterator[str]:
    return (f"upload-{number}" for number in count())


EXPECTED = {"causes": ["python objects"], "holders": ["finalize"], "calls": 4000}
