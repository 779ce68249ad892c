"""Whether a variable still takes effect, decided only by what the process has done."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modelguard.allocator import AllocatorInForce, Kind
from modelguard.environment import _knobs
from modelguard.environment._effect import Cuda, ThisProcess, effect_of
from modelguard.environment._knobs import Knob, When
from modelguard.errors import NotSupported

PRIMITIVES, DESCRIPTORS = _knobs.onednn_caches(64)
OPENMP, MKL = _knobs.threads(2, "2 CPUs for 1 worker")
OPENBLAS = _knobs.openblas_threads(2, "2 CPUs for 1 worker")
ARENAS = _knobs.GLIBC_MEMORY[0]


class History:
    """A process with the history that a test gives it."""

    def __init__(
        self,
        *,
        started_with: dict[str, str] | None = None,
        readable: bool = True,
        malloc: Kind | None = "glibc",
        capacity: int | None = None,
        thread_capacity: int | None = None,
        tells: bool = True,
        threads: dict[str, int] | None = None,
        grpc: bool | None = None,
        cuda: Cuda = "not imported",
        allocator: str = "",
    ) -> None:
        self.before = started_with or {}
        self.readable = readable
        self.kind = malloc
        self.capacity = capacity
        self.thread_capacity = thread_capacity
        self.tells = tells
        self.counts = threads or {}
        self.grpc = grpc
        self.cuda_state = cuda
        self.allocator = allocator

    def started_with(self) -> dict[str, str] | None:
        return self.before if self.readable else None

    def malloc(self) -> AllocatorInForce:
        if self.kind is None:
            raise NotSupported("telling", reason="this is macOS")
        return AllocatorInForce(self.kind, "/lib/it.so")

    def primitive_cache(self) -> int | None:
        self._tell()
        return self.capacity

    def descriptor_cache(self) -> int | None:
        self._tell()
        return self.thread_capacity

    def threads(self, name: str) -> dict[str, int]:
        self._tell()
        return self.counts

    def cuda(self) -> Cuda:
        return self.cuda_state

    def cuda_allocator(self) -> str:
        self._tell()
        return self.allocator

    def grpc_forks(self) -> bool | None:
        return self.grpc

    def _tell(self) -> None:
        if not self.tells:
            raise NotSupported("telling", reason="there are no names")


def knob(read_at: When = "any time", name: str = "MINE") -> Knob:
    return Knob(name, "1", read_at, "it", "does", "costs", "source")


@pytest.mark.parametrize(
    ("cap", "made"), [(PRIMITIVES, History(capacity=1024)), (DESCRIPTORS, History(thread_capacity=1024))]
)
def test_a_cache_that_exists_has_its_size(cap: Knob, made: History) -> None:
    """Once the cache is made, the variable is too late; the cache's size is the evidence."""
    state, evidence = effect_of(cap, None, made)
    assert "too late" == state
    assert "room for 1024 entries" in evidence


@pytest.mark.parametrize("cap", [PRIMITIVES, DESCRIPTORS])
def test_a_cache_that_does_not_exist_yet(cap: Knob) -> None:
    """Until the cache is made, the variable counts, even long after the import of torch."""
    state, evidence = effect_of(cap, None, History())
    assert "applied" == state
    assert "does not exist yet" in evidence


def test_a_cache_that_was_made_as_wanted() -> None:
    """A cache of the size that the preset wants is reported as applied."""
    assert "applied" == effect_of(PRIMITIVES, "64", History(capacity=64))[0]
    assert "applied" == effect_of(PRIMITIVES, None, History(capacity=64))[0]


def test_a_size_is_compared_as_the_library_reads_it() -> None:
    """Another notation of the size in force is not a value that came too late."""
    assert "kept" == effect_of(PRIMITIVES, " 064", History(capacity=64))[0]
    assert "kept" == effect_of(DESCRIPTORS, "64 entries", History(thread_capacity=64))[0]
    assert "too late" == effect_of(DESCRIPTORS, "0064", History(thread_capacity=1024))[0]


def test_the_users_room_counts_too() -> None:
    """The user's own value is kept where it is in force, and reported where it came too late."""
    assert "kept" == effect_of(PRIMITIVES, "8", History(capacity=8))[0]
    assert "kept" == effect_of(PRIMITIVES, "8", History())[0]
    state, evidence = effect_of(PRIMITIVES, "8", History(capacity=1024))
    assert "too late" == state
    assert "set to '8' inside this process, which has no effect: " in evidence


def test_a_library_that_cannot_be_inspected() -> None:
    """Where nothing can be seen, the report says so, and does not claim that it is too late."""
    state, evidence = effect_of(PRIMITIVES, None, History(tells=False))
    assert "applied" == state
    assert "it is unknown whether oneDNN has read it" in evidence
    assert "there are no names" in evidence


