"""Services that are ill in one known way each, and healthy ones that look like them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["HEALTHY", "ILL", "JEMALLOC", "MIMALLOC", "Service"]

WSGI = """
def app(environ, start_response):
    start_response("200 OK", [])
    return [answer(environ)]
def answer(environ):
    return b"ok"
"""

ASGI = """
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})
"""

#: 200 MB of its own, as a model would be.
MODEL = "import os\nmodel = bytearray(os.urandom(1)) * 200_000_000\n"
HEAP = "model = [[number] for number in range(200_000)]\n"
SHAPES = """
import itertools, torch
lengths = itertools.count(300)
net = torch.nn.Sequential(torch.nn.Conv1d(128, 192, 5), torch.nn.Conv1d(192, 192, 3))
def answer(environ):
    with torch.inference_mode():
        net(torch.randn(1, 128, next(lengths)))
    return b"ok"
"""
LINEAR = """
import torch
net = torch.nn.Linear(64, 64)
attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
lengths = iter(range(10, 10**6))
def answer(environ):
    with torch.inference_mode():
        x = net(torch.randn(1, next(lengths), 64))
        attention(x, x, x)
    return b"ok"
"""
GUARD = """
from modelguard import guard, Uses
nlp = guard(lambda: object(), reload_on=Uses(1000), prefork=True)
@nlp
def work(model):
    return model
def answer(environ):
    work()
    return b"ok"
"""
SLOW_LOAD = """
import time
from modelguard import guard, Uses
nlp = guard(lambda: time.sleep(3) or object(), reload_on=Uses(1000), swap="drain_first")
nlp.load()
"""
FILE = """
with open("weights", "wb") as file:
    for _ in range(30):
        file.write(bytes(10_000_000))
with open("weights", "rb") as file:
    while file.read(10_000_000):
        pass
