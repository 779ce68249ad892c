"""A file on an HTTP server, by its ETag: a program that checks itself, for docs/recipes.md."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.request import Request, urlopen

from stand_ins import Model, wait_until

from modelguard import Changed, Loaded, Swap, guard


class Files(BaseHTTPRequestHandler):
    """A server of files with ETags, as nginx or a bucket is one."""

    content: ClassVar[dict[str, bytes]] = {"/nlp.bin": b"the first"}

    def do_HEAD(self) -> None:
        body = self.content[self.path]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()[:16]}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(self.content[self.path])

    def log_message(self, *args: object) -> None:
        """Stay silent."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/nlp.bin"


def load() -> Loaded[Model]:
    with urlopen(url, timeout=60) as answer:
        return Loaded(Model(answer.read()), version=answer.headers["ETag"])


def etag() -> str | None:
    with urlopen(Request(url, method="HEAD"), timeout=5) as answer:
        return answer.headers["ETag"]


nlp = guard(load, reload_on=Changed(etag, every="200ms"), swap=Swap(defer=0), name="nlp")


@nlp
def say(model: Model, text: str) -> str:
    return model(text)


with nlp:
    assert say("hello") == "hello, said the first"
    first = nlp.version
    Files.content["/nlp.bin"] = b"the second"
    wait_until(lambda: nlp.version != first)
    assert say("hello") == "hello, said the second"
server.shutdown()
server.server_close()
