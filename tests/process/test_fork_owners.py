"""The table of ``sharing/_hazards.py`` with the real libraries: each is seen, cured, and works in a forked worker."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.process.harness import run_python, wait_until

pytestmark = pytest.mark.timeout(180)

#: Uses a library in a parent, applies the remedy, and uses the library in a forked child. Prints the library's hazards
#: before and after the remedy, and the child's exit status.
PROGRAM = """
import json, os, socket, sys, threading, time, traceback, warnings
from modelguard import guard, prefork

URL, NAME = {url!r}, {name!r}

def seen():
    found = [hazard for hazard in prefork.find_hazards() if hazard.owner == NAME or f" {{NAME}}: " in hazard.fix]
    return [[hazard.kind, hazard.severity, hazard.fix] for hazard in found]

{setup}
before = seen()
{cure}
after = seen()
pid = os.fork()
if pid == 0:
    status = 1
    try:
{use}
        status = 0
    except BaseException:
        traceback.print_exc()
    os._exit(status)
status = os.waitpid(pid, 0)[1]
print(json.dumps([before, after, status]), flush=True)
os._exit(0)  # what some libraries do at exit waits for a server
"""


@dataclass(frozen=True)
class Case:
    """A library in a process that forks.

    Attributes:
        name: As in the table.
        needs: The module that has to be installed.
        setup: Makes it and uses it, in the parent.
        use: Uses it, in the child.
        cure: The remedy, in the parent.
        leaves: Kinds of hazards that remain.
    """

    name: str
    needs: str
    setup: str
    use: str
    cure: str = ""
    leaves: frozenset[str] = frozenset()


def run(case: Case, url: str = "") -> Any:
    """What the program prints."""
    with contextlib.suppress(ModuleNotFoundError):  # of the package around it
        if importlib.util.find_spec(case.needs) is not None:
            use = "\n".join(" " * 8 + line for line in case.use.strip().splitlines())
            program = PROGRAM.format(url=url, name=case.name, setup=case.setup, cure=case.cure, use=use)
            return run_python(program, 150)
    pytest.skip(f"needs {case.needs}")


class Sink:
    """A server that takes whatever a library reports."""

    def __init__(self) -> None:
        bodies: list[bytes] = []
        self.bodies = bodies

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept

            def do_POST(self) -> None:
                bodies.append(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def has(self, text: str) -> bool:
        """Whether a report contains it."""
        return any(text.encode() in body for body in self.bodies)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def sink() -> Iterator[Sink]:
    """A server for reports."""
    made = Sink()
    yield made
    made.close()


#: What it reports in the parent starts the thread, and opens the connection.
REPORTERS = (
    Case(
        "OpenTelemetry",
        "opentelemetry.exporter.otlp.proto.http",
        setup="""
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(URL, compression=Compression.NoCompression)))

def report(text):
    provider.get_tracer("test").start_span(text).end()
    provider.force_flush()

report("of the parent")
""",
        use='report("of the child")',
    ),
    Case(
        "Sentry",
        "sentry_sdk",
        setup="""
import sentry_sdk

# Without compression; a report of the child's is not taken for a repetition of the parent's.
sentry_sdk.init(URL.replace("://", "://key@") + "/1", _experiments={"transport_compression_level": 0})

def report(text):
    sentry_sdk.capture_message(text)
    sentry_sdk.flush()

report("of the parent")
""",
        use='report("of the child")',
    ),
    Case(
        "PostHog",
        "posthog",
        setup="""
from posthog import Posthog

client = Posthog("key", host=URL, flush_interval=0.1)

def report(text):
    client.capture(text, distinct_id="somebody")
    client.flush()

report("of the parent")
""",
        use='report("of the child")',
    ),
    Case(
        "Langfuse",
        "langfuse",
        setup="""
from langfuse import Langfuse

client = Langfuse(public_key="public", secret_key="secret", base_url=URL, flush_interval=0.1)

def report(text):
    client.create_score(name=text, value=1, trace_id="a" * 32)
    client.flush()

report("of the parent")
""",
        use='report("of the child")',
    ),
)


@pytest.mark.parametrize("case", REPORTERS, ids=lambda case: case.name)
def test_a_library_that_starts_its_thread_again_needs_nothing(case: Case, sink: Sink) -> None:
    """Its thread counts as repaired, and a forked child reports without any help."""
    before, _, status = run(case, sink.url)
    assert ["fixed"] == sorted({severity for kind, severity, _ in before if kind == "python thread"})
    assert 0 == status
    wait_until(lambda: sink.has("of the child"), "the child's report")


@pytest.mark.parametrize("case", [case for case in REPORTERS if case.name in ("OpenTelemetry", "Sentry")],
                         ids=lambda case: case.name)  # fmt: skip
def test_what_has_reported_nothing_shares_no_connection(case: Case, sink: Sink) -> None:
    """Its connection is named in the parent that has reported; where only the workers report, each has its own."""
    before, _, _ = run(case, sink.url)
    assert "connection" in [kind for kind, _, _ in before]
    silent = Case(case.name, case.needs, case.setup.replace('\nreport("of the parent")', ""), case.use)
    before, _, status = run(silent, sink.url)
    assert "connection" not in [kind for kind, _, _ in before]
    assert 0 == status
    wait_until(lambda: sink.has("of the child"), "the child's report")


#: Each has a remedy in the parent.
CURED = (
    Case(
        "tqdm",
        "tqdm",
        setup="""
import io
import tqdm

def bar():
    return sum(tqdm.tqdm(range(3), file=io.StringIO()))

bar()
""",
        cure="""
