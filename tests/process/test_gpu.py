"""The GPU lines, on a real GPU: each script in a process of its own, which alone initialises CUDA.

Without an NVIDIA device or a torch with CUDA everything here is skipped. Each script is one line of docs/gpu.md.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA device"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]

START = """
import json, os, time
import torch
from modelguard import GpuMemoryGrowth, GpuMemoryLimit, batched, errors, guard, prefork, presets, telemetry

if torch.version.cuda is None:
    print(json.dumps("this torch was built without CUDA"))
    raise SystemExit

events = []
telemetry.add_hook(events.append)

def last(kind):
    return [event for event in events if type(event).__name__ == kind][-1]

def load():
    return torch.nn.Linear(8192, 8192, device="cuda")  # 268 MB

def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)

def only(size):  # bytes of the GPU, for this process
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size / total)
"""

RELEASE = """
model = guard(load, reload_on=GpuMemoryLimit("50%"))
model(lambda net: net(torch.zeros(512, 8192, device="cuda")).sum().item())()
status = model.status()
model.unload()
event = last("GenerationReleased")
print(json.dumps([status.gpu_allocated, event.gpu_reserved_before, event.gpu_reserved_after, event.gpu_allocated]))
"""

SECOND_COPY = """
only(600_000_000)
model = guard(load, reload_on=None)
model.load()
model.reload()
first = last("SwapChosen")
only(2_000_000_000)
model.reload()
until(lambda: model.status().gpu_allocated < 300_000_000)
status = model.status()
print(json.dumps([first.swap, first.why, last("SwapChosen").swap, status.generation, status.gpu_allocated]))
"""

HALVES = """
from concurrent.futures import ThreadPoolExecutor

torch.zeros(1, device="cuda")
only(1_000_000_000)
sizes = []

@batched(max_size=8, max_wait="1s")
def encode(items):
    sizes.append(len(items))
    taken = torch.empty(len(items) * 150_000_000, dtype=torch.uint8, device="cuda")
    return [item + 1 for item in items]

with ThreadPoolExecutor(8) as threads:
    print(json.dumps([list(threads.map(encode, range(8))), sizes, torch.cuda.memory_allocated()]))
"""

CACHE = """
only(2_000_000_000)
model = guard(load, reload_on=GpuMemoryLimit("50%"))

@model
def fill(net, size):
    return torch.empty(size, dtype=torch.uint8, device="cuda").numel()

fill(1_200_000_000)
until(lambda: fill(1) and any(type(event).__name__ == "GpuCacheEmptied" for event in events))
event = last("GpuCacheEmptied")
print(json.dumps([event.reserved_before, event.reserved_after, model.status().generation]))
"""

CAPTURE = """
import threading

static = torch.zeros(64, 1024, device="cuda")
net = torch.nn.Linear(1024, 1024, device="cuda")
side = torch.cuda.Stream()
with torch.cuda.stream(side), torch.inference_mode():
    net(static)
torch.cuda.synchronize()
model = guard(load, reload_on=None)
model.load()
graph = torch.cuda.CUDAGraph()
with torch.inference_mode(), torch.cuda.graph(graph, capture_error_mode=os.environ["CAPTURE_MODE"]):
    answer = net(static)
    if os.environ["CAPTURE_MODE"] == "global":
        other = threading.Thread(target=model.unload)
        other.start()
        other.join()
    else:
        model.unload()
static.fill_(1.0)
graph.replay()
torch.cuda.synchronize()
with torch.inference_mode():
    print(json.dumps([torch.allclose(answer, net(static), atol=1e-3), last("GenerationReleased").gpu_allocated]))
"""

SPAWNED = """
import subprocess, sys
from modelguard import isolate

def used():
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[0])

@isolate(target="gpu_functions:apply", start="spawn", workers=1, timeout="60s")
def apply(rows: int) -> float: ...

@isolate(target="gpu_functions:apply", workers=1, timeout="60s")
def forked(rows: int) -> float: ...

before = used()
answer, loaded = apply(4), used()
apply.reload()
again = apply(4)
apply.close()
until(lambda: used() < before + 100)
try:
    forked.load()
except errors.ModelGuardError as error:
    named = [type(error).__name__, str(error), repr(error.__cause__)]
forked.close()
print(json.dumps([answer == again, loaded - before, torch.cuda.is_initialized(), named]))
"""

OUT_OF_MEMORY = """
model = guard(load, reload_on=None, retry=True)
runs = []

@model
def fill(net):
    runs.append(torch.cuda.memory_allocated())
    half = torch.empty(int(torch.cuda.mem_get_info()[1] * 0.6), dtype=torch.uint8, device="cuda")
    if len(runs) != 2:
        return torch.empty_like(half).numel()
    return "done"

print(json.dumps([fill(), runs, model.status().gpu_allocated]))
try:
    fill()
