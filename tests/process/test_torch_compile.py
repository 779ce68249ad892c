"""Compiled models in forked children: each has to compile for itself what is new, and none may wait for its parent."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from tests.process.gunicorn_server import Gunicorn
from tests.process.harness import run_python, write_app

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform cannot fork"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

#: A model that is compiled by its warm-up, for as many threads as it runs on; with ``KNOWN + 1`` it is compiled anew.
NET = """
    import torch
    from modelguard import guard

    torch.set_num_threads(2)
    KNOWN = 2048

    def load():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
        return torch.compile(net.eval())

    def run(model, rows):
        with torch.inference_mode():
            return list(model(torch.ones(rows, 16)).shape)

    net = guard(load, reload_on=None, warmup=lambda model: run(model, KNOWN), prefork=True, name="net")
    answer = net(run)
"""

PREFORK = """
    import json, os, signal, warnings
    from modelguard import prefork
    from net import KNOWN, answer, net

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = prefork.prepare(warm_timeout=200)

    def in_child(rows):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(200)
            prefork.in_child()
            os.write(writer, json.dumps(answer(rows)).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            told = pipe.read()
        os.waitpid(pid, 0)
        return json.loads(told) if told else "hung"

    named = [str(hazard) for hazard in report.hazards if hazard.owner in ("torch.compile", "tqdm")]
    warned = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    print(json.dumps([in_child(KNOWN), in_child(KNOWN + 1), named, warned]))
"""

ISOLATED = """
    import json
    from modelguard import isolate
    from net import KNOWN, net, run

    @isolate(workers=1, timeout="300s")
    @net
    def answer(model, rows):
        return run(model, rows)

    if __name__ == "__main__":
        answer.load()
        print(json.dumps([answer(KNOWN), answer(KNOWN + 1)]))
        answer.close()
"""

WEB = """
    from net import KNOWN, answer

    def app(environ, start_response):
        body = str(answer(KNOWN + int(environ["PATH_INFO"][1:]))).encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]
"""


@pytest.fixture
def compiling(tmp_path: Path) -> dict[str, Any]:
    """The environment of a process that compiles with a pool, into a folder of the test's own."""
    write_app(tmp_path, NET, "net.py")
    return {
        "PYTHONPATH": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # to try what the CPU can do takes two thirds of the time
    }


def test_children_compile_what_is_new(compiling: dict[str, Any]) -> None:
    """Cold and warm, a child answers a shape that its parent knows, and one that it has to compile."""
    for cache in ("cold", "warm"):
        known, new, named, warned = run_python(PREFORK, 500, **compiling)
        assert ([2048, 4], [2049, 4], []) == (known, new, warned), cache
        ways = ("TORCHINDUCTOR_COMPILE_THREADS=1", "tqdm.monitor_interval = 0")
        assert all(any(way in hazard for way in ways) for hazard in named)
        assert named, "the compiler's threads, or its progress bar's, are named, with how to do without"


def test_isolated_workers_compile_what_is_new(compiling: dict[str, Any], tmp_path: Path) -> None:
    """A worker answers the warm-up's shape, and one that it has to compile, from a cold cache."""
    write_app(tmp_path, ISOLATED, "isolated.py")
    program = f"import runpy; runpy.run_path({str(tmp_path / 'isolated.py')!r}, run_name='__main__')"
    assert [[2048, 4], [2049, 4]] == run_python(program, 500, **compiling)


def test_gunicorns_workers_compile_what_is_new(compiling: dict[str, Any], tmp_path: Path) -> None:
    """Behind gunicorn a worker answers the warm-up's shape, and one that it has to compile, from a cold cache."""
    with Gunicorn(tmp_path, "-w", "2", "-t", "300", app=WEB, **compiling) as server:
        server.wait_until_serving("/0", seconds=300)
        assert ["[2048, 4]", "[2049, 4]"] == [server.ask(path, timeout=300).text for path in ("/0", "/1")]