@pytest.mark.parametrize("variable", [OPENMP, MKL, OPENBLAS])
def test_threads_are_too_late_once_the_library_is_loaded(variable: Knob) -> None:
    """The file and the number of threads that it uses are the evidence."""
    assert "applied" == effect_of(variable, None, History())[0]
    state, evidence = effect_of(variable, None, History(threads={"/lib/libgomp.so.1": 8}))
    assert "too late" == state
    assert "/lib/libgomp.so.1 is loaded and uses 8 threads" in evidence


def test_threads_that_are_as_wanted_anyway() -> None:
    """A library that uses the wanted number anyway is fine; another one beside it that does not is reported."""
    assert "applied" == effect_of(OPENMP, None, History(threads={"a": 2, "b": 2}))[0]
    assert "too late" == effect_of(OPENMP, None, History(threads={"a": 2, "b": 8}))[0]


def test_a_list_of_threads_is_understood() -> None:
    """OpenMP takes a list for nested regions; the first number is the one that is in force."""
    assert "kept" == effect_of(OPENMP, "4,2", History(threads={"a": 4}))[0]


def test_what_was_there_from_the_start_was_in_time() -> None:
    """A number of threads that code changed later does not make the user's variable late."""
    history = History(started_with={"OMP_NUM_THREADS": "4"}, threads={"a": 1})
    assert "kept" == effect_of(OPENMP, "4", history)[0]


def test_exec_knobs_need_an_exec() -> None:
    """A variable that was missing at the program's start has no effect now."""
    assert ("needs exec", "it was not set when this program started") == effect_of(ARENAS, None, History())


def test_exec_knobs_that_were_there() -> None:
    """The preset's value counts as applied, another one as the user's."""
    assert "applied" == effect_of(ARENAS, "2", History(started_with={"MALLOC_ARENA_MAX": "2"}))[0]
    assert "kept" == effect_of(ARENAS, "5", History(started_with={"MALLOC_ARENA_MAX": "5"}))[0]


@pytest.mark.parametrize("before", [{}, {"MALLOC_ARENA_MAX": "9"}])
def test_an_exec_knob_set_from_inside_is_a_placebo(before: dict[str, str]) -> None:
    """A value set from inside, as by gunicorn's raw_env, is reported as without effect."""
    for value in ("2", "5"):
        state, evidence = effect_of(ARENAS, value, History(started_with=before))
        assert "needs exec" == state
        assert f"set to {value!r} inside this process, which has no effect: " in evidence


def test_a_start_that_cannot_be_read_any_more() -> None:
    """Where the initial variables are gone, a set one counts as applied with a remark; a missing one does not."""
    state, evidence = effect_of(ARENAS, "2", History(readable=False))
    assert "applied" == state
    assert "does not show whether" in evidence
    assert "needs exec" == effect_of(ARENAS, None, History(readable=False))[0]


@pytest.mark.parametrize(
    ("variable", "serves"), [(ARENAS, "jemalloc"), (ARENAS, "unknown"), (_knobs.JEMALLOC_MEMORY, "glibc")]
)
def test_a_knob_of_another_allocator(variable: Knob, serves: Kind) -> None:
    """A variable that nothing here reads is not supported; the allocator in force is the evidence."""
    state, evidence = effect_of(variable, None, History(malloc=serves))
    assert "not supported" == state
    assert "/lib/it.so" in evidence


def test_a_system_whose_allocator_is_unknown() -> None:
    """Away from Linux the reason is passed on."""
    assert ("not supported", "this is macOS") == effect_of(ARENAS, None, History(malloc=None))


@pytest.mark.parametrize(
    ("forks", "value", "expected"),
    [(None, None, "applied"), (True, None, "applied"), (False, None, "too late"), (False, "0", "kept")],
)
def test_grpc_reads_as_it_is_imported(forks: bool | None, value: str | None, expected: str) -> None:  # noqa: FBT001
    """Before the import the variable counts; afterwards only what the import found."""
    assert expected == effect_of(_knobs.GRPC_FORK_SUPPORT, value, History(grpc=forks))[0]


def test_custom_knobs() -> None:
    """A knob that modelguard does not know is set, with a remark on what is unknown."""
    assert ("applied", "it reads it each time") == effect_of(knob(), None, History())
    assert ("kept", "it reads it each time") == effect_of(knob(), "2", History())
    assert "it is unknown whether it has read it" in effect_of(knob("first use"), None, History())[1]
    assert "needs exec" == effect_of(knob("exec"), None, History())[0]


def make_proc(folder: Path, *, environ: bytes | None = None, maps: str | None = None) -> ThisProcess:
    own = folder / "proc" / "self"
    own.mkdir(parents=True)
    if environ is not None:
        (own / "environ").write_bytes(environ)
    if maps is not None:
        (own / "maps").write_text(maps)
    return ThisProcess(folder)


def test_variables_at_the_start(tmp_path: Path) -> None:
    """They are read from /proc, in any encoding."""
    process = make_proc(tmp_path, environ=b"A=1\0B=x=y\0C=\0D=\xff\0")
    assert {"A": "1", "B": "x=y", "C": "", "D": os.fsdecode(b"\xff")} == process.started_with()