except torch.OutOfMemoryError as error:
    print(json.dumps([model.status().gpu_allocated, error.__traceback__ is not None]))
"""

GROWTH = """
model = guard(load, reload_on=GpuMemoryGrowth("500 MB"))
kept = []

@model
def leak(net):
    kept.append(torch.zeros(50_000_000, dtype=torch.uint8, device="cuda"))

for _ in range(10):
    leak()
time.sleep(6)
def grown():
    leak()
    return model.status().generation == 2
until(grown)
print(json.dumps(str(last("ReloadDue").reasons[0])))
"""

FORK = """
model = guard(load, reload_on=None)
model.load()
pid = os.fork()
if pid == 0:
    for use in (lambda net: torch.zeros(1, device="cuda"), lambda net: (net.weight + 1).sum().item()):
        try:
            model(use)()
        except errors.CudaAfterFork as error:
            print(json.dumps("named"), flush=True)
        except RuntimeError as error:
            print(json.dumps(f"{type(error).__name__}: {error}"), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
try:
    prefork.prepare(model)
except errors.ForkUnsafe as error:
    print(json.dumps("refused" if "CUDA" in str(error) else str(error)))
"""

PRESET = """
preset = presets.get("torch-cuda-dynamic")
before = {one.knob.name: one.state for one in preset.apply()}
blocks = [torch.zeros(size * 1_000_000, dtype=torch.uint8, device="cuda") for size in (3, 30, 300)]
torch.nn.functional.conv1d(torch.zeros(1, 4, 100, device="cuda"), torch.zeros(4, 4, 3, device="cuda"))
after = {one.knob.name: [one.state, one.evidence] for one in preset.apply()}
segments = {segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()}
late = {one.knob.name: one.state for one in presets.get("torch-cuda-latency").apply({})}
shown = hasattr(torch._C, "_accelerator_getAllocatorSettings")  # torch 2.13 has it
print(json.dumps([before, after, sorted(map(str, segments)), late, shown]))
"""

OTHER_CALLS = """
import asyncio

model = guard(load, reload_on=None, retry=True)
runs = []

def fill():
    half = torch.empty(int(torch.cuda.mem_get_info()[1] * 0.6), dtype=torch.uint8, device="cuda")
    return torch.empty_like(half).numel()

@model
async def wait(net):
    await asyncio.sleep(0)
    runs.append(torch.cuda.memory_allocated())
    return fill() if len(runs) == 1 else "done"

@model
def stream(net):
    yield 1
    yield fill()

def lease():
    with model.lease():
        fill()

held = []
for use in (lambda: list(stream()), lease):
    try:
        use()
    except torch.OutOfMemoryError as error:
        held.append(model.status().gpu_allocated)
print(json.dumps([asyncio.run(wait()), runs, held]))
"""

COMPILED = """
def compiled():
    net = torch.compile(load(), mode="reduce-overhead")
    with torch.inference_mode():
        for _ in range(4):
            net(torch.zeros(512, 8192, device="cuda"))
    return net

model = guard(compiled, reload_on=None)

@model
def call(net):
    with torch.inference_mode():
        return net(torch.ones(512, 8192, device="cuda")).sum().item()

for _ in range(3):
    call()
    model.reload()
    until(lambda: model.status().gpu_allocated < 300_000_000)
call()
model.unload()
event = last("GenerationReleased")
print(json.dumps([event.gpu_allocated, event.gpu_reserved_after, event.alive]))
"""

POISONED = """
from modelguard import Errors

model = guard(load, reload_on=Errors(1) | GpuMemoryLimit("80%"))

@model
def broken(net):
    return torch.zeros(4, device="cuda")[torch.tensor([10], device="cuda")].sum().item()

names = []
for _ in range(2):
    try:
        broken()
    except RuntimeError as error:
        names.append(str(error).splitlines()[0])
until(lambda: model.status().failures > 0)
status = model.status()
model.close()
print(json.dumps([names, status.state, status.generation]))
"""

POISONED_WORKER = """
from modelguard import errors, isolate

@isolate(target="gpu_functions:index", start="spawn", workers=1, timeout="60s")
def index(number: int) -> float: ...

def answer(number):
    try:
        return index(number)
    except errors.RemoteError as error:
        return str(error)

answers = [answer(-1), answer(10)]
until(lambda: answer(0) == 1.0)
status = index.status()
index.close()
print(json.dumps([answers, status.recycled, status.crashed, torch.cuda.is_initialized()]))
"""

LEAKING_WORKER = """
from modelguard import isolate

@isolate(target="gpu_functions:leak", start="spawn", workers=1, timeout="60s")
def leak() -> int: ...

pids = set()
def replaced():
    pids.add(leak())
    return len(pids) > 1
until(replaced)
leak.close()
print(json.dumps(torch.cuda.is_initialized()))
"""

OTHER_MODELS = """
from modelguard import Idle, pool, replicas

def use(net):
    return net(torch.zeros(4, 8192, device="cuda")).sum().item()

models = pool(lambda key: load(), max_memory="100 GB", max_models=1)
for key in "aba":
    with models.lease(key) as net:
        use(net)
net = None
until(lambda: torch.cuda.memory_allocated() < 400_000_000)
models.close()
pair = replicas(guard(load, reload_on=None), 2)
pair(use)()
pair.reload()
both = torch.cuda.memory_allocated()
pair.close()
sleeping = guard(load, reload_on=Idle("1s"))
sleeping(use)()
until(lambda: torch.cuda.memory_reserved() < 100_000_000)
sleeping(use)()
print(json.dumps([both, torch.cuda.memory_allocated()]))
"""

ON_CPU = """
model = guard(lambda: torch.nn.Linear(64, 64), reload_on=None)
model.load()
prefork.prepare(model)
reading, writing = os.pipe()
if os.fork() == 0:
    answer = model(lambda net: net(torch.ones(2, 64)).sum().item())()
    os.write(writing, json.dumps(answer).encode())
    os._exit(0)
os.wait()
print(json.dumps([json.loads(os.read(reading, 100)), torch.cuda.is_initialized()]))
"""

BESIDE_CALLS = """
import threading

model = guard(load, reload_on=None, swap=swap)

@model
def use(net, rows):
    with torch.inference_mode():
        return rows + 0 * net(torch.zeros(rows, 8192, device="cuda")).sum().item()

stop, counts, wrong = threading.Event(), [], []

def work(rows):
    count = 0
    while not stop.is_set():
        try:
            if use(rows) != rows:
                wrong.append(rows)
        except Exception as error:
            wrong.append(repr(error))
        count += 1
    counts.append(count)

threads = [threading.Thread(target=work, args=(rows,)) for rows in range(1, 9)]
for thread in threads:
    thread.start()
held = []
for number in range(40):
    model.reload()
    if number == 20:
        torch.cuda.reset_peak_memory_stats()
    if number >= 20:
        held.append(torch.cuda.memory_allocated())
stop.set()
for thread in threads:
    thread.join()
print(json.dumps([wrong, min(counts), max(held) - min(held), torch.cuda.max_memory_allocated() - min(held)]))
"""

HIDDEN = """
for policy in (GpuMemoryGrowth("1 GB"), GpuMemoryLimit("80%")):
    try:
        guard(lambda: torch.nn.Linear(8, 8), reload_on=policy).load()
    except errors.LoadFailed as error:
        print(json.dumps([type(error.__cause__).__name__, str(error.__cause__)]))
"""


def run(*parts: str, **variables: str) -> list[Any]:
    """Run a script, and return its output, line by line."""
    script = "\n".join((START, *parts))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "TORCH_"))}
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    environment |= {"PYTHONPATH": path, **variables}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert 0 == done.returncode, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.strip()]
    if lines and isinstance(lines[0], str) and "without CUDA" in lines[0]:
        pytest.skip(lines[0])
    return lines


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_is_given_back_at_the_release(allocator: str) -> None:
    """What the model had reserved goes back to the device, whatever allocator torch uses, and the event proves it."""
    ((held, before, after, allocated),) = run(RELEASE, PYTORCH_ALLOC_CONF=allocator)
    assert held >= 268_000_000
    assert after <= before - 268_000_000
    assert allocated < 50_000_000  # cuBLAS keeps a workspace


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_model_is_released_while_a_graph_is_captured(mode: str) -> None:
    """A capture in progress is not broken, by another thread or by its own, and what it has captured is right."""
    ((right, allocated),) = run(CAPTURE, CAPTURE_MODE=mode)
    assert right
    assert allocated < 100_000_000


def test_a_gpu_without_room_for_two_copies_drains_first() -> None:
    """With room for two it loads first; the model is replaced both times."""
    ((first, why, second, generation, allocated),) = run(SECOND_COPY)
    assert ("drain_first", "load_first", 3) == (first, second, generation)
    assert "on GPU 0" in why
    assert allocated < 300_000_000


def test_a_cache_over_the_limit_is_emptied_without_a_reload() -> None:
    """Memory that torch only keeps is returned; the model stays."""
    ((before, after, generation),) = run(CACHE)
    assert before - after >= 1_000_000_000
    assert 1 == generation


def test_a_batch_that_runs_out_of_memory_is_halved() -> None:
    """All its items are answered."""
    ((answers, sizes, allocated),) = run(HALVES)
    assert [*range(1, 9)] == answers
    assert [8, 4, 4] == sizes
    assert allocated < 1_000_000


def test_an_isolated_function_uses_a_gpu_by_spawn() -> None:
    """Its owner never initialises CUDA, all GPU memory is back when it closes, and a fork is refused by name."""
    ((same, taken, initialised, named),) = run(SPAWNED)
    assert (True, False) == (same, initialised)
    assert taken >= 268
    assert "spawn" in named[1], named


def test_a_call_that_ran_out_of_memory_is_repaired() -> None:
    """The second run finds the memory free; without another one nothing stays behind the error."""
    (answer, runs, held), (left, has_lines) = run(OUT_OF_MEMORY)
    assert "done" == answer
    assert runs[1] <= runs[0] + 1_000_000
    assert held < 300_000_000
    assert (True, True) == (left < 300_000_000, has_lines)


def test_growth_replaces_the_model() -> None:
    """Tensors that calls leave behind are growth, as the allocator counts it."""
    assert ["GpuMemoryGrowth('500 MB')"] == run(GROWTH)


def test_a_late_fork_has_a_named_error() -> None:
    """In a child of a process with CUDA, torch's errors become CudaAfterFork."""
    assert ["named", "named", "refused"] == run(FORK)


def test_the_preset_takes_effect() -> None:
    """What the report says is what the allocator does."""
    ((before, after, segments, late, shown),) = run(PRESET)
    assert {"applied"} == {*before.values()}
    assert "True" in segments
    if shown:
        assert "applied" == after["PYTORCH_ALLOC_CONF"][0]
        assert "expandable_segments:True" in after["PYTORCH_ALLOC_CONF"][1]
        assert "too late" == late["PYTORCH_ALLOC_CONF"]
    else:
        assert "does not report them" in after["PYTORCH_ALLOC_CONF"][1]


def test_coroutines_generators_and_leases_are_repaired_too() -> None:
    """A coroutine runs again; what the calls of a stream and of a lease have left behind is freed."""
    ((answer, runs, held),) = run(OTHER_CALLS)
    assert "done" == answer
    assert runs[1] <= runs[0] + 1_000_000
    assert max(held) < 300_000_000


def test_a_compiled_model_with_cuda_graphs_is_released() -> None:
    """What its graphs hold does not keep its weights."""
    ((allocated, reserved, alive),) = run(COMPILED)
    assert allocated < 50_000_000
    assert reserved < 200_000_000
    assert alive is False


def test_a_device_that_has_failed_fails_calls_and_loads_and_no_more() -> None:
    """After an assertion on the device each call has torch's error, and status() and close() work."""
    ((names, state, generation),) = run(POISONED)
    assert all("device-side assert" in name for name in names)
    assert ("degraded", 1) == (state, generation)


def test_a_worker_whose_device_has_failed_is_replaced() -> None:
    """With Errors, an isolated function answers again, from a fresh process."""
    ((answers, recycled, crashed, initialised),) = run(POISONED_WORKER)
    assert "OutOfMemoryError" in answers[0]
    assert "device-side assert" in answers[1]
    assert recycled >= 1
    assert (0, False) == (crashed, initialised)


def test_a_worker_that_leaks_on_a_gpu_is_replaced() -> None:
    """Its growth is read in the worker; the owner never initialises CUDA."""
    assert [False] == run(LEAKING_WORKER)


def test_pools_replicas_and_idle_models_give_gpu_memory_back() -> None:
    """An evicted model, a replaced replica and a model that sleeps leave nothing on the GPU."""
    ((both, one),) = run(OTHER_MODELS)
    assert both < 620_000_000
    assert one < 350_000_000  # with a workspace of cuBLAS


def test_a_model_on_the_cpu_is_shared_beside_a_torch_with_cuda() -> None:
    """As long as nothing has initialised CUDA, a fork is prepared, and its children compute."""
    ((answer, initialised),) = run(ON_CPU)
    assert isinstance(answer, float)
    assert not initialised


@pytest.mark.parametrize("swap", ["load_first", "drain_first"])
def test_reloads_beside_calls_lose_none_and_keep_the_memory_flat(swap: str) -> None:
    """Forty reloads under eight threads: each call gets its answer; under drain_first there is never a second model."""
    [[wrong, fewest, spread, above]] = run(f"swap = {swap!r}", BESIDE_CALLS)
    assert [] == wrong
    assert fewest > 20, "all threads called"
    assert spread < 290_000_000, "one model more or less, while an old one goes"
    if swap == "drain_first":
        assert above < 100_000_000


def test_a_hidden_gpu_has_a_named_error() -> None:
    """CUDA_VISIBLE_DEVICES hides it from torch."""
    lines = run(HIDDEN, CUDA_VISIBLE_DEVICES="")
    assert 2 == len(lines)
    assert all(name == "NotSupported" and "CUDA_VISIBLE_DEVICES" in text for name, text in lines)