"""
CAPS = "os.environ.update(ONEDNN_PRIMITIVE_CACHE_CAPACITY='8', LRU_CACHE_CAPACITY='8')\n"
MAIN = (
    "import uvicorn\nif __name__ == '__main__':\n    uvicorn.run('app:app', port={port}, workers=%d, lifespan='off')\n"
)

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
JEMALLOC = f"{LIBRARIES}/libjemalloc.so.2"
MIMALLOC = f"{LIBRARIES}/libmimalloc.so.2.0"
FOLDER = os.path.dirname(sys.executable)  # noqa: PTH120 - a virtual environment's python is a link

GUNICORN = (f"{FOLDER}/gunicorn", "--bind", "127.0.0.1:{port}")
LIMITED = ("sh", "-c", 'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh")
UVICORN = (f"{FOLDER}/uvicorn", "--port", "{port}", "--lifespan", "off")


@dataclass(frozen=True)
class Service:
    """A service, and what the doctor has to find.

    Attributes:
        name: What is wrong, or right.
        files: The files beside it, by name.
        command: How it is started; ``{port}`` is a free port, ``{folder}`` where the files are.
        expected: The numbers of the findings, without MG301 and MG302, which depend on the machine.
        environ: Its variables.
        request: A path to request.
        stays: Numbers among them that no change of the command can remove.
        needs: Modules without which it cannot run.
        limit: Bytes that its cgroup may use, which is made for it; ``{cgroup}`` is its folder.
        quick: Whether it is looked at wherever the tests run, and not in the grid alone.
    """

    name: str
    files: Mapping[str, str]
    command: tuple[str, ...]
    expected: frozenset[str] = frozenset()
    environ: Mapping[str, str] = field(default_factory=dict)
    request: str | None = None
    stays: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ("gunicorn",)
    limit: int = 0
    quick: bool = True


def ill(name: str, app: str, *command: str, expected: str, **more: object) -> Service:
    files = {"app.py": app, **dict(more.pop("files", {}))}  # type: ignore[call-overload]
    return Service(name, files, command, frozenset(expected.split()), **more)  # type: ignore[arg-type]


def well(name: str, app: str, *command: str, **more: object) -> Service:
    return ill(name, app, *command, expected="", **more)


TORCH = ("gunicorn", "torch")

ILL = (
    ill(
        "preload in raw_env", WSGI, *GUNICORN, "-c", "conf.py", "app:app", expected="MG101",
        files={"conf.py": f"raw_env = ['LD_PRELOAD={JEMALLOC}']\n"},
    ),
    ill(
        "preload of a missing file", WSGI, "env", "LD_PRELOAD=/no/libjemalloc.so.2", *GUNICORN, "app:app",
        expected="MG102",
    ),
    ill(
        "jemalloc's threads before a fork", WSGI, *GUNICORN, "app:app", expected="MG103",
        environ={"LD_PRELOAD": JEMALLOC, "MALLOC_CONF": "background_thread:true,narenas:2"},
    ),
    ill("glibc's arenas set by the app", "import os\nos.environ['MALLOC_ARENA_MAX'] = '2'\n" + WSGI, *GUNICORN,
        "app:app", expected="MG104"),
    ill("settings of jemalloc without it", WSGI, *GUNICORN, "app:app", expected="MG105",
        environ={"MALLOC_CONF": "narenas:2"}),
    ill("two allocators", WSGI, *GUNICORN, "app:app", expected="MG106",
        environ={"LD_PRELOAD": f"{JEMALLOC}:{MIMALLOC}"}),
    ill("settings of glibc without it", WSGI, *GUNICORN, "app:app", expected="MG107",
        environ={"LD_PRELOAD": JEMALLOC, "MALLOC_ARENA_MAX": "2"}),
    ill("one cap of two", "import torch\n" + WSGI, *GUNICORN, "app:app", expected="MG201",
        environ={"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}, needs=TORCH),
    ill("threads set after the import", "import torch, os\nos.environ['OMP_NUM_THREADS'] = '1'\n" + WSGI, *GUNICORN,
        "app:app", expected="MG202", needs=TORCH),
    ill("load_dotenv after the import", "import torch, dotenv\ndotenv.load_dotenv('.env')\n" + WSGI, *GUNICORN,
        "app:app", expected="MG202", needs=(*TORCH, "dotenv"), files={".env": "OMP_NUM_THREADS=1\n"}),
    ill("many shapes without caps", WSGI + SHAPES, *GUNICORN, "app:app", expected="MG203", request="/", needs=TORCH),
    ill("many shapes, caps after the first use", WSGI + SHAPES + "import os\nanswer({})\n" + CAPS, *GUNICORN, "app:app",
        expected="MG202", request="/", needs=TORCH),
    ill("threads times workers", "import torch\n" + WSGI, *GUNICORN, "-w", "3", "app:app", expected="MG204",
        environ={"OMP_NUM_THREADS": "8"}, needs=TORCH),
    ill("a cap of 0", "import torch\n" + WSGI, *GUNICORN, "app:app", expected="MG205", needs=TORCH,
        environ={"LRU_CACHE_CAPACITY": "0", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}),
    ill("metric files of ended processes", WSGI, *GUNICORN, "app:app", expected="MG303",
        environ={"PROMETHEUS_MULTIPROC_DIR": "{folder}"}, files={"counter_4194304.db": ""}),
    ill("a preloaded heap that is not frozen", HEAP + WSGI, *GUNICORN, "-w", "2", "--preload", "app:app",
        expected="MG401" if sys.version_info >= (3, 12) else "MG401 MG501", stays=frozenset({"MG401", "MG501"})),
    ill("such a heap with a guard", HEAP + WSGI + GUARD, *GUNICORN, "-w", "2", "--preload", "app:app",
        expected="MG401 MG410" if sys.version_info >= (3, 12) else "MG401 MG410 MG501", stays=frozenset({"MG501"})),
    ill("a model in each forked worker", MODEL + WSGI, *GUNICORN, "-w", "2", "app:app", expected="MG402"),
    ill("a model in each forked worker, with a guard", MODEL + WSGI + GUARD, *GUNICORN, "-w", "2", "app:app",
        expected="MG402 MG410"),
    ill("a guard beside max_requests", WSGI + GUARD, *GUNICORN, "--max-requests", "500", "app:app", expected="MG403"),
    ill("a model in each spawned worker", MODEL + ASGI, *UVICORN, "--workers", "2", "app:app", expected="MG404",
        needs=("uvicorn",)),
    ill("the same by uvicorn.run", MODEL + ASGI, sys.executable, "main.py", expected="MG404", needs=("uvicorn",),
        files={"main.py": MAIN % 2}, stays=frozenset({"MG404"})),
    ill("FastAPI on a sync worker", "from fastapi import FastAPI\napp = FastAPI()\n", *GUNICORN, "app:app",
        expected="MG406", needs=("gunicorn", "fastapi")),
    ill("workers replaced in step", WSGI, *GUNICORN, "-w", "2", "--max-requests", "500", "app:app", expected="MG407"),
    ill("a load longer than the timeout", SLOW_LOAD + WSGI, *GUNICORN, "--timeout", "2", "app:app", expected="MG409"),
    ill("gunicorn --reload", WSGI, *GUNICORN, "--reload", "app:app", expected="MG408"),
    ill("uvicorn --reload", ASGI, *UVICORN, "--reload", "app:app", expected="MG408", needs=("uvicorn",)),
    ill("a misspelt name", WSGI, *GUNICORN, "app:app", expected="MG108", environ={"MALLOC_TRIM_THRESHOLD": "131072"}),
    ill("= for : in MALLOC_CONF", WSGI, *GUNICORN, "app:app", expected="MG109", quick=False,
        environ={"LD_PRELOAD": JEMALLOC, "MALLOC_CONF": "narenas=2"}),
    ill("threads as a word", WSGI, *GUNICORN, "app:app", expected="MG109", environ={"OMP_NUM_THREADS": "two"},
        quick=False),
    ill("32 threads", WSGI, *GUNICORN, "--threads", "32", "app:app", expected="MG110", quick=False),
    ill("debug checks of Python's allocator", WSGI, *GUNICORN, "app:app", expected="MG504", quick=False,
        environ={"PYTHONMALLOC": "debug"}),
    ill("prefork=True without the hook", WSGI + GUARD, *GUNICORN, "-w", "2", "app:app", expected="MG410"),
    ill("prefork=True under uvicorn", GUARD + ASGI, *UVICORN, "--workers", "2", "app:app", expected="MG410",
        needs=("uvicorn",), stays=frozenset({"MG410"}), quick=False),
    ill("a loop of kills", "held = bytearray(b'x') * 400_000_000\n" + WSGI, *LIMITED, *GUNICORN, "-w", "2", "app:app",
        expected="MG304", limit=300_000_000, stays=frozenset({"MG304"})),
    ill("close to the limit", "held = bytearray(b'x') * 300_000_000\n" + WSGI, *LIMITED, *GUNICORN, "app:app",
        expected="MG305", limit=350_000_000, stays=frozenset({"MG305"}), quick=False),
)  # fmt: skip

OURS = ("-c", "python:modelguard.frameworks.gunicorn")
FREEZES = "import gc\npreload_app = True\ndef when_ready(server):\n    gc.collect()\n    gc.freeze()\n"

HEALTHY = (
    well("our gunicorn configuration", MODEL + WSGI + GUARD, *GUNICORN, "-w", "2", *OURS, "app:app"),
    well("load_dotenv first", "import dotenv\ndotenv.load_dotenv('.env')\nimport torch\n" + WSGI, *GUNICORN, "app:app",
         needs=(*TORCH, "dotenv"), files={".env": "OMP_NUM_THREADS=1\n"}),
    well("a load longer than the timeout, on threads", SLOW_LOAD + WSGI, *GUNICORN, "--timeout", "2", "--threads", "2",
         "app:app"),
    well("set_num_threads", "import torch\ntorch.set_num_threads(1)\n" + WSGI, *GUNICORN, "-w", "2", "app:app",
         needs=TORCH, environ={"OMP_NUM_THREADS": "1"}),
    well("a preset in a variable", "from modelguard import presets\np = presets.get('torch-cpu-dynamic')\np.apply()\n"
         + WSGI + SHAPES, *GUNICORN, "app:app", request="/", needs=TORCH),
    well("uvicorn.run", MODEL + ASGI, sys.executable, "main.py", needs=("uvicorn",), files={"main.py": MAIN % 1}),
    well("linear layers and attention", WSGI + LINEAR, *GUNICORN, "app:app", request="/", needs=TORCH),
    well("an allocator from the start", WSGI, FOLDER + "/modelguard", "run", "--allocator", "jemalloc", "--", *GUNICORN,
         "app:app"),
    well("preloaded and frozen", MODEL + WSGI, *GUNICORN, "-w", "2", "-c", "conf.py", "app:app",
         files={"conf.py": FREEZES}),
    well("a jitter", WSGI, *GUNICORN, "-w", "2", "--max-requests", "500", "--max-requests-jitter", "50", "app:app"),
    well("FastAPI on an ASGI worker", "from fastapi import FastAPI\napp = FastAPI()\n", *GUNICORN, "-k", "asgi",
         "app:app", needs=("gunicorn", "fastapi")),
    well("metric files of this run", WSGI, *GUNICORN, "app:app", environ={"PROMETHEUS_MULTIPROC_DIR": "{folder}"}),
    well("small workers", WSGI, *GUNICORN, "-w", "2", "app:app"),
    well("32 threads with two arenas", WSGI, *GUNICORN, "--threads", "32", "app:app", quick=False,
         environ={"MALLOC_ARENA_MAX": "2"}),
    well("names of its own", WSGI, *GUNICORN, "app:app", quick=False, environ={
        "APP_NUM_THREADS": "4", "NM_NUM_THREADS": "4", "PYTHONPATH_OLD": "/x", "PYTHONPATH2": "/x",
        "MALLOC_CHECK_": "0", "OMP_PLACES": "cores", "MODELS_FREEZE": "1"}),
    well("threads for each level", WSGI, *GUNICORN, "app:app", environ={"OMP_NUM_THREADS": "2,1"}, quick=False),
    well("small objects by malloc", WSGI, *GUNICORN, "app:app", environ={"PYTHONMALLOC": "malloc"}, quick=False),
    well("the preset for forks", WSGI, FOLDER + "/modelguard", "run", "--preset", "prefork", "--", *GUNICORN,
         "app:app", quick=False),
    well("the preset for little memory, with jemalloc", WSGI, FOLDER + "/modelguard", "run", "--preset", "low-memory",
         "--allocator", "jemalloc", "--", *GUNICORN, "app:app", quick=False),
    well("file cache up to the limit", FILE + WSGI, *LIMITED, *GUNICORN, "app:app", limit=200_000_000, quick=False),
)  # fmt: skip
