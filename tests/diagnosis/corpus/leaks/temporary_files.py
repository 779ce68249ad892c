"""``mkstemp`` opens the file that it makes; only its name is used, and the descriptor stays open."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path


def predict(text: str) -> int:
    _, name = tempfile.mkstemp(prefix="upload-")  # LEAK
    file = Path(name)
    file.write_text(text, encoding="utf-8")
    size = file.stat().st_size
    os.unlink(file)  # noqa: PTH108
    return size


def inputs() -> Iterator[str]:
    return (f"the text of upload {number}" for number in count())


EXPECTED = {"causes": ["open files"], "holders": ["upload-", "files in /tmp"], "calls": 600}
