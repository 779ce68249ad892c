"""A batched function behind a real Gradio application, asked by its own client over HTTP."""

from __future__ import annotations

import importlib.util

import pytest
from tests.process.harness import run_python

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="needs gradio"),
    pytest.mark.timeout(240),
]

#: An application whose model computes while ``go`` is set. Tests add what they ask it.
PROGRAM = """
    import json, threading, time
    import gradio
    from gradio_client import Client
    from modelguard import batched, guard

    go, computed = threading.Event(), []

    class Model:
        def __call__(self, texts):
            computed.append(texts)
            assert go.wait(60)
            return [len(text.split()) for text in texts]

    nlp = guard(Model, reload_on=None, name="nlp")

    @batched(max_size=32)
    @nlp
    def count(model, texts):
        return model(texts)

    async def words(text):
        return await count.aio(text)

    def until(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def launch(**options):
        demo = gradio.Interface(words, "text", "number", api_name="count", **options)
        return demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)[1]

    def ask(client, text):
        return client.submit(text, api_name="/count")
"""
ENVIRONMENT = {"GRADIO_ANALYTICS_ENABLED": "False"}


def test_calls_share_batches_only_with_a_concurrency_limit() -> None:
    """By default Gradio runs one call of a function at a time; with a limit, those that wait become one batch."""
    done = run_python(
        PROGRAM
        + """
    found = {}
    for name, options in (("default", {}), ("limit", {"concurrency_limit": 64})):
        go.clear()
        del computed[:]
        client = Client(launch(**options), verbose=False)
        jobs = [ask(client, "two words") for _ in range(9)]
        until(lambda: computed)
        if options:
            until(lambda: count.status().waiting == 9 - len(computed[0]))
        go.set()
        assert {2} == {job.result(60) for job in jobs}
        found[name] = [len(batch) for batch in computed]
    print(json.dumps(found), flush=True)
    import os
    os._exit(0)
    """,
        200,
        **ENVIRONMENT,
    )
    assert [1] * 9 == done["default"]
    assert 9 == sum(done["limit"])
    assert len(done["limit"]) <= 2


def test_what_a_client_has_cancelled_is_not_computed() -> None:
    """A client that cancels frees its place in the queue, and others get their answers."""
    done = run_python(
        PROGRAM
        + """
    url = launch(concurrency_limit=64)
    stays, leaves = Client(url, verbose=False), Client(url, verbose=False)
    first = ask(stays, "the first")
    until(lambda: computed)
    second = ask(leaves, "the second")
    until(lambda: count.status().waiting == 1)
    second.cancel()
    until(lambda: count.status().waiting == 0)
    go.set()
    print(json.dumps([first.result(60), computed]), flush=True)
    import os
    os._exit(0)
    """,
        200,
        **ENVIRONMENT,
    )
    assert [2, [["the first"]]] == done
