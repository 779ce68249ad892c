"""A web service whose model comes from a source, by the functions of its program in examples/sources.

``SOURCE`` names the program, ``URL`` is where the source is. ``GET /`` answers with its process and the model's words.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request  # noqa: TC002 - a service's annotations stay readable
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from tests.unit.lifecycle.recipes import definitions

from modelguard import Changed, Loaded, Swap, guard, telemetry

SOURCE, URL = os.environ["SOURCE"], os.environ["URL"]

#: The loader and the probe of each recipe.
RECIPES = {
    "http_file": ("load", "etag"),
    "bucket": ("load_object", "object_etag"),
    "mlflow_alias": ("load_champion", "alias"),
    "hugging_face_cache": ("load_snapshot", "revision"),
}


def functions() -> tuple[Callable[[], Loaded[Any]], Callable[[], object]]:
    """The loader and the probe of the recipe; the rest of its program is replaced by ``URL``."""
    load, probe = RECIPES[SOURCE]
    recipe = definitions(SOURCE, load, probe, "alias", "revision", "cache")
    recipe["url"] = URL
    if probe == "object_etag":
        recipe["bucket"] = bucket()
    return recipe[load], recipe[probe]


def bucket() -> Any:
    """A client of the bucket's server."""
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1})
    keys = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}
    return boto3.client("s3", config=config, endpoint_url=URL, **keys)


def said(model: Any) -> str:
    """What a model says: the text that was published."""
    answer = model.predict(["hello"])[0] if hasattr(model, "predict") else model("hello")
    return str(answer).rpartition(" ")[2]


def canary(new: Any, old: Any | None) -> bool:
    """Reject a model whose answer is much longer than that of the model that takes calls."""
    return old is None or len(said(new)) <= len(said(old)) + 8


asked: Counter[str] = Counter()
errors: list[str] = []
causes: Counter[str] = Counter()


def record(event: telemetry.Event) -> None:
    match event:
        case telemetry.CallbackErrored(callback="probe"):
            errors.append(event.error)
        case telemetry.LoadDiscarded():
            causes[event.cause] += 1
        case telemetry.RolledBack():
            causes["rolled back"] += 1


telemetry.set_hooks([record])
load, ask = functions()


def probe() -> object:
    asked["begun"] += 1
    answer = ask()
    asked["ended"] += 1
    return answer


nlp = guard(
    load,
    reload_on=Changed(probe, every="100ms", timeout="2s"),
    validate=canary,
    swap=Swap(keep_previous=True, defer=0),
    name="nlp",
)


@nlp
def answer(model: Any) -> str:
    return said(model)


def get(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{os.getpid()} {answer()}")


def rollback(request: Request) -> PlainTextResponse:
    nlp.rollback()
    return get(request)


def status(request: Request) -> JSONResponse:
    now = nlp.status()
    figures = {"generation": now.generation, "version": now.version, "pinned": now.pinned, "in_flight": now.in_flight}
    return JSONResponse({**figures, **asked, "errors": errors, **causes})


nlp.load()
app = Starlette(routes=[Route("/", get), Route("/status", status), Route("/rollback", rollback, methods=["POST"])])
