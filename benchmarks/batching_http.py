"""Story 3 over HTTP: a batcher behind its web server, compared with LitServe, which contains both.

The model is a no-op on one number, in batches of at most 64, which do not wait for more items. modelguard runs in
Starlette under one uvicorn, with the middleware; LitServe runs the same uvicorn with one API server and one worker
process. ``wrk`` sends requests over 64 connections and over one; the two servers alternate in short rounds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import _common
from examples._driver import Server, free_port

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, LITSERVE = "modelguard", "LitServe"
CROWD, LONE = 64, 1
#: Seconds that a server may take to start.
PATIENCE = 60.0
JSON = {"Content-Type": "application/json"}

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
        print(f"127.0.0.1:{sys.argv[1]}")
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
            print(f"127.0.0.1:{sys.argv[1]}")
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
    """A server that answers; gives its address."""
    program = folder / f"serve_{name}.py"
    program.write_text(textwrap.dedent(PROGRAMS[name]), encoding="utf-8")
    server = Server([sys.executable, program, str(free_port())], folder=folder, name=name)

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return server.port is not None and b"4" in server.ask("/predict", '{"item": 3}', headers=JSON).body
        return False

    try:
        server.wait_until(answers, "an answer", PATIENCE)
        yield f"{server.url}/predict"
    finally:
        server.stop(10)


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
