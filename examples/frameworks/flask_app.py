"""Flask: a whole program that checks itself. docs/frameworks.md explains it."""

from flask import Flask

from modelguard import batched, guard
from modelguard.frameworks import wsgi


class Model:
    """Stands for a real model."""

    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]


nlp = guard(Model, reload_on=None, name="nlp")


@batched(max_size=32)
@nlp
def count(model: Model, texts: list[str]) -> list[int]:
    return model(texts)


def create_app() -> Flask:
    app = Flask(__name__)
    wsgi.install(app, deadline="2s")

    @app.get("/count/<text>")
    def get_count(text: str) -> str:
        return str(count(text))

    return app


client = create_app().test_client()
assert client.get("/readyz").status_code == 503
nlp.load()
assert client.get("/readyz").status_code == 200
assert client.get("/count/two words").text == "2"
assert client.get("/count/two words", headers={"Request-Timeout": "0"}).status_code == 504

with nlp, count:  # a test that closes what it has used
    assert create_app().test_client().get("/count/two words").text == "2"
closed = client.get("/count/two words")
assert (closed.status_code, "retry-after" in closed.headers) == (503, True)
