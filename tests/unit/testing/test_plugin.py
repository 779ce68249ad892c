"""The plugin as pytest sees it: its marker, its fixtures' misuse, and its names."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

import modelguard.testing
from modelguard.errors import NotSupported
from modelguard.testing import plugin

PUBLIC = ["Clock", "Env", "Finished", "Loader", "Model", "assert_no_growth", "assert_shared_after_fork"]
FIXTURES = ["modelguard_clock", "modelguard_env", "modelguard_loader", "modelguard_off"]

RUN = ("-p", "no:cacheprovider", "--strict-markers")


def test_the_public_names_are_these() -> None:
    """`modelguard.testing.__all__` is this list, everything in it is there, and nothing else looks public."""
    assert PUBLIC == sorted(modelguard.testing.__all__)
    assert [] == [name for name in PUBLIC if not hasattr(modelguard.testing, name)]
    with pytest.raises(AttributeError, match="no attribute 'assert_growth'"):
        _ = modelguard.testing.assert_growth  # type: ignore[attr-defined]


def test_every_name_is_prefixed() -> None:
    """The fixtures are these, and each begins with modelguard_, so that none takes a name of the user's."""
    assert FIXTURES == sorted(plugin.__all__)
    found = [name for name, one in vars(plugin).items() if "FixtureFunction" in type(one).__name__]
    assert FIXTURES == sorted(found)


def test_the_plugin_imports_nothing_heavy() -> None:
    """A test run that uses none of it pays for modelguard itself and no more."""
    program = """if True:
        import sys, pytest
        import modelguard
        before = set(sys.modules)
        import modelguard.testing.plugin
        print(sorted(set(sys.modules) - before))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "['modelguard.testing', 'modelguard.testing.plugin']" == done.stdout.strip()


def test_the_marker_explains_itself(pytester: pytest.Pytester) -> None:
    """`pytest --markers` describes it."""
    pytester.runpytest("--markers", *RUN).stdout.fnmatch_lines(["@pytest.mark.modelguard_memory(limit): fail the *"])


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="what Python frees stays with its own allocator here"
)
def test_what_a_test_leaves_counts(pytester: pytest.Pytester) -> None:
    """A test that leaves more than its limit fails, with the amount; what it frees does not count."""
    pytester.makepyfile("""
        import pytest

        kept = []

        @pytest.mark.modelguard_memory("10 MB")
        def test_leaves():
            kept.append(b"x" * 30_000_000)

        @pytest.mark.modelguard_memory("10 MB")
        def test_frees():
            assert 30_000_000 == len(b"x" * 30_000_000)

        @pytest.mark.modelguard_memory("100 MB")
        def test_may():
            kept.append(b"x" * 30_000_000)
    """)
    result = pytester.runpytest(*RUN)
    result.assert_outcomes(failed=1, passed=2)
    # Of a process with a history some pages come back, or go, meanwhile.
    result.stdout.re_match_lines([r"private memory grew by (29|30|31)(\.\d)? MB during the test; 10 MB are allowed"])


@pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="what Python frees stays with its own allocator here"
)
def test_garbage_of_an_earlier_test_hides_nothing(pytester: pytest.Pytester) -> None:
    """Also what a finalizer lets go of, which only a second collection finds, is gone before a test is measured."""
    pytester.makepyfile("""
        import gc

        import pytest

        kept = []

        class Late:
            def __init__(self):
                self.me, self.data = self, b"x" * 40_000_000

            def __del__(self):
                cycle = [self.data]
                cycle.append(cycle)

        @pytest.fixture(scope="module", autouse=True)
        def no_collection_in_between():
            gc.disable()
            yield
            gc.enable()

        def test_before():
            Late()

        @pytest.mark.modelguard_memory("10 MB")
        def test_leaves():
            kept.append(b"x" * 30_000_000)
    """)
    pytester.runpytest(*RUN).assert_outcomes(failed=1, passed=1)


def test_a_marked_test_that_fails_shows_its_own_failure(pytester: pytest.Pytester) -> None:
    """A failure of the test itself is not hidden by its memory."""
    pytester.makepyfile("""
        import pytest

        @pytest.mark.modelguard_memory("1 MB")
        def test_it():
            kept = b"x" * 30_000_000
            assert kept is None
    """)
    result = pytester.runpytest(*RUN)
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*private memory grew*")


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("", "modelguard_memory(): takes exactly one argument, a size. Write @pytest.mark.modelguard_memory('50 MB')."),
        ("'1 MB', '2 MB'", "modelguard_memory('1 MB', '2 MB'): takes exactly one argument, a size"),
        ("limit='1 MB'", "modelguard_memory(limit='1 MB'): takes exactly one argument, a size"),
        ("'50'", "modelguard_memory='50': has no unit"),
        ("'a lot'", "modelguard_memory='a lot'"),
        ("'80%'", "modelguard_memory='80%'"),
        ("-5", "modelguard_memory=-5: must not be negative"),
        ("None", "modelguard_memory=None"),
        (
            "'10 kB'",
            "modelguard_memory('10 kB'): is too small: allocators request memory in pieces of up to a megabyte",
        ),
    ],
)
def test_an_impossible_marker_is_refused_at_collection(pytester: pytest.Pytester, use: str, why: str) -> None:
    """Before any test runs, pytest ends with a usage error that names the test, what is wrong with it, and the fix."""
    pytester.makepyfile(f"""
        import pytest

        def test_fine():
            print("it has run")

        @pytest.mark.modelguard_memory({use})
        def test_marked():
            pass
    """)
    result = pytester.runpytest("-s", *RUN)
    assert pytest.ExitCode.USAGE_ERROR == result.ret
    errors = result.stderr.str()
    assert f"test_marked: {why}" in errors
    assert "Write @" in errors or "Give " in errors
    result.stdout.no_fnmatch_line("*it has run*")


def test_where_memory_cannot_be_read_tests_may_be_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marked test fails there, and says what to do; that a skipped one has the marker is no error."""

    def private(*_: object, **__: object) -> int:
        raise NotSupported("memory.private()", reason="there is no /proc")

    monkeypatch.setattr("modelguard.facts._memory.private", private)
    pytester.makepyfile("""
        import pytest

        pytestmark = pytest.mark.modelguard_memory("50 MB")

        def test_one():
            pass

        @pytest.mark.skip
        def test_two():
            pass
    """)
    result = pytester.runpytest(*RUN)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["modelguard_memory('50 MB'): *no /proc*Skip the test on this platform."])


