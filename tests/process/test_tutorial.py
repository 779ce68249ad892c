"""The tutorial's last service, started by the command that stands below it.

The snippets in between run with those of all pages, in ``tests/contract/test_docs.py``.
"""

from __future__ import annotations

import re
import shlex
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Answer, Server, write_app

from modelguard import sharing

for needed in ("fastapi", "gunicorn", "spacy"):
    pytest.importorskip(needed, reason="the tutorial's service needs it")
TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.timeout(180)


def last_service() -> tuple[str, list[str]]:
    """Find the last snippet that makes a whole service, and the command that follows it."""
    blocks = FENCE.findall(TUTORIAL.read_text(encoding="utf-8"))
    place = max(at for at, (language, text) in enumerate(blocks) if language == "python" and "app = FastAPI(" in text)
    language, command = blocks[place + 1]
    assert "sh" == language
    here = {"modelguard": [sys.executable, "-m", "modelguard"], "gunicorn": [sys.executable, "-m", "gunicorn"]}
    return blocks[place][1], [
        part for word in shlex.split(command.replace("\\\n", " ")) for part in here.get(word, [word])
    ]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Server]:
    """The service, all of whose workers are there."""
    code, command = last_service()
    write_app(tmp_path, code)
    environment = {"MODELGUARD_RUNTIME_DIR": str(tmp_path)}
    with Server(tmp_path, *command, "-b", "127.0.0.1:0", environment=environment) as server:
        server.wait_until_serving("/readyz", 120)
        server.wait_until(lambda: server.log.count("Booting worker") >= 4, "all workers")
        yield server


def json_of(answer: Answer) -> Any:
    """The content of an answer that is well."""
    assert 200 == answer.status, answer.text
    return answer.json


@pytest.mark.skipif(sys.platform != "linux", reason="forked workers")
def test_the_service_of_the_tutorial_serves_with_all_four_guards(service: Server) -> None:
    """Whoever follows the tutorial to its end has four workers on the parent's model, and one answer for each text."""
    query = urllib.parse.urlencode({"text": "Four guards, one service."})
    for _ in range(20):
        assert ["Four", "guards", ",", "one", "service", "."] == json_of(service.ask(f"/words?{query}", method="POST"))
    status = json_of(service.ask("/status"))
    assert (1, "ready") == (status["model"]["generation"], status["model"]["state"])
    assert 32 >= status["queue"]["batch_size"]["max"] >= 1
    assert 4 == len(service.children())
    assert 3 > sharing.report(service.process.pid).copies  # five processes that do not share hold about five
    environment = Path(f"/proc/{service.process.pid}/environ").read_bytes().split(b"\0")
    assert b"TOKENIZERS_PARALLELISM=false" in environment  # the preset was there from the start
