"""Presets: what they set, how they are combined, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from modelguard import presets
from modelguard.allocator import AllocatorInForce
from modelguard.environment import _knobs
from modelguard.environment._effect import Cuda
from modelguard.environment._knobs import Knob
from modelguard.errors import InvalidOption
from modelguard.facts import _memory
from modelguard.presets import Preset


class Idle:
    """A process in which nothing has happened yet."""

    def started_with(self) -> dict[str, str]:
        return {}

    def malloc(self) -> AllocatorInForce:
        return AllocatorInForce("glibc", "/lib/libc.so.6")

    def primitive_cache(self) -> int | None:
        return None

    def descriptor_cache(self) -> int | None:
        return None

    def threads(self, name: str) -> dict[str, int]:
        return {}

    def cuda(self) -> Cuda:
        return "not imported"

    def cuda_allocator(self) -> str:
        raise AssertionError("CUDA is not initialised")

    def grpc_forks(self) -> bool | None:
        return None


def values(preset: Preset) -> dict[str, str]:
    return {knob.name: knob.value for knob in preset.knobs}


def mine(*settings: str) -> Preset:
    parts = [setting.split("=") for setting in settings]
    made = [Knob(name, value, "any time", "it", "does", "costs", "source") for name, value in parts]
    return Preset(settings[0], "Mine.", tuple(made))


def test_the_presets_are_these() -> None:
    """Their names are part of the interface."""
    assert (
        "torch-cpu",
        "torch-cpu-dynamic",
        "torch-cuda-dynamic",
        "torch-cuda-latency",
        "torch-cuda-shared",
        "prefork",
        "low-memory",
    ) == presets.names()


@pytest.mark.parametrize("name", presets.names())
def test_no_variable_appears_twice(name: str) -> None:
    """Each variable has one value, and each preset says what it is for."""
    preset = presets.get(name, cpus=2)
    assert len(preset.knobs) == len(values(preset))
    assert name == preset.name
    assert preset.does == presets.describe(name)


@pytest.mark.parametrize(
    ("count", "workers", "expected"), [(4, 1, "4"), (4, 2, "2"), (2.5, 1, "2"), (4, 3, "1"), (1, 4, "1"), (0.5, 1, "1")]
)
@pytest.mark.parametrize("name", ["torch-cpu", "torch-cpu-dynamic", "prefork"])
def test_threads_follow_cpus_and_workers(name: str, count: float, workers: int, expected: str) -> None:
    """All workers together use no more threads than there are CPUs, and each has at least one."""
    found = values(presets.get(name, cpus=count, workers=workers))
    assert (expected, expected) == (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"])


def test_cpus_are_what_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quota counts, not the machine's number of CPUs, and the preset says where it was found."""
    monkeypatch.setattr(_memory, "available_cpus", lambda: _memory.Cpus(1.5, "/sys/fs/cgroup/x/cpu.max"))
    preset = presets.get("torch-cpu")
    assert {"1"} == set(values(preset).values())
    assert "1.5 CPUs by /sys/fs/cgroup/x/cpu.max for 1 worker" in preset.explain()


