"""Weights shared between processes that know nothing of each other, under a real server."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.harness import Server, wait_until

from modelguard import memory, weights
from modelguard.facts import _proc

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="what is shared is told by /proc"),
    pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="arrays are numpy's"),
]

TIMEOUT = 100.0

needs_torch = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("torch", "fastapi", "uvicorn")),
    reason="the service needs torch, fastapi and uvicorn",
)


def program(text: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a program in an interpreter of its own."""
    command = [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> str:
    """Its output, once it has ended successfully."""
    said, errors = process.communicate(timeout=TIMEOUT)
    assert 0 == process.returncode, errors[-3000:]
    return said.strip()


class TestPublishersThatStartTogether:
    PUBLISH = """
        import os, sys, time
        import numpy as np
        from modelguard import weights

        def make():
            with open(sys.argv[2], "a") as file:
                file.write("made\\n")
            time.sleep(0.5)
            return {"a": np.arange(100_000)}

        print("ready", flush=True)
        sys.stdin.readline()
        fresh = weights.publish(make, sys.argv[1], key="1").fresh
        print(fresh, weights.load(lambda arrays: int(arrays["a"].sum()), sys.argv[1]))
    """

    def test_publish_once(self, tmp_path: Path) -> None:
        """One of them makes the model, the others wait for it, and all use the same."""
        processes = [program(self.PUBLISH, tmp_path / "net", tmp_path / "made") for _ in range(4)]
        for process in processes:
            assert process.stdout is not None
            assert "ready\n" == process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        total = sum(range(100_000))
        assert [f"False {total}"] * 3 + [f"True {total}"] == sorted(map(told, processes))
        assert "made\n" == (tmp_path / "made").read_text()

    HANG = """
        import sys, time
        import numpy as np
        from modelguard import weights
        from modelguard.sharing import _weights

        def state_of(path):
            print("half written", flush=True)
            time.sleep(600)

        _weights.state_of = state_of
        weights.publish(np.ones(100_000), sys.argv[1])
    """

    def test_do_not_wait_for_a_dead_one(self, tmp_path: Path) -> None:
        """A publisher that is killed in the middle releases the lock, and nothing of its version stays."""
        hung = program(self.HANG, tmp_path / "net")
        try:
            assert hung.stdout is not None
            assert "half written\n" == hung.stdout.readline()
            assert ["new/0.npy"] == [path.as_posix()[-9:] for path in tmp_path.rglob("*.npy")]
            threading.Timer(0.5, hung.kill).start()
            import numpy as np

            assert weights.publish(np.zeros(9), tmp_path / "net", wait_timeout=TIMEOUT).fresh
        finally:
            hung.kill()
            hung.communicate()
        assert 1 == len([*tmp_path.rglob("*.npy")])
        assert not (tmp_path / "net.d" / "new").exists()


class TestWhatStandsInTheWay:
    # The kernel refuses to let a file grow past the limit, in the middle of a write, as it does on a full disk.
    LIMITED = """
        import resource, sys
        from modelguard.errors import PublishFailed
        from modelguard import weights

        if sys.argv[2] == "torch":
            import torch
            source = {"a": torch.ones(1_000_000)}
        else:
            import numpy
            source = {"a": numpy.ones(10), "b": numpy.ones(1_000_000)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        try:
            weights.publish(source, sys.argv[1])
        except PublishFailed as error:
            print(error.why)
    """

    @pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=needs_torch)])
    def test_a_file_that_cannot_grow_leaves_all_as_it_was(self, tmp_path: Path, library: str) -> None:
        """On a full disk the error has the reason, the old version stays current, and nothing is half written."""
        import numpy as np

        weights.publish(np.ones(3), tmp_path / "net")
        before = sorted(tmp_path.rglob("*"))
        assert "File too large" == told(program(self.LIMITED, tmp_path / "net", library))
        assert before == sorted(tmp_path.rglob("*"))
        assert 3 == weights.load(lambda array: array.sum(), tmp_path / "net")

    WITHOUT_DESCRIPTORS = """
        import os, resource, sys
        import numpy
        from modelguard import weights

        acts = (
            lambda: weights.load(len, sys.argv[1]),
            lambda: weights.publish(numpy.ones(4), sys.argv[1]),
            lambda: weights.publish(lambda: numpy.ones(4), sys.argv[1], key="new"),
        )
        acts[0]()  # imports what it needs
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        opened = []
        for act in acts:
            try:
                while True:
                    opened.append(os.dup(0))
            except OSError:
                pass
            try:
                act()
            except OSError as error:
                said = error
            while opened:
                os.close(opened.pop())
            print(type(said).__name__, said)
    """

    def test_without_descriptors_the_weights_are_not_blamed(self, tmp_path: Path) -> None:
        """A process that may open no more files hears that, and not that what is published is at fault."""
        import numpy as np

        weights.publish(np.ones(3), tmp_path / "net")
        loaded, *published = told(program(self.WITHOUT_DESCRIPTORS, tmp_path / "net")).splitlines()
        assert loaded.startswith("OSError [Errno 24]")
        for error in published:
            assert error.startswith("PublishFailed")
            assert "Too many open files. Close files" in error
        assert 3 == weights.load(len, tmp_path / "net")

    UNPRIVILEGED = """
        import os, sys
        import numpy
        from modelguard.errors import PublishFailed, WeightsRefused
        from modelguard import weights

        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            weights.publish(numpy.ones(9), sys.argv[1] + "/other")
        except PublishFailed as error:
            print(error.why, error.fix)
        try:
            weights.load(lambda array: array, sys.argv[1] + "/net")
        except WeightsRefused as error:
            print(error.why)
    """

    def test_missing_permission_is_told(self, tmp_path: Path) -> None:
        """Without permission neither function leaves anything behind, and both errors have a fix."""
        import numpy as np

        folder = tmp_path / "folder"
        folder.mkdir()
        weights.publish(np.ones(3), folder / "net")
        (folder / "net").chmod(0o000)
        before = sorted(tmp_path.rglob("*"))
        folder.chmod(0o500)
        try:
            said = told(program(self.UNPRIVILEGED, folder)).splitlines()
        finally:
            folder.chmod(0o700)
        assert [
            "Permission denied Publish to a folder that this user may write to.",
            "this user may not read it",
        ] == said
        assert before == sorted(tmp_path.rglob("*"))


