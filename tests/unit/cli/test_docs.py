"""`modelguard docs`: the pages, their sections, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.test_links import anchors

from modelguard.cli import _docs, main
from modelguard.diagnosis import CHECKS

PAGES = sorted(page for page in (Path(__file__).parents[3] / "docs").glob("*.md") if page.stem != "README")


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two pages."""
    text = "# One\n\nIntro.\n\n## Same `word`\n\n```sh\n# no heading\n```\n\n### Deep\n\nd\n\n## Same word\n\nlast\n"
    (tmp_path / "one.md").write_text(text)
    (tmp_path / "two.md").write_text("# The second page\n")
    monkeypatch.setattr(_docs, "folder", lambda: tmp_path)
    return tmp_path


def test_the_list_has_every_page_with_its_title(capsys: pytest.CaptureFixture[str]) -> None:
    """Each page of the documentation can be found without knowing its name."""
    assert 0 == main(["docs"])
    printed = capsys.readouterr().out
    for page in PAGES:
        title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert any(line.split(maxsplit=1) == [page.stem, title] for line in printed.splitlines()), page


def test_a_page_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """The output is the page, with or without its suffix."""
    expected = (PAGES[0].parent / "doctor.md").read_text(encoding="utf-8")
    for name in ("doctor", "doctor.md"):
        assert 0 == main(["docs", name])
        assert expected == capsys.readouterr().out


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("same-word", "## Same `word`\n\n```sh\n# no heading\n```\n\n### Deep\n\nd\n"),
        ("deep", "### Deep\n\nd\n"),
        ("Deep", "### Deep\n\nd\n"),
        ("same-word-1", "## Same word\n\nlast\n"),
    ],
)
def test_a_section_ends_at_the_next_heading_of_its_rank(section: str, expected: str) -> None:
    """Deeper headings and comments in code belong to the section."""
    assert expected == _docs.read(f"one#{section}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_sections_have_the_anchors_of_links(page: Path) -> None:
    """Whatever a link on a page can point to can be printed."""
    for anchor in anchors(page.read_text(encoding="utf-8")):
        assert _docs.read(f"{page.stem}#{anchor}").startswith("#")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.number)
def test_every_finding_of_the_doctor_names_a_section(check: object) -> None:
    """The command that a finding prints works."""
    number = check.number  # type: ignore[attr-defined]
    assert number in _docs.read(f"doctor#{number.lower()}")


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(
    ("reference", "fix"),
    [
        ("onee", "Did you mean 'one'?"),
        ("x", "The pages are: one, two."),
        ("", "The pages are: one, two."),
        ("../pyproject", "The pages are: one, two."),
        ("one#dep", "Did you mean 'deep'?"),
        ("two#x", "The sections are: the-second-page."),
    ],
)
def test_an_unknown_page_or_section(capsys: pytest.CaptureFixture[str], reference: str, fix: str) -> None:
    """The error suggests close matches, or lists what there is, and the status is 2."""
    assert 2 == main(["docs", reference])
    printed = capsys.readouterr()
    assert "" == printed.out
    assert fix in printed.err
    assert 1 == len(printed.err.splitlines())


def test_an_installation_without_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what to install."""
    monkeypatch.setattr(_docs.modelguard, "__file__", str(tmp_path / "site" / "modelguard" / "__init__.py"))
    with pytest.raises(_docs.InvalidOption, match="Install the wheel"):
        _docs.read("doctor")