def test_both_caches_of_onednn_are_limited() -> None:
    """One limit alone has almost no effect, so the preset always sets both."""
    found = values(presets.get("torch-cpu-dynamic", cpus=2))
    assert str(_knobs.DEFAULT_ENTRIES) == found["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == found["LRU_CACHE_CAPACITY"]


@pytest.mark.parametrize(("shapes", "expected"), [(1, 128), (10, 1280), (10**9, 65536)])
def test_known_shapes_all_fit(shapes: int, expected: int) -> None:
    """Where the shapes are known, there is room for every layer's entry of each of them."""
    found = values(presets.get("torch-cpu-dynamic", distinct_shapes=shapes, cpus=2))
    assert str(expected) == found["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == found["LRU_CACHE_CAPACITY"]


def test_a_server_that_forks_starts_no_threads_of_its_own() -> None:
    """OpenBLAS would start them when numpy is imported, and jemalloc when the program starts."""
    found = values(presets.get("torch-cpu", cpus=4) | presets.get("prefork", cpus=4))
    assert "1" == found["OPENBLAS_NUM_THREADS"]
    assert "background_thread:false" in found["MALLOC_CONF"]


def test_processes_on_one_gpu_get_equal_parts() -> None:
    """Nine tenths of the GPU are divided, and a part is never rounded up."""
    (allocator,) = {values(presets.get("torch-cuda-shared", workers=3))["PYTORCH_ALLOC_CONF"]}
    assert "per_process_memory_fraction:0.3,garbage_collection_threshold:0.8" == allocator
    assert (
        "per_process_memory_fraction:0.128" in values(presets.get("torch-cuda-shared", workers=7))["PYTORCH_ALLOC_CONF"]
    )


def test_more_processes_than_a_gpu_has_parts_for_are_refused() -> None:
    """A part is a thousandth of the GPU at least: torch would take none for all of it, or for nothing."""
    assert (
        "per_process_memory_fraction:0.001"
        in values(presets.get("torch-cuda-shared", workers=900))["PYTORCH_ALLOC_CONF"]
    )
    with pytest.raises(InvalidOption, match=r"workers=901: must be at most 900. Give the number of processes"):
        presets.get("torch-cuda-shared", workers=901)


@pytest.mark.parametrize(("shapes", "entries"), [(None, "1024"), (1, "128"), (10, "1280"), (1000, "10000")])
def test_cudnn_keeps_a_plan_for_each_shape(shapes: int | None, entries: str) -> None:
    """As many plans as the traffic needs, and never more than torch keeps by itself."""
    preset = presets.get("torch-cuda-dynamic", distinct_shapes=shapes)
    assert entries == values(preset)["TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT"]


def test_presets_are_composed() -> None:
    """Each variable appears once, in the order of its first mention, with the right preset's value."""
    together = mine("A=1", "B=1") | mine("B=2", "C=2")
    assert [("A", "1"), ("B", "2"), ("C", "2")] == list(values(together).items())
    assert "A=1 | B=2" == together.name


def test_the_parts_of_a_composition_stay_as_they_are() -> None:
    """A preset is a value: composing makes a new one."""
    left, right = mine("A=1"), mine("A=2")
    assert left | right != left
    assert {"A": "1"} == values(left)


def test_explanation() -> None:
    """The explanation has the value, reader, effect, costs and source of each variable."""
    preset = presets.get("torch-cpu-dynamic", cpus=2)
    text = preset.explain()
    for knob in preset.knobs:
        for part in (f"{knob.name}={knob.value}", knob.reader, knob.does, knob.costs, knob.source):
            assert part in text


def test_applying_sets_every_variable_that_is_free() -> None:
    """In a process that has done nothing yet, everything that is read later is set and reported."""
    environ: dict[str, str] = {}
    preset = presets.get("torch-cpu-dynamic", cpus=2)
    report = preset.apply(environ, process=Idle())
    assert values(preset) == environ
    assert {"applied"} == {outcome.state for outcome in report}
    assert report.ok


def test_applying_never_overrides_the_user() -> None:
    """What the user has set stays, and the report shows it."""
    environ = {"OMP_NUM_THREADS": "3"}
    report = presets.get("torch-cpu", cpus=2).apply(environ, process=Idle())
    assert "3" == environ["OMP_NUM_THREADS"]
    kept = report[0]
    assert ("OMP_NUM_THREADS", "kept", "3") == (kept.knob.name, kept.state, kept.value)
    assert report.ok


def test_applying_again_changes_nothing() -> None:
    """A preset may be applied in a configuration file and once more in the application."""
    environ: dict[str, str] = {}
    preset = presets.get("torch-cpu-dynamic", cpus=2)
    first = preset.apply(environ, process=Idle())
    assert first == preset.apply(environ, process=Idle())


def test_what_cannot_take_effect_is_not_set() -> None:
    """A variable that would only look set is left alone, and the report asks for what is left to do."""
    environ: dict[str, str] = {}
    report = presets.get("low-memory").apply(environ, process=Idle())
    assert {} == environ
    assert {"needs exec", "not supported"} == {outcome.state for outcome in report}
    assert {None} == {outcome.value for outcome in report}
    assert not report.ok


def test_a_report_reads_well() -> None:
    """One line per variable: its state, its value and the evidence."""
    report = presets.get("torch-cpu", cpus=2).apply({"OMP_NUM_THREADS": "3"}, process=Idle())
    lines = str(report).splitlines()
    assert 3 == len(lines)
    assert "kept          OMP_NUM_THREADS=3: no library that reads it is loaded yet" == lines[0]
    assert "applied       MKL_NUM_THREADS=2: no library that reads it is loaded yet" == lines[1]


def test_what_to_add_for_a_program() -> None:
    """What the user has set is not among it, whatever its value."""
    preset = mine("A=1", "B=2")
    assert {"A": "1", "B": "2"} == preset.environment({})
    assert {"B": "2"} == preset.environment({"A": ""})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("torch_cpu", "Did you mean 'torch-cpu'?"),
        ("pre-fork", "'prefork'"),
        ("lowmemory", "'low-memory'"),
        ("x", "Write one of"),
    ],
)
def test_an_unknown_preset(name: str, hint: str) -> None:
    """The error suggests the nearest name and lists all of them."""
    with pytest.raises(InvalidOption, match="is not a known preset") as raised:
        presets.get(name)
    assert hint in raised.value.fix
    assert all(known in raised.value.fix for known in presets.names())


