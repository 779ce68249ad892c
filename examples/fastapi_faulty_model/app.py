"""A FastAPI service around a model that leaks, hangs and crashes. To start it here: uvicorn app:app"""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from model import Model

from modelguard import TTL, MemoryGrowth, guard, isolate, telemetry
from modelguard.errors import DeadlineExceeded, ModelGuardError, WorkerCrashed

STATUS: dict[type[ModelGuardError], int] = {WorkerCrashed: 500, DeadlineExceeded: 504}


@isolate(workers=2, timeout="1s")  # a call that hangs is killed after a second, and one that crashes ends its worker
@guard(Model, reload_on=MemoryGrowth("100 MB") | TTL("30s"), name="model")
def measure(model: Model, text: str) -> int:
    return model(text)


counts: Counter[str] = Counter()


def count(event: telemetry.Event) -> None:
    if isinstance(event, telemetry.WorkerEnded):
        counts[f"workers {event.cause}"] += 1


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    remove = telemetry.add_hook(count)
    async with measure:  # starts the processes here, ends them at shutdown
        yield
    remove()


app = FastAPI(lifespan=lifespan)


@app.exception_handler(ModelGuardError)
def failed(_: Request, error: ModelGuardError) -> JSONResponse:
    """Each failure has a name; all others of the service would be a 500 without one."""
    return JSONResponse({"error": type(error).__name__}, STATUS.get(type(error), 503))


@app.post("/")
async def homepage(request: Request) -> int:
    found = await measure.aio((await request.body()).decode())
    counts["answered"] += 1
    return found


@app.get("/status")
def status() -> dict[str, Any]:
    return {**counts, "status": asdict(measure.status())}