def test_every_impossible_marker_is_named(pytester: pytest.Pytester) -> None:
    """All of them at once, so that they can be fixed at once; also on a class or a module."""
    pytester.makepyfile("""
        import pytest

        pytestmark = pytest.mark.modelguard_memory("x MB")

        def test_one():
            pass

        class TestIt:
            def test_two(self):
                pass
    """)
    errors = pytester.runpytest(*RUN).stderr.str()
    assert "test_one: modelguard_memory='x MB'" in errors
    assert "TestIt::test_two: modelguard_memory='x MB'" in errors


@pytest.mark.parametrize("fixture", FIXTURES)
def test_a_fixture_of_a_wider_scope_cannot_have_ours(pytester: pytest.Pytester, fixture: str) -> None:
    """Each fixture lives as long as one test; if a session fixture requests it, pytest's error names it."""
    pytester.makepyfile(f"""
        import pytest

        @pytest.fixture(scope="session")
        def whole({fixture}):
            return {fixture}

        def test_it(whole):
            pass
    """)
    result = pytester.runpytest(*RUN)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*ScopeMismatch*function scoped fixture {fixture}*session scope*"])


def test_off_and_clock_exclude_each_other(pytester: pytest.Pytester) -> None:
    """A test that requests both the clock and plain calls fails, and is asked to choose."""
    pytester.makepyfile("""
        def test_it(modelguard_off, modelguard_clock):
            pass
    """)
    result = pytester.runpytest(*RUN)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*modelguard_off switches off the policies that modelguard_clock drives: use only one of them*"]
    )


def test_a_kept_fixture_says_whose_it_was(pytester: pytest.Pytester) -> None:
    """A clock or an environment used after its test names that test and says what to do."""
    pytester.makepyfile("""
        kept = []

        def test_one(modelguard_clock, modelguard_env):
            kept.extend([modelguard_clock, modelguard_env])

        def test_two():
            kept[0].advance("1h")

        def test_three():
            kept[1]("print()")
    """)
    result = pytester.runpytest(*RUN)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["*belongs to *::test_one, which has ended. Request the fixture in each test*"])


def test_a_load_that_a_test_holds_up_does_not_outlive_it(pytester: pytest.Pytester) -> None:
    """A test that forgets let_go() leaves no thread waiting."""
    pytester.makepyfile("""
        import threading
        from modelguard import TTL, guard

        def test_it(modelguard_clock, modelguard_loader):
            nlp = guard(modelguard_loader, reload_on=TTL("1h"), name="held up")
            nlp.load()
            modelguard_loader.hold()
            modelguard_clock.advance("1h")

        def test_nobody_waits():
            assert "modelguard-load-held up" not in {one.name for one in threading.enumerate()}
    """)
    pytester.runpytest(*RUN).assert_outcomes(passed=2)
