"""Real sources of models on this machine, and a way to have them hang and fail: a proxy in front of each."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Protocol

import pytest
from examples._driver import free_port
from tests.process.harness import Server
from tests.unit.lifecycle.recipes import definitions

#: What the versions say. The canary rejects the third one.
WEIGHTS = ("good-1", "good-2", "bad-and-much-too-long", "good-4", "good-5")

#: The largest piece that the proxy passes on at once, in bytes.
PIECE = 65_536


class Source(Protocol):
    """Where a service gets its model.

    Attributes:
        url: Where the server is, "" for a folder.
        environment: Variables that the client needs.
    """

    url: str
    environment: Mapping[str, str]

    def publish(self, weights: str) -> None:
        """Make a model of :data:`WEIGHTS` the current one."""


class HttpFiles:
    """The server of the program itself."""

    def __init__(self, folder: Path) -> None:
        self._files = definitions("http_file", "Files")["Files"]
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._files)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/nlp.bin"
        self.environment: Mapping[str, str] = {}

    def publish(self, weights: str) -> None:
        self._files.content["/nlp.bin"] = weights.encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class CacheFolder:
    """A folder in the layout of the Hugging Face cache."""

    def __init__(self, folder: Path) -> None:
        self._cache = folder / "models--example--nlp"
        self.url = ""
        self.environment: Mapping[str, str] = {}

    def publish(self, weights: str) -> None:
        if not (self._cache / "snapshots" / weights).exists():
            recipe = definitions("hugging_face_cache", "publish")
            recipe["cache"] = self._cache
            recipe["publish"](weights, weights.encode())
            return
        new = self._cache / "refs" / "main.new"
        new.write_text(weights)
        new.replace(self._cache / "refs" / "main")

    def close(self) -> None:
        """There is no server."""


class Bucket:
    """moto's S3-compatible server."""

    def __init__(self, folder: Path) -> None:
        for module in ("moto", "flask_cors"):
            pytest.importorskip(module, reason="needs moto[s3], flask-cors and boto3")
        boto3 = pytest.importorskip("boto3", reason="needs boto3")
        self._server = Server(folder, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0")
        self._server.wait_until_serving("/moto-api/")
        self.url = self._server.url
        self.environment: Mapping[str, str] = {}
        keys = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}
        self._bucket = boto3.client("s3", endpoint_url=self.url, **keys)
        self._bucket.create_bucket(Bucket="models")

    def publish(self, weights: str) -> None:
        self._bucket.put_object(Bucket="models", Key="nlp.bin", Body=weights.encode())

    def close(self) -> None:
        self._bucket.close()
        self._server.kill()


#: Registers a version of a model for each argument after the first one, which is the server's URL.
REGISTER = """
import sys
from pathlib import Path

import mlflow

mlflow.set_tracking_uri(sys.argv[1])
for weights in sys.argv[2:]:
    Path("weights.txt").write_text(weights)
    mlflow.pyfunc.log_model(
        name="nlp",
        python_model="said.py",
        artifacts={"weights": "weights.txt"},
        registered_model_name="nlp",
        pip_requirements=[],
    )
"""


class Registry:
    """MLflow's server with a SQLite database; publishing moves the alias."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("sqlalchemy", reason="needs mlflow")
        pytest.importorskip("alembic", reason="needs mlflow")
        where = [f"--backend-store-uri=sqlite:///{folder / 'registry.db'}", f"--artifacts-destination={folder}"]
        port = free_port()
        command = ["-m", "mlflow", "server", *where, "--host=127.0.0.1", f"--port={port}", "--workers=1"]
        self._server = Server(folder, *command, environment={"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})
        self._server.wait_until_serving("/health")
        self.url = self._server.url
        self.environment: Mapping[str, str] = {
            "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        }
        (folder / "said.py").write_text(definitions("mlflow_alias", "SAID")["SAID"])
        command = [sys.executable, "-c", REGISTER, self.url, *WEIGHTS]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=180)
        assert 0 == done.returncode, done.stderr

    def publish(self, weights: str) -> None:
        body = {"name": "nlp", "alias": "champion", "version": str(WEIGHTS.index(weights) + 1)}
        path, headers = "/api/2.0/mlflow/registered-models/alias", {"Content-Type": "application/json"}
        assert 200 == self._server.ask(path, json.dumps(body), headers=headers).status

    def close(self) -> None:
        self._server.kill()


class Proxy:
    """Passes connections on to a server, keeps what they send, or hangs them up.

    Attributes:
        mode: What it does with connections, also with those that are open already.
    """

    def __init__(self, port: int) -> None:
        self.mode: Literal["pass", "hang", "refuse"] = "pass"
        self._to = port
        self._open = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._open = False
        for thread in self._threads:
            thread.join(30)
        self._listener.close()

    def _accept(self) -> None:
        while self._open:
            if select.select([self._listener], [], [], 0.05)[0]:
                client, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to)) as server:
            while self._open and self.mode != "refuse":
                for side in select.select([client, server], [], [], 0.05)[0]:
                    piece = self._receive(side)
                    if not piece:
                        return
                    (server if side is client else client).sendall(piece)

    def _receive(self, side: socket.socket) -> bytes:
        """What one side has sent, once it may pass; nothing if the connection is to end."""
        while self.mode == "hang" and self._open:
            threading.Event().wait(0.02)
        return side.recv(PIECE) if self.mode == "pass" else b""


@contextlib.contextmanager
def proxied(url: str) -> Iterator[tuple[Proxy, str]]:
    """A proxy in front of the server of a URL, and the URL to ask instead."""
    port = http.client.HTTPConnection(url.split("/")[2]).port
    proxy = Proxy(port)
    try:
        yield proxy, url.replace(str(port), str(proxy.port))
    finally:
        proxy.close()


KINDS: dict[str, Any] = {
    "http_file": HttpFiles,
    "bucket": Bucket,
    "mlflow_alias": Registry,
    "hugging_face_cache": CacheFolder,
}


def root() -> str:
    """The folder of the project, for services that import its tests."""
    return os.fspath(Path(__file__).parents[2])