@pytest.mark.parametrize("name", [None, 3, ["torch-cpu"]])
def test_a_name_that_is_not_text(name: object) -> None:
    """It is rejected like any other unknown preset."""
    with pytest.raises(InvalidOption, match="is not a known preset"):
        presets.get(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["workers", "distinct_shapes"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True, float("nan")])
def test_an_invalid_count(argument: str, value: object) -> None:
    """Numbers of processes and shapes are whole and positive, also for presets that ignore them."""
    with pytest.raises(InvalidOption, match=rf"{argument}=.*must be a whole number of at least 1"):
        presets.get("low-memory", **{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), "2", True])
def test_an_invalid_number_of_cpus(value: object) -> None:
    """The number of CPUs is positive; fractions are allowed."""
    with pytest.raises(InvalidOption, match=r"cpus=.*must be a number above 0"):
        presets.get("torch-cpu", cpus=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "fix"),
    [
        ("low-memory", "presets.get('low-memory')"),
        (None, "Write for example presets.get"),
        (3, "presets.get"),
        ([], "presets.get"),
    ],
)
def test_only_presets_are_composed(other: Any, fix: str) -> None:
    """A preset's name is not the preset: the error says how to get it, on either side of ``|``."""
    preset = presets.get("torch-cpu")
    for compose in (lambda: preset | other, lambda: other | preset):
        with pytest.raises(InvalidOption, match="joins two presets") as rejected:
            compose()
        assert fix in rejected.value.fix


@pytest.mark.parametrize("value", ["", "0", "abc", "0x10"])
def test_a_value_that_crashes_its_reader(value: str) -> None:
    """The user's value stays, but the report does not call it ok, and no program is started with it."""
    environ, preset = {"LRU_CACHE_CAPACITY": value}, presets.get("torch-cpu-dynamic", cpus=2)
    report = preset.apply(environ, process=Idle())
    assert not report.ok
    assert [("LRU_CACHE_CAPACITY", value)] == [
        (outcome.knob.name, outcome.value) for outcome in report if outcome.state == "invalid"
    ]
    assert value == environ["LRU_CACHE_CAPACITY"]
    with pytest.raises(InvalidOption, match=r"LRU_CACHE_CAPACITY=.* is read as 0, and torch crashes"):
        preset.environment(environ)


@pytest.mark.parametrize("value", ["", "0", "abc", "0x10"])
def test_a_knob_that_crashes_its_reader(value: str) -> None:
    """A user's own preset cannot set such a value either."""
    with pytest.raises(InvalidOption, match="torch crashes"):
        mine(f"LRU_CACHE_CAPACITY={value}")


@pytest.mark.parametrize("name", ["", "a\nexport PATH=/tmp", "a\rb", "a\u2028b", "a\0b"])
def test_a_name_that_would_be_a_line_of_its_own(name: str) -> None:
    """A name is written into a comment, and must not end it."""
    with pytest.raises(InvalidOption, match="must be printable text in one line"):
        Preset(name, "Mine.", ())


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        (None, "must be a tuple"),
        (["A=1"], "must be a tuple, not a list"),
        (("A=1",), "must be a Knob, not a str"),
        ((presets.get("low-memory").knobs[0],) * 2, "must set no variable twice"),
    ],
    ids=["none", "list", "text", "twice"],
)
def test_knobs_that_are_none(knobs: Any, why: str) -> None:
    """A preset has knobs, each for a variable of its own; anything else is rejected where it is made."""
    with pytest.raises(InvalidOption, match=f"knobs=.*{why}"):
        Preset("mine", "Mine.", knobs)
