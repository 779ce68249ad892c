from __future__ import annotations

from pathlib import Path

import pytest

from modelguard.environment._allocator_files import Kind, kind_of
from modelguard.environment._allocator_problems import ProcessView, preload_entries, problems

LIBC = "/usr/lib/x86_64-linux-gnu/libc.so.6"
JEMALLOC = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"
TCMALLOC = "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4.5.10"
RAY = "/app/.venv/lib/python3.11/site-packages/ray/core/libjemalloc.so"


def process(*files: str, root: Path = Path("/nowhere"), **environ: str) -> ProcessView:
    """A process with these files mapped, one page each, and these variables at its start."""
    return ProcessView({file: number << 12 for number, file in enumerate(files, start=1)}, environ, (), root)


def kinds(process: ProcessView, kind: Kind, path: str, **environ: str) -> list[str]:
    return [problem.kind for problem in problems(process, environ, kind, path)]


def installed(root: Path, *files: str) -> Path:
    for file in files:
        (root / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (root / file.lstrip("/")).touch()
    return root


def test_a_plain_process_has_none() -> None:
    """The C library serves, and nothing is set."""
    assert [] == kinds(process(LIBC, "/usr/lib/libstdc++.so.6", PATH="/bin"), "glibc", LIBC, PATH="/bin")


def test_a_preload_in_force_is_not_a_problem(tmp_path: Path) -> None:
    """It may be named by its file, by a link, or without a folder."""
    root = installed(tmp_path, TCMALLOC)
    link = Path(root, "usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4")
    link.symlink_to(Path(TCMALLOC).name)
    for entry in (
        TCMALLOC,
        str(Path(TCMALLOC).with_name(link.name)),
        "libtcmalloc_minimal.so.4",
        f"/usr/$LIB/{link.name}",
    ):
        seen = process(LIBC, TCMALLOC, root=root, LD_PRELOAD=entry)
        assert [] == kinds(seen, "tcmalloc", TCMALLOC, LD_PRELOAD=entry)


def test_a_preload_that_does_not_exist_any_more_is_still_in_force() -> None:
    """An upgrade of the package leaves the old file mapped."""
    assert [] == kinds(process(JEMALLOC, LIBC, LD_PRELOAD=JEMALLOC), "jemalloc", JEMALLOC)


@pytest.mark.parametrize(("separator", "count"), [(":", 2), (" ", 2), (" : ", 2)])
def test_entries_are_separated_by_blanks_and_colons(separator: str, count: int) -> None:
    """The dynamic linker accepts both."""
    assert count == len(preload_entries({"LD_PRELOAD": separator.join([JEMALLOC, TCMALLOC])}))


def test_a_variable_set_from_inside_is_a_placebo(tmp_path: Path) -> None:
    """The file exists, and is not loaded."""
    root = installed(tmp_path, JEMALLOC)
    (found,) = problems(process(LIBC, root=root), {"LD_PRELOAD": JEMALLOC}, "glibc", LIBC)
    assert ("placebo", f"LD_PRELOAD names {JEMALLOC}, but it is not loaded") == (found.kind, found.seen)
    assert "--allocator jemalloc" in found.fix


def test_other_libraries_may_be_placebos_too(tmp_path: Path) -> None:
    """They are reported without the fix for allocators."""
    root = installed(tmp_path, "/opt/libother.so")
    (found,) = problems(process(LIBC, root=root), {"LD_PRELOAD": "/opt/libother.so"}, "glibc", LIBC)
    assert "placebo" == found.kind
    assert "--allocator" not in found.fix


def test_a_library_that_could_not_be_loaded(tmp_path: Path) -> None:
    """It was set in time, so setting it earlier is not the fix."""
    root = installed(tmp_path, JEMALLOC)
    (found,) = problems(process(LIBC, root=root, LD_PRELOAD=JEMALLOC), {}, "glibc", LIBC)
    assert "could not load it" in found.seen


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    """That holds whenever the variable was set."""
    assert ["missing"] == kinds(process(LIBC, root=tmp_path), "glibc", LIBC, LD_PRELOAD=JEMALLOC)
    assert ["missing"] == kinds(process(LIBC, root=tmp_path, LD_PRELOAD=JEMALLOC), "glibc", LIBC, LD_PRELOAD=JEMALLOC)


def test_of_two_preloaded_the_second_is_reported() -> None:
    """The first one serves."""
    seen = process(JEMALLOC, TCMALLOC, LIBC, LD_PRELOAD=f"{JEMALLOC}:{TCMALLOC}")
    (found,) = problems(seen, {}, "jemalloc", JEMALLOC)
    assert "two allocators" == found.kind
    assert found.seen.startswith(TCMALLOC)


def test_a_bundled_copy_is_private(tmp_path: Path) -> None:
    """A copy that serves only its package is reported, beside glibc and beside a preloaded allocator."""
    assert ["private copy"] == kinds(process(LIBC, RAY), "glibc", LIBC)
    assert ["private copy"] == kinds(process(JEMALLOC, LIBC, RAY, LD_PRELOAD=JEMALLOC), "jemalloc", JEMALLOC)


def test_jemallocs_setting_needs_jemalloc() -> None:
    """Without jemalloc nothing reads it, whether it was set at the start or later."""
    assert ["unused setting"] == kinds(process(LIBC, MALLOC_CONF="x:1"), "glibc", LIBC)
    assert ["unused setting"] == kinds(process(LIBC), "glibc", LIBC, MALLOC_CONF="x:1")
    assert [] == kinds(process(LIBC, MALLOC_CONF=""), "glibc", LIBC, MALLOC_CONF="")


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({"PATH": "/bin"}, {"PATH": "/bin", "MALLOC_CONF": "x:1"}, ["unused setting"]),
        ({"PATH": "/bin", "MALLOC_CONF": "x:0"}, {"PATH": "/bin", "MALLOC_CONF": "x:1"}, ["unused setting"]),
        ({"PATH": "/bin", "MALLOC_CONF": "x:1"}, {"PATH": "/bin", "MALLOC_CONF": "x:1"}, []),
        # A program has written its title over its variables, so nothing is known of them.
        ({"gunicorn: x": "1"}, {"PATH": "/bin", "MALLOC_CONF": "x:1"}, []),
    ],
)
def test_jemallocs_setting_may_come_too_late(before: dict[str, str], now: dict[str, str], expected: list[str]) -> None:
    """It is read once, at the start; without proof of a problem none is reported."""
    assert expected == kinds(process(JEMALLOC, **before), "jemalloc", JEMALLOC, **now)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/lib/x86_64-linux-gnu/libc.so.6", "glibc"),
        ("libc-2.31.so", "glibc"),
        ("libjemalloc.so", "jemalloc"),
        ("libjemalloc-1a2b3c4d.so.2", "jemalloc"),
        ("libmimalloc-secure.so.2.1", "mimalloc"),
        ("libtcmalloc_minimal_debug.so.4.5.10", "tcmalloc"),
        ("libtcmalloc.so.4", "tcmalloc"),
        ("libc10.so", None),
        ("libmalloc.so", None),
        ("libjemalloc.a", None),
        ("notlibjemalloc.so.2", None),
    ],
)
def test_an_allocators_file_is_known_by_its_name(name: str, kind: str | None) -> None:
    """Names may have the versions and hashes of distributions and wheels."""
    assert kind == kind_of(name)