# Five layers of 20 MB. Each worker writes down what its model answers, whenever it has loaded one.
SERVICE = """
import os
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from fastapi import FastAPI

from modelguard import Modified, guard
from modelguard import Swap, weights

torch.set_num_threads(1)
FOLDER = Path(os.environ["FOLDER"])
PATH = FOLDER / "net"
WIDTH = 2240

def build():
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(5)))

def make(seed=1):
    with (FOLDER / "made").open("a") as file:
        file.write(".")
    torch.manual_seed(seed)
    return build()

def answer(model):
    with torch.inference_mode():
        return model(torch.ones(1, WIDTH))[0, :8].tolist()

def write_down(model):
    (FOLDER / "answers" / str(os.getpid())).write_text(str(answer(model)))

if "MAPPED" in os.environ:
    weights.publish(make, PATH, key="1")
    renewed = Modified(PATH, atomic=True)
    net = guard(lambda: weights.load(build, PATH), reload_on=renewed, warmup=write_down, swap=Swap(defer=0))
else:
    net = guard(make, reload_on=None, warmup=write_down)

@asynccontextmanager
async def lifespan(app):
    await net.aload()
    yield

app = FastAPI(lifespan=lifespan)

@app.get("/")
def ask():
    with net.lease() as model:
        return answer(model)
"""


class Service(Server):
    """The service under uvicorn with three workers."""

    def __init__(self, folder: Path, *, mapped: bool) -> None:
        self.answers = folder / "answers"
        self.answers.mkdir(parents=True)
        (folder / "service.py").write_text(SERVICE)
        environment = {"FOLDER": str(folder)} | ({"MAPPED": "1"} if mapped else {})
        command = ("-m", "uvicorn", "service:app", "--workers", "3", "--port", "0")
        super().__init__(folder, *command, environment=environment)

    @property
    def pids(self) -> list[int]:
        """The workers."""
        return [int(pid) for pid in re.findall(r"Started server process \[(\d+)\]", self.log)]

    def wait_until_up(self) -> None:
        """Wait until each worker serves."""
        started = "Application startup complete"
        self.wait_until(lambda: 3 == len(self.pids) == self.log.count(started), "three workers that serve", TIMEOUT)

    def written(self) -> list[Any]:
        """The answers of each worker's model."""
        texts = [(self.answers / str(pid)).read_text() for pid in self.pids]
        return [json.loads(text) if text.endswith("]") else None for text in texts]

    def file(self, version: str, name: str) -> int:
        """Sum up a figure of all workers' mappings of a version, in bytes."""
        found = [one for pid in self.pids for one in _proc.smaps(pid) if f"/net.d/{version}" in one.name]
        return sum(one.sizes.get(name, 0) for one in found)


