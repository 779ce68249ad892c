"""What `modelguard.testing` does with processes: presets, allocators, forks."""

from __future__ import annotations

import os
import select
import sys
import textwrap
from typing import Any, Literal

import pytest
from tests.process.harness import run_python

from modelguard import TTL, allocator, guard
from modelguard.errors import InvalidOption, NotSupported
from modelguard.testing import Env, assert_shared_after_fork

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, preloads and reads /proc"),
]

JUDGE = """
from modelguard import allocator
from modelguard.testing import assert_no_growth

kept = []

class Request:
    pass

def leaks_objects(_):
    kept.append(Request())

def leaks_bytes(_):
    kept.append(bytes(30_000))

assert_no_growth(lambda size: bytearray(size), [100, 30_000, 3_000_000])
for leaky in leaks_objects, leaks_bytes:
    try:
        assert_no_growth(leaky, [1], calls=500)
    except AssertionError as error:
        print(leaky.__name__, "grows with its calls" in str(error))
print(allocator.in_force().kind)
"""


# Not with small objects from mimalloc and tcmalloc: these tell nothing of what they have given out.
@pytest.mark.parametrize(
    ("kind", "objects"),
    [(kind, "pymalloc") for kind in ("none", "jemalloc", "mimalloc", "tcmalloc")]
    + [(kind, "malloc") for kind in ("none", "jemalloc")],
)
def test_leaks_are_found_under_every_allocator(
    modelguard_env: Env, kind: Literal["none", "jemalloc", "mimalloc", "tcmalloc"], objects: str
) -> None:
    """Small objects and large blocks that are kept are found, but where the page says not; what is freed passes."""
    if kind != "none" and not any(kind == found.kind for found in allocator.find()):
        pytest.skip(f"{kind} is not installed here")
    done = modelguard_env(JUDGE, allocator=kind, environ={"PYTHONMALLOC": objects})
    expected = ["leaks_objects True", "leaks_bytes True", "glibc" if kind == "none" else kind]
    if (kind, objects) == ("jemalloc", "malloc"):  # its thread caches may hide small objects, which the page says
        expected = expected[1:]
    assert expected == done.lines[-len(expected) :]


def test_our_own_calls_leave_nothing() -> None:
    """A guarded call and a reload leave nothing behind, however many there are."""
    # In a process without what other tests have imported, through which each collection would go.
    assert run_python(
        """
        from modelguard import guard, telemetry
        from modelguard.testing import assert_no_growth

        telemetry.set_hooks([])
        model = guard(object, reload_on=None, name="grows not")
        upper = model(lambda _model, text: text.upper())
        assert_no_growth(upper, ["a text", "another"], calls=500)
        assert_no_growth(lambda _: model.reload(), [1], calls=20, tolerance="1 kB")
        model.close()
        print("true")
        """,
        100,
    )


def test_a_preset_counts_whatever_this_machine_has_set(modelguard_env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset's value is in force in the program, unless the test itself says otherwise."""
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    program = "import os; print(os.environ['OMP_NUM_THREADS'])"
    assert "77" != modelguard_env(program, preset="torch-cpu").lines[0]
    assert ["5"] == modelguard_env(program, preset="torch-cpu,low-memory", environ={"OMP_NUM_THREADS": "5"}).lines


def test_bytes_that_are_no_text_are_replaced(modelguard_env: Env) -> None:
    """What a program prints is shown, whatever it is."""
    done = modelguard_env("import os; os.write(1, b'\\xff done')")
    assert ["\ufffd done"] == done.lines


def test_a_program_that_fails_or_hangs_is_told(modelguard_env: Env) -> None:
    """What it wrote is part of the failure; one that does not end is killed."""
    with pytest.raises(AssertionError, match=r"ended with 1(.|\n)*ValueError: no weights"):
        modelguard_env("raise ValueError('no weights')")
    with pytest.raises(AssertionError, match=r"did not end within 5 s(.|\n)*begun"):
        modelguard_env("import threading; print('begun', flush=True); threading.Event().wait()", timeout="5s")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"program": " "}, "must be Python source, and not empty"),
        ({"program": "1", "preset": "torch-gpu"}, "is not a known preset"),
        ({"program": "1", "preset": 3}, "preset=3"),
        ({"program": "1", "timeout": "soon"}, "timeout='soon'"),
        ({"program": "1", "environ": "A"}, "environ='A': must have names"),
        ({"program": "1", "environ": {"A": 1}}, "environ={'A': 1}: must have names and values of text"),
        ({"program": "1", "environ": {"A=B": "1"}}, "without '='"),
        ({"program": "1", "environ": {"A": "\0"}}, "null characters"),
    ],
)
def test_impossible_programs_are_refused(modelguard_env: Env, options: dict[str, Any], why: str) -> None:
    """Invalid arguments are rejected by name."""
    with pytest.raises(InvalidOption, match=why):
        modelguard_env(**options)