tqdm.tqdm.monitor.exit()
tqdm.tqdm.monitor_interval = 0
bar()
""",
        use="assert bar() == 3",
    ),
    Case(
        "prometheus_client",
        "prometheus_client",
        setup="""
import urllib.request
from prometheus_client import start_http_server

server, thread = start_http_server(0, "127.0.0.1")
""",
        cure="server.shutdown(); server.server_close(); thread.join()",
        use="""
mine, _ = start_http_server(0, "127.0.0.1")
assert b"python_info" in urllib.request.urlopen(f"http://127.0.0.1:{mine.server_port}").read()
""",
    ),
    Case(
        "gRPC",
        "grpc",
        setup="""
from concurrent import futures
import grpc

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

executor = futures.ThreadPoolExecutor(2)

def serve(executor):
    server = grpc.server(executor, handlers=[Echo()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, grpc.insecure_channel(f"127.0.0.1:{port}")

server, channel = serve(executor)
assert channel.unary_unary("/a/b")(b"1", timeout=30) == b"1"
""",
        cure="""
channel.close()
server.stop(None).wait()
executor.shutdown()
while threading.active_count() > 1:
    time.sleep(0.01)
""",
        use='assert serve(futures.ThreadPoolExecutor(2))[1].unary_unary("/a/b")(b"2", timeout=30) == b"2"',
        leaves=frozenset({"event queue"}),  # of the library, and used by none
    ),
    Case(
        "a DataLoader or multiprocessing.Queue",
        "torch",
        setup="""
import gc
from torch.utils.data import DataLoader

def make():
    return DataLoader(list(range(6)), num_workers=1, persistent_workers=True)

loader = make()
assert len(list(loader)) == 6
""",
        cure="""
del loader
gc.collect()
while threading.active_count() > 1:
    time.sleep(0.01)
""",
        use="assert len(list(make())) == 6",
    ),
    Case(
        "ThreadPoolExecutor",
        "concurrent.futures",
        setup="""
from concurrent.futures import ThreadPoolExecutor

executor = ThreadPoolExecutor(2)
executor.submit(int).result()
""",
        cure="executor.shutdown()",
        use="assert ThreadPoolExecutor(2).submit(int).result(30) == 0",
    ),
    Case(
        "SQLAlchemy",
        "sqlalchemy",
        setup="""
import sqlite3
import sqlalchemy

class Connection(sqlite3.Connection):
    "Of a database behind a socket."

    def __init__(self):
        super().__init__(":memory:")
        self.socket = socket.create_connection(URL.removeprefix("http://").split(":"))

    def close(self):
        self.socket.close()
        super().close()

engine = sqlalchemy.create_engine("sqlite://", creator=Connection, poolclass=sqlalchemy.QueuePool)

def ask():
    with engine.connect() as connection:
        return connection.execute(sqlalchemy.text("select 1")).scalar()

ask()
""",
        cure="engine.dispose()",
        use="assert ask() == 1",
    ),
    Case(
        "aiohttp",
        "aiohttp",
        setup="""
import asyncio
import aiohttp

async def begin():
    session = aiohttp.ClientSession()
    return session, await ask(session)

async def ask(session):
    async with session.post(URL, data=b"text") as answer:
        return answer.status

async def alone():
    async with aiohttp.ClientSession() as session:
        return await ask(session)

loop = asyncio.new_event_loop()
session, status = loop.run_until_complete(begin())
assert status == 200
""",
        cure="loop.run_until_complete(session.close()); loop.close()",
        use="assert asyncio.run(alone()) == 200",
    ),
)


@pytest.mark.parametrize("case", CURED, ids=lambda case: case.name)
def test_a_remedy_leaves_nothing_behind(case: Case, sink: Sink) -> None:
    """It is seen with its library's name, the remedy that is named ends it, and a forked worker can use the library."""
    before, after, status = run(case, sink.url)
    assert before
    assert {"warning"} == {severity for _, severity, _ in before}
    assert (case.leaves, 0) == ({kind for kind, _, _ in after}, status)


GATE = """
import io, json, os, threading, warnings
import tqdm.auto
from modelguard import guard, prefork

def names():
    return [thread.name for thread in threading.enumerate() if thread.name == "tqdm_monitor"]

def bar():
    return sum(tqdm.auto.tqdm(range(3), file=io.StringIO()))

class Model(dict):
    pass

bar()
model = guard(Model, reload_on=None, name="m")
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    report = prefork.prepare(model, on_hazard={on_hazard!r})
left = names()
pid = os.fork()
if pid == 0:
    os._exit(bar())
status = os.waitpid(pid, 0)[1]
bar()
texts = [str(hazard) for hazard in report.hazards if hazard.owner == "tqdm"]
print(json.dumps([texts, [str(one.message) for one in warned if "tqdm" in str(one.message)], left, status, names()]))
"""


def test_the_gate_ends_what_starts_again_and_says_so() -> None:
    """`prepare` ends tqdm's monitor without a warning; bars go on in workers and in the parent, with a new monitor."""
    pytest.importorskip("tqdm")
    (text,), warned, left, status, again = run_python(GATE.format(on_hazard="fix"), 100)
    assert text.startswith("fixed: python thread of tqdm: thread 'tqdm_monitor' was running. Ended.")
    assert ([], [], 3 << 8, ["tqdm_monitor"]) == (warned, left, status, again)


def test_a_gate_that_only_warns_ends_nothing() -> None:
    """With `on_hazard="warn"` the monitor goes on, and the warning has the remedy."""
    pytest.importorskip("tqdm")
    (text,), warned, left, _, _ = run_python(GATE.format(on_hazard="warn"), 100)
    assert [text] == warned
    assert "tqdm.tqdm.monitor_interval = 0" in text
    assert ["tqdm_monitor"] == left
