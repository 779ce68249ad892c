"""Story 3 over HTTP: a batcher behind its web server, compared with LitServe, which contains both.

The model is a no-op on one number, in batches of at most 64, which do not wait for more items. modelguard runs in
Starlette under one uvicorn, with the middleware; LitServe runs the same uvicorn with one API server and one worker
process. ``wrk`` sends requests over 64 connections and over one; the two servers alternate in short rounds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import _common

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, LITSERVE = "modelguard", "LitServe"
CROWD, LONE = 64, 1
#: Seconds that a server may take to start.
PATIENCE = 60.0

PROGRAMS = {
    OURS: """
        import sys
        import uvicorn
        from starlette.applications import Starlette
        from starlette.responses import JSONResponse
        from starlette.routing import Route

        from modelguard import batched
        from modelguard.frameworks.asgi import ModelGuardMiddleware

        @batched(max_size=64)
        def add_one(items):
            return [item + 1 for item in items]

        async def predict(request):
            return JSONResponse({"out": await add_one.aio((await request.json())["item"])})

        app = ModelGuardMiddleware(Starlette(routes=[Route("/predict", predict, methods=["POST"])]), deadline="10s")
        uvicorn.run(app, port=int(sys.argv[1]), log_level="error", access_log=False)
    """,
    LITSERVE: """
        import sys
        import litserve

        class AddOne(litserve.LitAPI):
            def setup(self, device):
                pass

            def decode_request(self, request):
                return request["item"]

            def batch(self, inputs):
                return list(inputs)

            def predict(self, items):
                return [item + 1 for item in items]

            def unbatch(self, output):
                return output

            def encode_response(self, output):
                return {"out": output}

        if __name__ == "__main__":
            server = litserve.LitServer(AddOne(max_batch_size=64, batch_timeout=0), accelerator="cpu")
            options = {"generate_client_file": False, "num_api_servers": 1, "log_level": "error", "access_log": False}
            server.run(host="127.0.0.1", port=int(sys.argv[1]), **options)
    """,
}
SCRIPT = """\
wrk.method = "POST"
wrk.body = '{"item": 3}'
wrk.headers["Content-Type"] = "application/json"
"""


class Answers:
    """The results of one round of wrk."""

    def __init__(self, report: str) -> None:
        assert "Non-2xx" not in report, report
        self.a_second = float(re.findall(r"Requests/sec:\s+([\d.]+)", report)[0])
        value, unit = re.findall(r"50%\s+([\d.]+)(us|ms|s)", report)[0]
        self.p50 = float(value) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[unit]


@contextlib.contextmanager
def serving(name: str, folder: Path) -> Iterator[str]:
    """A server in a process group of its own; gives its address."""
    port = _common.free_port()
    program = folder / f"serve_{name}.py"
    program.write_text(textwrap.dedent(PROGRAMS[name]), encoding="utf-8")
    command = [sys.executable, str(program), str(port)]
    with (folder / f"{name}.log").open("wb") as log:  # LitServe writes a traceback for each client that hangs up
        process = subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/predict"
    request = urllib.request.Request(url, b'{"item": 3}', {"Content-Type": "application/json"})
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
                assert b"4" in answer.read()
                break
            assert process.poll() is None, (folder / f"{name}.log").read_text()
            assert time.monotonic() < deadline, f"{name} does not answer"
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, 15)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)


def wrk(url: str, connections: int, seconds: int, script: Path) -> Answers:
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}", "--latency", "-s", str(script), url]
    return Answers(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    benchmark = _common.Benchmark("batching_http", "Story 3 over HTTP, compared with LitServe")
    if shutil.which("wrk") is None or importlib.util.find_spec("litserve") is None:
        sys.exit("this needs wrk, and litserve from the group `peers`")
    rounds, seconds = (2, 1) if benchmark.quick else (7, 4)
    measured: dict[tuple[str, int], list[Answers]] = {}
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        folder = Path(place)
        script = folder / "post.lua"
        script.write_text(SCRIPT, encoding="utf-8")
        urls = {name: stack.enter_context(serving(name, folder)) for name in PROGRAMS}
        for number in range(rounds + 1):
            for name, url in urls.items():
                for connections in (CROWD, LONE):
                    found = wrk(url, connections, seconds, script)
                    if number:  # the first round warms up
                        measured.setdefault((name, connections), []).append(found)

    def ratios(connections: int) -> list[float]:
        pairs = zip(measured[LITSERVE, connections], measured[OURS, connections], strict=True)
        return [theirs.a_second / mine.a_second for theirs, mine in pairs]

    rows = [
        _common.Row("64 connections, LitServe's answers a second / modelguard's", ratios(CROWD), "x", ours=True),
        _common.Row("one connection, LitServe's answers a second / modelguard's", ratios(LONE), "x", ours=True),
    ]
    for (name, connections), found in measured.items():
        who = f"  {name}, {connections} connection{'s'[: connections > 1]}"
        rows.append(_common.Row(f"{who}: answers a second", [one.a_second for one in found], "1/s", ours=name == OURS))
        rows.append(_common.Row(f"{who}: p50", [one.p50 for one in found], "ms", ours=name == OURS))

    def draw(figure: Figure) -> None:
        shown = [row for row in rows if row.unit == "1/s"]
        _common.bars(figure.subplots(), shown, "A no-op model behind HTTP", axis="responses per second")

    benchmark.finish(
        rows, draw, size=(9, 3.5), rounds={" ".join(map(str, key)): len(one) for key, one in measured.items()}
    )


if __name__ == "__main__":
    main()
