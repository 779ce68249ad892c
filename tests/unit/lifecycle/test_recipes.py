"""The programs of examples/sources against the real thing: what they make by hand is what libraries make."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import pytest
from tests.unit.lifecycle.recipes import definitions
from tests.unit.lifecycle.sources import errors, polls

from modelguard import Changed, Loaded

if TYPE_CHECKING:
    from tests.unit.lifecycle.world import World


def test_the_cache_of_the_program_is_that_of_hugging_face(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library finds the revisions where the program puts them, before and after a new one is published."""
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    tmp_path = tmp_path / "hub"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    page = definitions("hugging_face_cache", "cache", "publish", "revision", "load_snapshot")
    first, second = "1" * 40, "2" * 40

    def newest() -> str:
        return Path(hub.snapshot_download("example/nlp", cache_dir=tmp_path, local_files_only=True)).name

    page["publish"](first, b"one")
    guard = world.guard(page["load_snapshot"], reload_on=Changed(page["revision"]), defer=0)
    guard.load()
    assert first == guard.version == newest()
    page["publish"](second, b"two")
    polls(world, guard, 2)
    assert second == guard.version == newest()
    found = hub.scan_cache_dir(tmp_path)
    assert [] == found.warnings
    assert {first, second} == {revision.commit_hash for repo in found.repos for revision in repo.revisions}


class Server(BaseHTTPRequestHandler):
    """A server that can hang, fail, and leave the ETag out."""

    content = b"one"
    status = 200
    etag = True
    open = threading.Event()

    def do_HEAD(self) -> None:
        type(self).open.wait(20)
        self.send_response(self.status)
        if self.etag:
            self.send_header("ETag", f'"{self.content.decode()}"')
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.content)

    def log_message(self, *args: object) -> None:
        """Stay silent."""


@contextmanager
def serving() -> Iterator[tuple[type[Server], str]]:
    """A real server for the block."""
    handler = type("Handler", (Server,), {"open": threading.Event()})
    handler.open.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield handler, f"http://127.0.0.1:{server.server_port}/nlp.bin"
    finally:
        handler.open.set()
        server.shutdown()
        thread.join()
        server.server_close()


# An HTTPError is a response, and nobody closes the one that the event carries: Python 3.15 warns of that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_fails_hangs_and_recovers(world: World) -> None:
    """No model is lost or loaded for nothing, and in the end the newest version serves."""
    with serving() as (server, url):

        def etag() -> str | None:
            with urlopen(Request(url, method="HEAD"), timeout=20) as answer:
                return answer.headers["ETag"]

        def load() -> Loaded[bytearray]:
            with urlopen(url, timeout=20) as answer:
                return Loaded(bytearray(answer.read()), version=answer.headers["ETag"])

        guard = world.guard(load, reload_on=Changed(etag), keep_previous=True, defer=0)
        guard.load()
        server.status = 503
        assert 1 == polls(world, guard, 3)
        server.status, server.etag = 200, False
        assert 1 == polls(world, guard, 3)
        server.etag = True
        assert ["HTTPError", "TypeError"] == [error.partition(":")[0] for error in errors(world)]
        server.open.clear()  # it hangs
        for _ in range(10):
            world.tick(60)
            guard.check()
        assert 1 == guard.status().generation
        server.content = b"two"
        server.open.set()
        world.join()
        assert 2 == polls(world, guard, 3)
        assert '"two"' == guard.version
        guard.rollback()
        assert 1 == polls(world, guard, 20), "the version that was rolled back is not loaded again"
        server.content = b"three"
        assert 3 == polls(world, guard, 4), "four equal answers, because the first model did not last"
        assert '"three"' == guard.version
        guard.close()