@pytest.mark.parametrize("overwritten", [b"", b"\0\0\0", b"gunicorn: worker [app]\0\0\0"])
def test_variables_that_were_written_over(tmp_path: Path, overwritten: bytes) -> None:
    """A program may write its title over its variables: then nothing is claimed about them."""
    assert make_proc(tmp_path, environ=overwritten).started_with() is None


def test_a_system_without_proc(tmp_path: Path) -> None:
    """Without /proc nothing is guessed."""
    process = ThisProcess(tmp_path / "missing")
    assert process.started_with() is None
    with pytest.raises(NotSupported, match="maps cannot be read"):
        process.threads("OMP_NUM_THREADS")


def test_no_library_is_loaded(tmp_path: Path) -> None:
    """Without torch there is no cache, and without OpenMP there are no threads."""
    maps = "7f0000-7f1000 r-xp 00000000 08:01 12   /usr/lib/libc.so.6\n7f2000-7f3000 rw-p 00000000 00:00 0\n"
    process = make_proc(tmp_path, maps=maps)
    assert process.primitive_cache() is None
    assert process.descriptor_cache() is None
    assert {} == process.threads("OMP_NUM_THREADS")


def test_a_library_that_was_replaced_is_not_looked_into(tmp_path: Path) -> None:
    """The file of that name is another one now, so its symbols would be wrong."""
    maps = "7f0000-7f1000 r-xp 00000000 08:01 12   /x/libtorch_cpu.so (deleted)\n"
    process = make_proc(tmp_path, maps=maps)
    for ask in (process.primitive_cache, process.descriptor_cache, lambda: process.threads("MKL_NUM_THREADS")):
        with pytest.raises(NotSupported, match=r"/x/libtorch_cpu\.so was replaced since it was loaded"):
            ask()


def test_grpc_is_inspected_only_where_it_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check imports nothing."""
    monkeypatch.delitem(sys.modules, "grpc._cython.cygrpc", raising=False)
    assert ThisProcess().grpc_forks() is None
    module = ModuleType("cygrpc")
    module._GRPC_ENABLE_FORK_SUPPORT = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "grpc._cython.cygrpc", module)
    assert ThisProcess().grpc_forks() is True


SEGMENTS, PLANS, MODULES = _knobs.EXPANDABLE_SEGMENTS, _knobs.cudnn_plans(64), _knobs.LAZY_MODULES


@pytest.mark.parametrize("knob", [SEGMENTS, PLANS, MODULES], ids=lambda knob: knob.name)
@pytest.mark.parametrize("cuda", ["not imported", "not initialised"])
def test_gpu_settings_count_until_cuda_is_initialised(knob: Knob, cuda: Cuda) -> None:
    """Even after the import of torch."""
    assert "applied" == effect_of(knob, None, History(cuda=cuda))[0]


@pytest.mark.parametrize("knob", [SEGMENTS, PLANS, MODULES], ids=lambda knob: knob.name)
def test_gpu_settings_do_nothing_in_a_torch_without_cuda(knob: Knob) -> None:
    """Such a torch reads none of them for a GPU, and the report says so."""
    state, evidence = effect_of(knob, None, History(cuda="not built in"))
    assert ("not supported", "the torch in this process was built without CUDA") == (state, evidence)


def test_the_allocator_says_what_it_uses() -> None:
    """What torch has parsed is the evidence, in force or too late."""
    in_force = History(cuda="initialised", allocator="expandable_segments:True")
    assert "applied" == effect_of(SEGMENTS, None, in_force)[0]
    assert "applied" == effect_of(SEGMENTS, "expandable_segments:True", in_force)[0]
    state, evidence = effect_of(SEGMENTS, None, History(cuda="initialised"))
    assert ("too late", "torch's allocator uses its defaults") == (state, evidence)
    state, evidence = effect_of(SEGMENTS, "expandable_segments:True", History(cuda="initialised", allocator="a:1"))
    assert "too late" == state
    assert "torch's allocator uses 'a:1'" in evidence


def test_an_allocator_that_says_nothing() -> None:
    """An older torch is not accused of anything."""
    state, evidence = effect_of(SEGMENTS, None, History(cuda="initialised", tells=False))
    assert "applied" == state
    assert "it is unknown whether torch's CUDA allocator has read it" in evidence


def test_gpu_code_is_loaded_when_cuda_is_initialised() -> None:
    """After that the variable counts only if the program was started with it."""
    assert "too late" == effect_of(MODULES, None, History(cuda="initialised"))[0]
    started = History(cuda="initialised", started_with={"CUDA_MODULE_LOADING": "LAZY"})
    assert "applied" == effect_of(MODULES, "LAZY", started)[0]


def test_cudnn_says_nothing() -> None:
    """Nobody can see whether its cache was made, and the report does not guess."""
    state, evidence = effect_of(PLANS, None, History(cuda="initialised"))
    assert ("applied", "CUDA is initialised; whether cuDNN was used is unknown") == (state, evidence)