@contextlib.contextmanager
def serving(folder: Path, *, mapped: bool) -> Iterator[Service]:
    with Service(folder, mapped=mapped) as service:
        service.wait_until_up()
        yield service


@needs_torch
def test_three_uvicorn_workers_live_on_one_copy_and_follow_new_versions(tmp_path: Path) -> None:
    """Mapped weights are in memory once, answer as unmapped ones, and are replaced when new ones are published."""
    import torch

    with serving(tmp_path / "unmapped", mapped=False) as service:
        expected = service.ask().json
        unmapped = [memory.usage(pid) for pid in service.pids]
    with serving(tmp_path / "mapped", mapped=True) as service:
        assert "." == (service.folder / "made").read_text(), "one worker made the model, the others waited"
        assert [expected] * 4 == [service.ask().json, *service.written()]
        size = weights.current(service.folder / "net").bytes
        mapped = [memory.usage(pid) for pid in service.pids]
        assert size == pytest.approx(service.file("000001", "Pss"), rel=0.1)
        assert size / 20 > service.file("000001", "Private_Dirty")
        saved = {
            name: sum(getattr(one, name) for one in unmapped) - sum(getattr(one, name) for one in mapped)
            for name in ("pss", "private_dirty")
        }
        assert saved["pss"] > 1.6 * size, "two of three copies are gone"
        assert saved["private_dirty"] > 2.4 * size, "no worker has a copy of its own"

        torch.manual_seed(2)
        width = 2240
        newer = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(5)))
        weights.publish(newer, service.folder / "net", key="2")
        with torch.inference_mode():
            wanted = newer(torch.ones(1, width))[0, :8]
        wait_until(
            lambda: expected not in service.written() and None not in service.written(), "a reload in each worker"
        )
        # A model is warmed up before it serves: an answer may be the old one's for another moment.
        wait_until(lambda: service.ask().json != expected, "an answer by the new weights")
        for found in service.written():
            # This process may run with more threads, so the last digits may differ.
            assert torch.allclose(wanted, torch.tensor(found), atol=1e-5)
        wait_until(lambda: service.file("000001", "Rss") == 0, "the end of the old version's mappings")
        assert size == pytest.approx(service.file("000002", "Pss"), rel=0.1)


@needs_torch
def test_a_guard_gives_an_old_version_back(tmp_path: Path) -> None:
    """Reloads follow publications, calls never see half a model, and old versions do not stay mapped."""
    import torch

    from modelguard import Modified, Swap, guard

    def model(value: int) -> Any:
        layer = torch.nn.Linear(500, 500)
        torch.nn.init.constant_(layer.weight, value)
        torch.nn.init.constant_(layer.bias, value)
        return layer

    path = tmp_path / "net"
    weights.publish(model(1), path)
    net = guard(
        lambda: weights.load(lambda: torch.nn.Linear(500, 500), path),
        reload_on=Modified(path, atomic=True),
        swap=Swap(defer=0),
    )

    @net
    def values(layer: Any) -> set[float]:
        return {*layer.weight[::100, ::100].flatten().tolist(), *layer.bias[::100].tolist()}

    def mapped() -> set[str]:
        text = Path("/proc/self/maps").read_text()
        return set(re.findall(rf"{re.escape(str(path))}\.d/0*(\d+)-", text))

    try:
        assert {1.0} == values()
        for version in range(2, 6):
            weights.publish(model(version), path)
            wait_until(lambda: values() == {float(version)}, f"version {version}")  # noqa: B023 - it is called at once
        wait_until(lambda: mapped() == {"5"}, "the end of the old mappings")
    finally:
        net.close()