def read_all(model: list[str]) -> int:
    """Look at every string of a list."""
    return sum(len(word) for word in model)


def test_arrays_are_shared_and_objects_are_not() -> None:
    """Reading bytes copies nothing; reading objects copies their pages, and the failure says how much and why."""
    assert_shared_after_fork(bytes(20_000_000), lambda data: data.count(b"x"))
    words = [str(number) * 2 for number in range(200_000)]
    with pytest.raises(AssertionError, match=r"copied \d+(\.\d)? MB of its \d+(\.\d)? MB in a forked child"):
        assert_shared_after_fork(words, read_all)
    assert_shared_after_fork(words, read_all, tolerance="100 MB")


class Words:
    """A model of many objects."""

    def __init__(self) -> None:
        self.words = [str(number) * 3 for number in range(400_000)]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no immortal objects before CPython 3.12")
def test_a_guard_is_prepared_as_a_server_would() -> None:
    """On CPython 3.12 and newer a guard's objects are immortal in the child, and this process is as it was."""
    words = guard(Words, reload_on=None)
    with select.epoll():  # as of an event loop of the tests: it is no affair of the model's
        assert_shared_after_fork(words, lambda model: read_all(model.words))
    with words.lease() as model:
        assert sys.getrefcount(model.words[5]) < 1000
    words.close()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="no immortal objects before CPython 3.12")
def test_a_guard_is_judged_as_production_prepares_it() -> None:
    """A model that is renewed stays mortal in production, so it is copied here, and the failure says why."""
    words = guard(Words, reload_on=TTL("1h"), name="words")
    with pytest.raises(AssertionError, match=r"What stayed mortal: words: old models could never be freed after TTL"):
        assert_shared_after_fork(words, lambda model: read_all(model.words))
    assert_shared_after_fork(words, lambda model: read_all(model.words), immortalize=True)
    words.close()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this interpreter has immortal objects")
def test_insisting_on_immortal_objects_is_refused_where_there_are_none() -> None:
    """The reason is the interpreter's, and nothing is forked."""
    with pytest.raises(NotSupported, match="has no immortal objects"):
        assert_shared_after_fork(bytes(5_000_000), len, immortalize=True)


def test_a_child_that_fails_hangs_or_dies_is_told() -> None:
    """The child's own words are in the failure, and nothing waits for it beyond its time."""
    data = bytes(5_000_000)
    with pytest.raises(AssertionError, match=r"failed(.|\n)*ZeroDivisionError"):
        assert_shared_after_fork(data, lambda _: 1 / 0)
    with pytest.raises(AssertionError, match="exit status 3 and wrote nothing"):
        assert_shared_after_fork(data, lambda _: os._exit(3))
    with pytest.raises(AssertionError, match=r"did not end within 0\.5 s"):
        assert_shared_after_fork(data, lambda _: os.read(os.pipe()[0], 1), timeout="500ms")


def test_impossible_models_and_readers_are_refused() -> None:
    """A model too small to measure, a reader that is not callable and an unknown choice are rejected by name."""
    with pytest.raises(InvalidOption, match="Test with a model of 4 MB or more"):
        assert_shared_after_fork({"a": 1}, len)
    with pytest.raises(InvalidOption, match="read='all'"):
        assert_shared_after_fork(bytes(5_000_000), "all")  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match=r"immortalize='x': must be True, False or 'auto'"):
        assert_shared_after_fork(bytes(5_000_000), len, immortalize="x")  # type: ignore[arg-type]


def test_the_fixtures_work_in_each_worker_of_xdist(pytester: pytest.Pytester) -> None:
    """Spread over two processes, each worker has its own clock; an invalid marker is rejected there too."""
    pytest.importorskip("xdist", reason="needs pytest-xdist")
    source = """
        import pytest
        from modelguard import TTL, Swap, guard

        @pytest.mark.parametrize("hours", range(1, 7))
        @pytest.mark.modelguard_memory("50 MB")
        def test_it(modelguard_clock, modelguard_loader, hours):
            nlp = guard(modelguard_loader, reload_on=TTL("1h"), swap=Swap(defer=0))
            nlp.load()
            modelguard_clock.advance(f"{hours}h")
            assert (hours + 1, 1) == (nlp.status().generation, modelguard_loader.alive)
    """
    pytester.makepyfile(source)
    pytester.runpytest_subprocess("-n", "2", timeout=60).assert_outcomes(passed=6)
    pytester.makepyfile(textwrap.dedent(source).replace("50 MB", "50"))
    result = pytester.runpytest_subprocess("-n", "2", timeout=60)
    result.assert_outcomes(errors=6)
    assert "modelguard_memory='50': has no unit" in result.stdout.str() + result.stderr.str()
