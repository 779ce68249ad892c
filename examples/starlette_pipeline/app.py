"""The same service with bounds: a queue that refuses, deadlines, and a batch that pads little.

To start it here: uvicorn app:app
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

from minilm import load, pooled
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from modelguard import guard
from modelguard.adapters.transformers import batched_pipeline
from modelguard.frameworks.asgi import ModelGuardMiddleware

nlp = guard(load, reload_on=None, name="minilm")
embed = batched_pipeline(nlp, max_size=16, max_queue=128, call={"return_tensors": True, "truncation": True})


async def homepage(request: Request) -> JSONResponse:
    text = (await request.body()).decode()
    return JSONResponse(pooled(await embed.aio(text)))


async def status(_: Request) -> JSONResponse:
    return JSONResponse(asdict(embed.status()))


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    async with nlp, embed:  # the model is loaded here; at shutdown what waits is answered, and then the model goes
        yield


app = Starlette(
    routes=[Route("/", homepage, methods=["POST"]), Route("/status", status)],
    middleware=[Middleware(ModelGuardMiddleware, deadline="1s")],  # 503 when refused, 504 when late; /livez, /readyz
    lifespan=lifespan,
)
